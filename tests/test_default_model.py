"""The whole engine on the real default model: what it says, and that nothing around a request changes it.

In fp32 on a CPU a greedy request gives the same tokens alone and among preempted requests in chunks. That is a promise:
the kernels compute a row the same way whatever stands beside it. Batches, prefix hits and seeds are tested on small models
(tests/executor/test_forward.py) and, with this model, by `prove` (tests/engine/prove/test_ourselves.py).
"""

import random
from collections.abc import Iterator

import pytest

from penstock import LLM, RequestOutput, SamplingParams
from tests.support.default_file import needs_model

pytestmark = [
    needs_model,
    pytest.mark.timeout(600),
]

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
TOPICS = "rivers,bridges,bread,the moon,old ships,chess,winter,violins,maps,bees,glass,trains,salt,kites,owls,paper"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", max_model_len=512, kv_cache_bytes=2**28) as llm:
        yield llm


def prompts() -> list[str]:
    rng = random.Random(0)
    topics = TOPICS.split(",")
    starts = [
        "You are a careful writer who answers briefly and never invents anything. Tell me about",
        "In the style of an old encyclopedia, with dates and names where they are known, describe",
    ]
    return [f"{rng.choice(starts)} {rng.choice(topics)} and {rng.choice(topics)} (number {i})." for i in range(16)]


def tokens_of(results: list[RequestOutput]) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in results]


def test_it_answers_a_question_in_its_chat_format(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (result,) = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    assert "Paris" in result.outputs[0].text and result.outputs[0].finish_reason == "stop"


def test_a_script_written_for_vllm_runs(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str) and tokenizer.decode(tokenizer.encode(prompt)) == prompt
    params = llm.get_default_sampling_params()
    assert params.temperature < 0.5  # the bundled model rambles at 1
    (result,) = llm.generate({"prompt": prompt}, SamplingParams(temperature=0.0, logprobs=1), use_tqdm=False)
    (choice,) = result.outputs
    assert "Paris" in choice.text
    assert choice.logprobs is not None
    for token, found in zip(choice.token_ids, choice.logprobs, strict=True):
        assert found[token].rank == 1 and found[token].decoded_token == tokenizer.decode(token)
    (named,) = llm.chat(
        conversation,
        SamplingParams(temperature=0.0, max_tokens=8),
        use_tqdm=False,
        chat_template="{% for m in messages %}{{ prefix }}{{ m.content }}{% endfor %}",
        chat_template_kwargs={"prefix": "Q: "},
    )
    assert tokenizer.decode(named.prompt_token_ids) == "Q: What is the capital of France?"


@pytest.mark.slow
def test_preemption_and_chunked_prompts_do_not_change_a_request(llm: LLM) -> None:
    alone = []
    for prompt in prompts():
        assert llm.reset_prefix_cache()
        alone += tokens_of(llm.generate([prompt], GREEDY, use_tqdm=False))
    # Ten blocks for 16 requests that grow to three or four each, and prompts computed twenty tokens at a time.
    with LLM(
        dtype="float32",
        device="cpu",
        max_model_len=64,
        kv_cache_bytes=11 * 16 * 2 * 30 * 3 * 64 * 4,
        max_num_seqs=16,
        max_num_batched_tokens=20,
        enable_prefix_caching=False,
    ) as scarce:
        results = scarce.generate(prompts(), GREEDY, use_tqdm=False)
        assert scarce.get_metrics()["num_preemptions"] > 0
    assert tokens_of(results) == alone


@pytest.mark.slow
def test_drafts_change_no_token(llm: LLM) -> None:
    text = "the red fox, the grey owl, the red fox, the grey owl, the red"
    params = [
        SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, seed=4, top_k=8, top_p=0.9, min_p=0.02, max_tokens=40, min_tokens=30),
        SamplingParams(temperature=0.0, max_tokens=40, stop=["fox, the grey owl, the red"], logit_bias={28: 1.5}),
        SamplingParams(temperature=0.5, seed=5, max_tokens=40, repetition_penalty=1.1),
    ]
    expected = llm.generate([text] * len(params), params, use_tqdm=False)
    drafts = {"method": "ngram", "num_speculative_tokens": 6}
    with LLM(
        dtype="float32", device="cpu", max_model_len=512, kv_cache_bytes=2**26, speculative_config=drafts
    ) as drafting:
        results = drafting.generate([text] * len(params), params, use_tqdm=False)
        metrics = drafting.get_metrics()
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.outputs[0] == theirs.outputs[0]
    assert metrics["draft_tokens"] > metrics["accepted_tokens"] > 40

"""The whole engine on the real default model: what it says. That nothing around a request changes it is tested on small
models (tests/executor/test_same_bits.py, test_models.py) and, with this model, by `prove` (tests/prove/test_ourselves.py).
"""

from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from tests.support.default_file import needs_model

pytestmark = [
    needs_model,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", device="cpu", max_model_len=512, kv_cache_bytes=2**28) as llm:
        yield llm


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

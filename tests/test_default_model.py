"""The whole engine on the real default model: what it says, the forms that it keeps to, and the blocks of peers.

That nothing around a request changes it is tested on small models (tests/executor/test_digests.py, test_models.py) and,
with this model, by `prove` (tests/prove/test_ourselves.py).
"""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.core.tier_stats import Rates
from penstock.engine.core.tiers import Tiers
from penstock.engine.sampling_params import StructuredOutputs
from tests.support.default_file import needs_model
from tests.support.oracle_engine import SECRET
from tests.support.peer_rig import free_addresses, until

pytestmark = [needs_model, pytest.mark.timeout(900)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WORDS = ["rivers", "bridges", "bread", "moon", "ships", "chess", "winter", "violins", "maps", "bees", "glass", "trains"]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=64) as llm:
        yield llm


def test_it_answers_a_question_in_its_chat_format_however_it_is_asked(llm: LLM) -> None:
    tokenizer, params = llm.get_tokenizer(), SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert isinstance(prompt, str) and tokenizer.decode(tokenizer.encode(prompt)) == prompt
    assert llm.get_default_sampling_params().temperature < 0.5  # the bundled model rambles at 1
    (asked,), (result,) = llm.chat(QUESTION, params), llm.generate({"prompt": prompt}, params)
    (choice,) = result.outputs
    assert asked.outputs == [choice] and "Paris" in choice.text and choice.finish_reason == "stop"
    assert choice.logprobs is not None
    for token, logprobs in zip(choice.token_ids, choice.logprobs, strict=True):
        assert logprobs[token].rank == 1 and logprobs[token].decoded_token == tokenizer.decode(token)
    template = "{% for m in messages %}{{ prefix }}{{ m.content }}{% endfor %}"
    (named,) = llm.chat(QUESTION, params, chat_template=template, chat_template_kwargs={"prefix": "Q: "})
    assert tokenizer.decode(named.prompt_token_ids) == "Q: What is the capital of France?"


def hot(form: StructuredOutputs | None, n: int = 1, max_tokens: int = 900) -> SamplingParams:
    """Return parameters at a temperature where the model writes nonsense unless a grammar holds it."""
    return SamplingParams(temperature=1.5, seed=0, structured_outputs=form, n=n, max_tokens=max_tokens)


def test_every_form_is_kept_beside_free_requests_and_by_every_choice(llm: LLM) -> None:
    date, sums = r"[A-Z][a-z]{2,8}, \d{1,2} [A-Z][a-z]{2,8} \d{4}", r"\(\d{1,3}([+-]\d{1,3}){0,3}\)"
    forms = {
        date: StructuredOutputs(regex=date),
        "Paris|Berlin|Rome": StructuredOutputs(choice=["Paris", "Berlin", "Rome"]),
        sums: StructuredOutputs(grammar='start: "(" /[0-9]{1,3}/ (("+" | "-") /[0-9]{1,3}/)~0..3 ")"'),
    }
    free = hot(None, max_tokens=30)
    results = llm.chat([QUESTION] * 5, [free, *(hot(form, n=3) for form in forms.values()), free], use_tqdm=False)
    for pattern, result in zip(forms, results[1:4], strict=True):
        for choice in result.outputs:
            assert re.fullmatch(pattern, choice.text), choice.text
    assert results[0].outputs[0].token_ids == results[4].outputs[0].token_ids


def test_a_text_that_reads_like_a_special_token_is_text(llm: LLM) -> None:
    """The one that ends the model's turns, of all tokens: nothing but this text may follow the quote."""
    for form in (StructuredOutputs(json={"const": "<|im_end|>"}), StructuredOutputs(choice=['"<|im_end|>"'])):
        (result,) = llm.chat(QUESTION, hot(form), use_tqdm=False)
        assert json.loads(result.outputs[0].text) == "<|im_end|>"


def test_a_mask_that_allows_what_the_model_says_anyway_changes_nothing(llm: LLM) -> None:
    everything = StructuredOutputs(regex=r"(.|\n)*")
    params = [SamplingParams(temperature=0.0, max_tokens=24, structured_outputs=form) for form in (None, everything)]
    one, two = llm.chat([QUESTION] * 2, params, use_tqdm=False)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids


def num_announced(llm: LLM) -> int:
    """Return how many blocks the ranks of a peer have reported, which an empty step asks for."""
    core = llm._running()
    tiers = core.scheduler.tiers
    assert isinstance(tiers, Tiers)
    tiers.wake()
    core.step()
    return sum(len(keys) for keys in tiers.index.stored_keys.values())


@pytest.mark.slow
def test_every_rank_reads_from_the_same_rank_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads are taken to be worth it, however fast the machine is; tests/engine/test_tiers.py checks that choice."""
    monkeypatch.setattr(Rates, "is_load_faster", lambda *_: True)
    monkeypatch.setattr(Rates, "patience_s", lambda *_: 60.0)
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", SECRET)
    (address,) = free_addresses(1, 3)
    texts = [f"Letter {number}. " + " ".join(random.Random(number).choices(WORDS, k=60)) for number in range(3)]

    def engine(**options: Any) -> LLM:
        """Open an engine whose device holds two or three prompts."""
        sizes: dict[str, Any] = {"max_model_len": 256, "kv_cache_bytes": 20 * 737_280, "kv_host_bytes": "64MiB"}
        return LLM(device="cpu", tensor_parallel_size=3, **sizes, **options)

    def answers(llm: LLM) -> tuple[list[list[int]], list[int]]:
        """Return token ids, and how much of each prompt was cached."""
        params, results = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True), []
        for text in texts:
            results += llm.generate(text, params, use_tqdm=False)
            llm._running().settle()  # what is being saved has no room for what is loaded
        return [result.outputs[0].token_ids for result in results], [result.num_cached_tokens for result in results]

    with engine(kv_peer_listen=address) as first, engine(kv_peers=[address]) as second:
        cold, _ = answers(first)
        num_stored = first.get_metrics()["kv_host_stored_blocks"]
        until(lambda: num_announced(second) >= num_stored, "the blocks are announced")
        warm, hits = answers(second)
        assert warm == cold and min(hits) >= 64
        assert second.get_metrics()["kv_peer_hit_tokens"] >= 0.9 * sum(hits)
        assert second.get_metrics()["kv_peer_failed_loads"] == 0

"""The log-probability of a sampled token is bit-identical to that of the same token in a prompt, however both were computed.

A request therefore computes the same bits alone, in any batch, in chunks, after a prefix hit and after a preemption, which
makes greedy output reproducible under load. It holds on the CPU, where `batch_invariant` asks for what is so anyway;
tests/executor/kernels/test_triton_invariant.py tests what it asks of a GPU.
"""

import itertools
import random
from typing import Any

import pytest

from penstock import LLM, RequestOutput, SamplingParams
from penstock.executor.protocol import Sampling
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.refusals import cases, hardest, hardest_rows
from tests.support.small_models import folder

RNG = random.Random(5)
BEGINNING = [RNG.randrange(160) for _ in range(75)]
PROMPTS = [[*BEGINNING[: RNG.randrange(1, 76)], *(RNG.randrange(160) for _ in range(5))] for _ in range(7)]
OTHERS = [[RNG.randrange(160) for _ in range(RNG.randint(1, 90))] for _ in range(57)]
OPTIONS: dict[str, Any] = {"kv_cache_bytes": 2**22, "block_size": 8}
pytestmark = pytest.mark.usefixtures("two_threads")


def sequence(result: RequestOutput) -> list[int]:
    return [*result.prompt_token_ids, *result.outputs[0].token_ids]


def sampled(result: RequestOutput) -> list[float]:
    (output,) = result.outputs
    assert output.logprobs is not None
    return [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]


def generate(llm: LLM, prompts: list[list[int]], seed: int) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=17, logprobs=3, seed=seed, ignore_eos=True, temperature=1.0)
    return llm.generate([*prompts], params, use_tqdm=False)


def scored(llm: LLM, sequences: list[list[int]]) -> list[list[float]]:
    """Return the log-probability of every token but the first, computed as prompts without sampling."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    results = llm.generate([*sequences], params, use_tqdm=False)
    return [[next(iter(each.values())).logprob for each in result.prompt_logprobs or () if each] for result in results]


def check(results: list[RequestOutput], path: str, **options: Any) -> None:
    sequences = [sequence(result) for result in results]
    with LLM(path, skip_tokenizer=True, **options) as llm:
        values = scored(llm, sequences)
    for result, ids, logprobs in zip(results, sequences, values, strict=True):
        assert len(logprobs) == len(ids) - 1
        assert logprobs[len(result.prompt_token_ids) - 1 :] == sampled(result)


HARDEST = cases(__file__, "hardest for the same bits")
NAMES = [*(name for name, _ in HARDEST), "mistral-sliding", "qwen3.5", "qwen3-moe", "qwen3-next", "lfm2"]
CASES = [*itertools.product(NAMES, ("float32", "bfloat16"))]


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(CASES, HARDEST[:2]))
def test_samples_of_any_batch_chunk_and_prefix_hit_have_the_bits_of_a_prompt(case: str, dtype: str) -> None:
    path, options = str(folder(case)), {**OPTIONS, "dtype": dtype}
    with LLM(path, skip_tokenizer=True, max_num_batched_tokens=19, max_num_seqs=4, **options) as llm:
        results = [*generate(llm, PROMPTS, 1), *generate(llm, PROMPTS, 2), *generate(llm, PROMPTS[:1], 3)]
    assert sum((result.num_cached_tokens or 0) > 0 for result in results) >= 8
    with LLM(path, skip_tokenizer=True, max_num_seqs=64, **options | {"kv_cache_bytes": 2**24}) as llm:
        results += generate(llm, [*PROMPTS, *OTHERS], 1)
    check(results, path, **options)
    check(results[:15], path, max_num_batched_tokens=16, max_num_seqs=3, **options)


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(CASES, HARDEST[:4]))
def test_a_request_goes_on_with_the_same_bits_after_a_preemption(case: str, dtype: str) -> None:
    driver, sampling = Driver(executor_of(case, dtype=dtype)), Sampling(temperature=0.0, logprobs=-1)
    expected = driver.trace(driver.admit(PROMPTS[0], sampling), count=20)
    victim, other = driver.admit(PROMPTS[0], sampling), driver.admit(OTHERS[0])
    driver.generate(victim, count=9)
    driver.readmit(victim, slot=9)
    assert driver.trace(victim, other, count=20) == expected[9:]


@pytest.mark.parametrize("case", ["mistral-sliding", "qwen3.5", "deepseek-v3"])
def test_a_sequence_that_fills_the_context_is_scored_and_embedded(case: str) -> None:
    options: dict[str, Any] = {**OPTIONS, "max_model_len": 44, "block_size": 8}
    whole = [RNG.randrange(160) for _ in range(44)]
    with LLM(str(folder(case)), skip_tokenizer=True, max_num_batched_tokens=16, max_num_seqs=4, **options) as llm:
        (values,) = scored(llm, [whole])
        (last,), (mean,) = llm.embed(whole, use_tqdm=False), llm.embed(whole, pooling="mean", use_tqdm=False)
        assert len(last.outputs.embedding) == len(mean.outputs.embedding) == llm.info.hidden_size
    with LLM(str(folder(case)), skip_tokenizer=True, **options) as llm:
        assert scored(llm, [whole]) == [values] and len(values) == 43


@pytest.mark.parametrize(
    "case", hardest(["llama", "mistral-sliding", "gemma3", "qwen3.5"], "mistral-sliding", "gemma3")
)
def test_an_answer_fills_the_context_that_the_cache_holds_to_the_last_token(case: str) -> None:
    """With full attention, windows, both, and recurrent states; the longest context is what the block pool can hold."""
    sizes = {"block_size": 8, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    options: dict[str, Any] = {"skip_tokenizer": True, "dtype": "float32", **sizes}
    path, params = str(folder(case)), SamplingParams(max_tokens=1000, temperature=0.0, ignore_eos=True)
    with LLM(path, kv_cache_bytes=2**23, max_model_len="auto", **options) as llm:
        info = llm.info
        assert (info.max_model_len, info.context_limit) == (256, "model")
        (ample,) = llm.generate([BEGINNING[:20]], params, use_tqdm=False)
    pages = sum(group.most_pages(96, 16, 8) for group in info.groups)
    with LLM(path, kv_cache_bytes=(pages + 1) * info.block_bytes, max_model_len="auto", **options) as llm:
        longest, limit = llm.info.max_model_len, llm.info.context_limit
        # A request of windows alone needs the same pages at 96 tokens and beyond.
        assert (longest, limit) == ((256, "model") if case == "mistral-sliding" else (96, "kv_cache"))
        tokens = ample.outputs[0].token_ids[: longest - 20]
        for number in (20, longest // 2, longest - 1):
            prompt = [*BEGINNING[:20], *tokens][:number]
            (result,) = llm.generate([prompt], params, use_tqdm=False)
            assert [*prompt, *result.outputs[0].token_ids] == [*BEGINNING[:20], *tokens]
            assert result.outputs[0].finish_reason == "length"
        with pytest.raises(ValueError, match=f"prompt: {longest} tokens; the context holds {longest} with the answer"):
            llm.generate([[*BEGINNING[:20], *tokens]], params, use_tqdm=False)

"""`open_forward` beside the engine: the log-probability of every token that was sampled, bit for bit, however it was computed.

So a request computes the same bits alone, in any batch, in chunks, after a prefix hit and after a preemption, which makes
greedy output reproducible under load. It holds on the CPU, where `batch_invariant` asks for what is so anyway;
tests/executor/kernels/test_triton_invariant.py tests what it asks of a GPU.
"""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, RequestOutput, SamplingParams, open_forward
from penstock.executor.forward import Forward
from penstock.executor.protocol import ExecutorError, Sampling
from tests.executor.test_updates import changed, named
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.refusals import hardest, hardest_rows, table
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


def check(forward: Forward, results: list[RequestOutput]) -> None:
    sequences = [sequence(result) for result in results]
    found, logits = forward.logprobs(sequences), forward(sequences)
    for result, ids, values, rows in zip(results, sequences, found, logits, strict=True):
        assert len(values) == len(ids) - 1 and rows.shape == (len(ids), forward.info.vocab_size)
        assert values[len(result.prompt_token_ids) - 1 :].tolist() == sampled(result)
        logprobs = rows[:-1].float().log_softmax(-1)
        assert torch.equal(logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0], values)
        for row, entry in zip(logprobs[-17:], result.outputs[0].logprobs or (), strict=True):
            assert all(row[token] == each.logprob for token, each in entry.items())


HARDEST = [
    ("llama-wide", "bfloat16"),  # wide enough for one row to be summed in another order
    ("granite4-mamba-groups", "bfloat16"),  # states
    ("deepseek-v3", "float32"),  # latents
    ("gemma4", "bfloat16"),  # windows
    ("gpt-oss", "bfloat16"),
    ("gemma3", "float32"),
]
NAMES = [*(name for name, _ in HARDEST), "mistral-sliding", "qwen3.5", "qwen3-moe", "qwen3-next", "lfm2"]
CASES = [*itertools.product(NAMES, ("float32", "bfloat16"))]


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(CASES, HARDEST[:2]))
def test_what_was_sampled_in_any_batch_and_chunk_and_behind_hits_has_the_bits_of_the_function(
    case: str, dtype: str
) -> None:
    path, options = str(folder(case)), {**OPTIONS, "dtype": dtype}
    with LLM(path, skip_tokenizer=True, max_num_batched_tokens=19, max_num_seqs=4, **options) as llm:
        results = [*generate(llm, PROMPTS, 1), *generate(llm, PROMPTS, 2), *generate(llm, PROMPTS[:1], 3)]
    assert sum((result.num_cached_tokens or 0) > 0 for result in results) >= 8
    with LLM(path, skip_tokenizer=True, max_num_seqs=64, **options | {"kv_cache_bytes": 2**24}) as llm:
        results += generate(llm, [*PROMPTS, *OTHERS], 1)
    check(open_forward(path, **options), results)
    check(open_forward(path, max_num_batched_tokens=16, max_num_seqs=3, **options), results[:15])


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(CASES, HARDEST[:4]))
def test_a_request_goes_on_with_the_same_bits_after_a_preemption(case: str, dtype: str) -> None:
    driver, asked = Driver(executor_of(case, dtype=dtype)), Sampling(temperature=0.0, logprobs=-1)
    expected = driver.trace(driver.admit(PROMPTS[0], asked), count=20)
    victim, other = driver.admit(PROMPTS[0], asked), driver.admit(OTHERS[0])
    driver.generate(victim, count=9)
    driver.readmit(victim, slot=9)
    assert driver.trace(victim, other, count=20) == expected[9:]


@pytest.mark.parametrize("case", hardest(["qwen3-moe", "deepseek-v3", "gemma4-moe", "ernie4.5-moe"], "ernie4.5-moe"))
def test_training_data_have_the_experts_and_logprobs_of_the_function(case: str) -> None:
    """In chunks, after a preemption and beside requests without; a repeated prompt is computed anew."""
    path, options = str(folder(case)), {**OPTIONS, "dtype": "float32"}
    params = SamplingParams(max_tokens=60, seed=1, ignore_eos=True, temperature=1.0, return_training_data=True)
    forward = open_forward(path, **options)
    few = {"max_model_len": 144, "max_num_batched_tokens": 19, "max_num_seqs": 4}
    few |= {"kv_cache_bytes": 30 * forward.info.block_bytes}
    with LLM(path, skip_tokenizer=True, **options | few) as llm:
        others = [params, SamplingParams(max_tokens=20), params, params, params, params]
        results = llm.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0], *PROMPTS[2:5]], others, use_tqdm=False)
    assert sum(result.metrics.num_preemptions for result in results) > 0
    assert results.pop(1).outputs[0].routed_experts is None
    sequences = [sequence(result) for result in results]
    found = forward.logprobs(sequences)
    for result, ids, values, experts in zip(results, sequences, found, forward.routed_experts(sequences), strict=True):
        assert values[len(result.prompt_token_ids) - 1 :].tolist() == sampled(result)
        routed = result.outputs[0].routed_experts
        assert routed is not None and len(routed) == len(ids) - 1 and result.num_cached_tokens == 0
        assert torch.equal(torch.from_numpy(routed), experts[:-1])


def test_a_model_without_experts_has_training_data_without_them() -> None:
    path = str(folder("llama-wide"))
    with LLM(path, skip_tokenizer=True, **OPTIONS) as llm:
        (result,) = llm.generate([PROMPTS[0]], SamplingParams(return_training_data=True), use_tqdm=False)
    assert result.outputs[0].routed_experts is None and len(sampled(result)) == 16
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        open_forward(path, **OPTIONS).routed_experts([PROMPTS[0]])


def test_what_asks_for_it_changes_nothing_on_a_cpu() -> None:
    plain, invariant = (
        open_forward(str(folder("llama-wide")), batch_invariant=each, **OPTIONS) for each in (False, True)
    )
    assert invariant.info.fingerprint == plain.info.fingerprint  # so its blocks are the same, too
    for one, other in zip(plain(PROMPTS), invariant(PROMPTS), strict=True):
        assert torch.equal(one, other)


def test_pages_for_one_long_sequence_are_enough_for_any_number() -> None:
    """Among them one of the greatest length, which takes several steps; a window's pages serve again on the way."""
    options: dict[str, Any] = {"dtype": "float32", "block_size": 8, "max_num_seqs": 16}
    sequences = [[RNG.randrange(160) for _ in range(length)] for length in (1, 9, 256, 40, 1, 80, 120, 2)]
    for case in ("mistral-sliding", "gemma3", "qwen3.5"):
        ample = open_forward(str(folder(case)), kv_cache_bytes=2**23, **options)
        info = ample.info
        pages = sum(group.most_pages(256, 16, 8) for group in info.groups)
        scarce = open_forward(
            str(folder(case)), kv_cache_bytes=(pages + 1) * info.block_bytes, max_num_batched_tokens=16, **options
        )
        assert scarce.info.max_model_len == 256
        for one, other in zip(ample(sequences), scarce(sequences), strict=True):
            assert torch.equal(one, other)
        assert [len(values) for values in scarce.logprobs(sequences)] == [0, 8, 255, 39, 0, 79, 119, 1]


@pytest.mark.parametrize("case", ["mistral-sliding", "qwen3.5", "deepseek-v3"])
def test_a_sequence_that_fills_the_context_is_scored_and_embedded(case: str) -> None:
    options: dict[str, Any] = {**OPTIONS, "max_model_len": 44, "block_size": 8}
    whole = [RNG.randrange(160) for _ in range(44)]
    alone = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with LLM(str(folder(case)), skip_tokenizer=True, max_num_batched_tokens=16, max_num_seqs=4, **options) as llm:
        (scored,) = llm.generate([whole], alone, use_tqdm=False)
        (last,), (mean,) = llm.embed(whole, use_tqdm=False), llm.embed(whole, pooling="mean", use_tqdm=False)
        assert len(last.outputs.embedding) == len(mean.outputs.embedding) == llm.info.hidden_size
        for wrong, params in ((whole, SamplingParams(max_tokens=1)), ([*whole, 1], alone)):
            with pytest.raises(ValueError, match=f"prompt: {len(wrong)} tokens; the context holds 44"):
                llm.generate([wrong], params, use_tqdm=False)
        with pytest.raises(ValueError, match="prompt: 45 tokens; the context holds 44, so at most 44 can be given"):
            llm.embed([*whole, 1], use_tqdm=False)
    values = [next(iter(each.values())).logprob for each in scored.prompt_logprobs or () if each]
    assert open_forward(str(folder(case)), **options).logprobs([whole])[0].tolist() == values and len(values) == 43


@pytest.mark.parametrize(
    "case", hardest(["llama", "mistral-sliding", "gemma3", "qwen3.5"], "mistral-sliding", "gemma3")
)
def test_an_answer_fills_the_context_that_the_cache_holds_to_the_last_token(case: str) -> None:
    """With full attention, windows, both, and recurrent states; the longest context is what the block pool can hold."""
    options: dict[str, Any] = {
        "skip_tokenizer": True,
        "dtype": "float32",
        "block_size": 8,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
    }
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


def test_what_it_gives_is_a_constant_in_a_loss() -> None:
    forward = open_forward(str(folder("llama")), **OPTIONS)
    (old,), (logits,) = forward.logprobs([PROMPTS[0]]), forward([PROMPTS[0]])
    weight = torch.ones(1, requires_grad=True)
    ((weight - old).exp() * old * logits[:-1].float().logsumexp(-1)).sum().backward()
    assert weight.grad is not None and weight.grad.isfinite().all() and not old.requires_grad
    assert forward([]) == forward.logprobs([]) == []


def test_it_takes_other_weights_as_the_engine_does() -> None:
    forward, other = open_forward(str(folder("llama-wide")), **OPTIONS), changed(named("llama-wide"))
    with LLM(str(folder("llama-wide")), skip_tokenizer=True, **OPTIONS) as llm:
        llm.update_weights(other)
        results = generate(llm, PROMPTS[:3], 1)
        with pytest.raises(AssertionError):
            check(forward, results)
        forward.update_weights(other)
        check(forward, results)
        assert forward.info.fingerprint == llm.info.fingerprint


def test_what_it_cannot_compute_is_refused_by_name() -> None:
    forward = open_forward(str(folder("llama")), max_model_len=20, **OPTIONS)
    for wrong, message in table(__file__, "sequences"):
        with pytest.raises(ValueError, match=message):
            forward([[1, 2], wrong])
    with pytest.raises(ExecutorError, match="tensor_parallel_size: 2 given; a function runs one rank"):
        open_forward(str(folder("llama")), tensor_parallel_size=2, **OPTIONS)


def test_it_leaves_the_tiers_of_an_engine_beside_it_alone(tmp_path: Path) -> None:
    options = {**OPTIONS, "kv_host_bytes": 2**20, "kv_disk_path": str(tmp_path), "kv_disk_bytes": 2**22}
    with LLM(str(folder("llama")), skip_tokenizer=True, **options) as llm:
        check(open_forward(str(folder("llama")), **options), generate(llm, PROMPTS[:2], 1))

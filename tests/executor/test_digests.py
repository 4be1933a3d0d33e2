"""Results that ranks compute together: the fingerprint of a checkpoint, which is that of one rank, and sums.

Ranks are threads.

The log-probability of a sampled token is bit-identical to that of the same token in a prompt, however both were computed.

A request therefore computes the same bits alone, in any batch, in chunks, after a prefix hit and after a preemption, which
makes greedy output reproducible under load. It holds on the CPU, where `batch_invariant` asks for what is so anyway;
tests/executor/kernels/test_triton_invariant.py tests what it asks of a GPU."""

import itertools
import random
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock import LLM, RequestOutput, SamplingParams
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models import digests as digests_module
from penstock.executor.models.digests import SAMPLE_BYTES, Digests
from penstock.executor.models.load import LoadedModel, load_model
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorError, Sampling
from penstock.executor.ranks.ranked import WEIGHTS_S
from penstock.executor.ranks.wire import Rendezvous
from penstock.executor.ranks.worker import join
from tests.support.checkpoints import config_of, executor_of
from tests.support.driver import Driver
from tests.support.refusals import cases, hardest, hardest_rows
from tests.support.small_models import folder

CPU = torch.device("cpu")
TENSORS = {f"model.layers.{index}.weight": torch.randn(40, 64) for index in range(20)} | {
    "long": torch.arange(SAMPLE_BYTES),
    "short": torch.ones(3, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0),
}


def meeting_of(world: int) -> Callable[[int], RankGroup]:
    """Return what joins a rank with the others; each calls it in a thread of its own."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=world)
    host, port = listener.getsockname()
    fd = listener.detach()  # the first rank's store closes it
    return lambda rank: join(rank, world, Rendezvous(host, port, host, fd if rank == 0 else None), CPU)


def on_ranks(world: int, run: Callable[[RankGroup], Any]) -> list[Any]:
    """Call `run` on each rank; return the results, or the exceptions."""
    if world == 1:
        return [run(RankGroup())]
    meet = meeting_of(world)

    def be(rank: int) -> Any:
        group = meet(rank)
        try:
            return run(group)
        except Exception as error:
            return error
        finally:
            group.gather_bytes(b"")  # no rank leaves while another one still receives
            group.close()

    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(be, range(world)))


def fingerprint(group: RankGroup, tensors: dict[str, torch.Tensor] = TENSORS) -> bytes:
    digests = Digests(group, has_whole_experts=False)
    for name, tensor in tensors.items():
        digests.add(name, tuple(tensor.shape), tensor)
    return digests.fingerprint("a model")


def test_bytes_of_any_length_are_gathered_in_the_order_of_the_ranks() -> None:
    texts = [b"first", b"", b"x" * 1000]
    assert on_ranks(3, lambda group: group.gather_bytes(texts[group.rank])) == [texts] * 3
    assert RankGroup().gather_bytes(b"alone") == [b"alone"]


def test_links_for_another_thread_connect_all_ranks_before_a_step_can_run() -> None:
    def ranks_met(group: RankGroup) -> list[list[int]]:
        connect, links = group._connect, list[Mock]()
        assert connect is not None

        def recorded(name: str) -> Any:
            links.append(Mock(wraps=connect(name)))
            return links[-1]

        group._connect = recorded
        group.twin("experts on the move")
        (link,) = links
        return [[call.args[1] for call in calls.call_args_list] for calls in (link.send, link.recv)]

    assert on_ranks(3, ranks_met) == [[[1, 2], [1, 2]], [[0, 2], [0, 2]], [[0, 1], [0, 1]]]


def test_a_rank_that_has_its_weights_waits_for_as_long_as_another_one_may_read() -> None:
    limits_s = on_ranks(2, lambda group: group._backend.options._timeout.total_seconds())  # type: ignore[union-attr]
    assert min(limits_s) >= WEIGHTS_S


@pytest.mark.parametrize("name", ["model.layers.3.weight", "long", "short"])
@pytest.mark.parametrize("world", [1, 3])
def test_one_other_number_anywhere_makes_another_fingerprint(name: str, world: int) -> None:
    changed = {**TENSORS, name: TENSORS[name].clone()}
    changed[name].view(-1)[-1] += 1
    fingerprints = set(on_ranks(world, lambda group: fingerprint(group, changed)))
    assert len(fingerprints) == 1 and fingerprint(RankGroup()) not in fingerprints


def test_every_tensor_is_digested_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    digested: list[int] = []
    digest = digests_module._digest

    def count(parts: list[memoryview]) -> bytes:
        digested.extend(part.nbytes for part in parts)
        return digest(parts)

    monkeypatch.setattr(digests_module, "_digest", count)
    large = {name: torch.zeros(SAMPLE_BYTES + 1) for name in TENSORS}
    on_ranks(4, lambda group: fingerprint(group, large))
    assert sorted(size for size in digested if size > SAMPLE_BYTES) == [4 * (SAMPLE_BYTES + 1)] * len(large)


def test_ranks_that_read_different_files_say_so() -> None:
    """Two machines may have different versions in one place, and each digests only a part."""
    other = {name: tensor + 1 for name, tensor in TENSORS.items()}
    for error in on_ranks(2, lambda group: fingerprint(group, TENSORS if group.is_first else other)):
        assert isinstance(error, ExecutorError)
        assert "rank 1 has read other content than the ranks before it" in str(error)


def test_a_rank_that_fails_tells_the_others_instead_of_letting_them_wait() -> None:
    def run(group: RankGroup) -> bytes:
        with Digests(group, has_whole_experts=False) as digests:
            if group.rank == 1:
                raise OSError("the disk of rank 1 is gone")
            return digests.fingerprint()

    errors = on_ranks(3, run)
    assert [str(error) for error in errors] == ["the disk of rank 1 is gone"] * 3
    assert [type(error) for error in errors] == [ExecutorError, OSError, ExecutorError]


@pytest.mark.parametrize(("case", "world", "by_experts"), cases(__file__, "ranks that read their experts"))
def test_a_fingerprint_is_one_though_ranks_read_only_their_experts(case: str, world: int, by_experts: bool) -> None:
    read: list[set[str]] = [set() for _ in range(world)]

    def load(group: RankGroup) -> LoadedModel:
        config = config_of(case, group.world, enable_expert_parallel=by_experts and group.world > 1)
        checkpoint = open_checkpoint(config.model, config)
        read_one = checkpoint.read

        def reading(name: str) -> Any:
            read[group.rank].add(name)
            return read_one(name)

        checkpoint.read = reading  # type: ignore[method-assign]
        return load_model(config, CPU, group, lambda _line: None, checkpoint)

    expected = load(RankGroup()).fingerprint
    everything = set(read[0])
    read[0].clear()
    assert [loaded.fingerprint for loaded in on_ranks(world, load)] == [expected] * world
    assert set.union(*read) == everything
    experts = [{name for name in names if ".experts." in name} for names in read]
    held = sum(len(names) for names in experts)
    assert held < 1.5 * len(set.union(*experts)) if by_experts else not held


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_rows_sum_does_not_depend_on_its_place(world: int) -> None:
    """Backends cut a tensor into pieces and begin each at another rank: of three and more the order then shows."""
    rows = [torch.randn(512, generator=torch.Generator().manual_seed(rank)).bfloat16() for rank in range(world)]
    places = [(1, 0), (2, 1), (7, 0), (7, 3), (7, 6), (50, 49)]
    parts = [
        [torch.full((count, 512), 0.5).bfloat16().index_fill(0, torch.tensor(at), 0) for count, at in places]
        for _ in rows
    ]
    for own, row in zip(parts, rows, strict=True):
        for part, (_, at) in zip(own, places, strict=True):
            part[at] = row
    in_order = rows[0].float()
    for row in rows[1:]:
        in_order = in_order + row.float()
    for totals in on_ranks(world, lambda group: [group.sum(part.clone()) for part in parts[group.rank]]):
        assert len(totals) == len(places)
        for total, (_, at) in zip(totals, places, strict=True):
            assert torch.equal(total[at], in_order.bfloat16())


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


@pytest.mark.parametrize(("case", "dtype"), hardest_rows(CASES, HARDEST[1:2]))
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

"""Whole models on a pretended GPU, which watches: nothing is out of the order that it has to be in; and the watcher itself.

The same worlds run on a real GPU, where only wrong tokens would show.
"""

import functools
from typing import Any

import numpy as np
import pytest
import torch

from penstock.executor import outbox
from penstock.executor.models.weights import Weights
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.sampling.sampler import SampledTokens
from penstock.executor.step import inputs
from penstock.executor.step.graphs import CudaGraphs
from penstock.executor.tiers.cuda_copies import CudaCopier
from penstock.executor.uniproc import UniprocExecutor
from tests.support.pretended_gpu import PretendedGpu
from tests.support.pretended_memory import GPU
from tests.support.races import Race
from tests.support.small_models import folder, greedy
from tests.support.world import SAMPLINGS, World

CASE = "qwen3"
REAL = pytest.param("cuda", marks=pytest.mark.gpu)


def open_executor(monkeypatch: pytest.MonkeyPatch | None = None, **options: Any) -> UniprocExecutor:
    """On a GPU; the made-up one, if there is something to patch."""
    if monkeypatch is not None:
        monkeypatch.setattr(
            "penstock.executor.ranks.rank.warm_up", lambda *_: None
        )  # takes as long as a test, and nothing is in flight yet
        monkeypatch.setattr(Weights, "layers", lambda _, num_layers, build: [build(i) for i in range(num_layers)])
    config = ExecutorConfig(
        model=str(folder(CASE)),
        device="cuda",
        dtype="float32",
        kv_cache_bytes=2**19,
        block_size=4,
        max_num_seqs=6,
        max_model_len=80,
        **options,
    )
    return UniprocExecutor(config)


def check_greedy(world: World) -> None:
    """Check that each greedy request that was not changed got the tokens of transformers."""
    for request in world.over:
        if request.is_greedy:
            prompt, output = request.tokens[: request.num_prompt], request.tokens[request.num_prompt :]
            assert output == greedy(CASE, prompt, len(output))[0]


KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "plain": (False, {}),  # nothing but graphs and prompts, while the number of rows drifts
    "tiers": (False, {"kv_host_bytes": 2**16}),
    "mixed": (True, {"kv_host_bytes": 2**16}),  # masks, penalties, log-probabilities, embeddings
    "eager": (True, {"enforce_eager": True}),
}


@pytest.mark.timeout(600)  # half a minute of watched work, on a machine that others may use as well
@pytest.mark.parametrize(
    ("kind", "num_steps"), [("mixed", 20), *(pytest.param(kind, 40, marks=pytest.mark.slow) for kind in KINDS)]
)
def test_two_steps_in_flight_touch_nothing_at_the_same_time(
    kind: str, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are finished by another thread, which may lag behind: this one waits for nothing that it does."""
    is_mixed, options = KINDS[kind]
    folder(CASE)
    with PretendedGpu() as gpu:
        executor = open_executor(monkeypatch, **options)
        samplings = SAMPLINGS if is_mixed else SAMPLINGS[:2]
        world = World(executor, 1, samplings, is_mixed, lambda: gpu.thread("the finisher"))
        world.run(num_steps)
        executor.close()
    check_greedy(world)
    assert world.over and world.num_aborted
    if "kv_host_bytes" in options:
        assert world.num_saved > 10 and world.num_restored
    if "enforce_eager" not in options:
        assert sum(graph.num_replays for graph in gpu.graphs) > 10


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_two_steps_in_flight_leave_the_tokens_of_the_table(kind: str) -> None:
    is_mixed, options = KINDS[kind]
    executor = open_executor(**options)
    world = World(executor, 2, SAMPLINGS if is_mixed else SAMPLINGS[:2], is_mixed)
    world.run(2000)
    check_greedy(world)
    executor.close()


def _forget_the_second_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward pass write where the last draw's tokens still wait to be copied."""
    monkeypatch.setattr("penstock.executor.ranks.rank.CudaGraphs", functools.cache(CudaGraphs))


def _forget_to_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Outbox, "hold", lambda _: None)


def _forget_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs._Pinned, "wait", lambda block: block._tensor.numpy())


def _forget_the_restores(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CudaCopier.begin_step

    def begin_step(copier: CudaCopier, written: list[int]) -> None:
        copier._restored = None
        begin(copier, written)

    monkeypatch.setattr(CudaCopier, "begin_step", begin_step)


def _forget_the_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = CudaCopier.begin_step
    monkeypatch.setattr(CudaCopier, "begin_step", lambda copier, _: begin(copier, ()))


def _forget_the_originals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let memory that is being sent be reused at once."""
    monkeypatch.setattr(outbox, "HostCopy", lambda _, copies, event: HostCopy((), copies, event))
    monkeypatch.setattr(SampledTokens, "post", lambda sampled, to: _post_copies(sampled, to))


def _post_copies(sampled: SampledTokens, to: Outbox) -> None:
    sampled._host_copy = to.send([sampled.tokens.clone(), sampled._largest.clone()])


FORGOTTEN = {
    "the second pool of graphs": ("plain", _forget_the_second_pool, r"writes what stream \d+ of outbox.py reads"),
    "to hold before a draw": ("plain", _forget_to_hold, r"writes what stream \d+ of outbox.py reads"),
    "to wait for the last inputs": ("plain", _forget_the_inputs, "the host writes what the computing stream reads"),
    "to wait for restores": ("tiers", _forget_the_restores, "computing stream reads what .* cuda_copies.py writes"),
    "to wait for saves": ("tiers", _forget_the_saves, "computing stream writes what .* cuda_copies.py reads"),
    "to hold on to what is sent": ("eager", _forget_the_originals, "computing stream writes what .* outbox.py reads"),
}


FAST = ["to hold before a draw", "to wait for restores"]  # one of what is sent to the host, one of copies


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "what", [*FAST, *(pytest.param(what, marks=pytest.mark.slow) for what in FORGOTTEN if what not in FAST)]
)
def test_whatever_wait_is_forgotten_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, forget, message = FORGOTTEN[what]
    _, options = KINDS[kind]
    folder(CASE)
    with PretendedGpu() as gpu:
        forget(monkeypatch)
        world = World(open_executor(monkeypatch, **options), 1, SAMPLINGS[:2], False, lambda: gpu.thread("another"))
        with pytest.raises(Race, match=message):
            world.run(50)


# -- the watcher itself ------------------------------------------------------------------------------------


def test_streams_that_do_not_wait_for_each_other_race(gpu: PretendedGpu) -> None:
    numbers, side = torch.zeros(8, device=GPU), torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        numbers[:4].add_(1)
    numbers[4:].add_(1)  # others
    with pytest.raises(Race, match="the computing stream writes what .* writes"):
        numbers[3:5].add_(1)


def test_an_event_orders_what_was_launched_before_it(gpu: PretendedGpu) -> None:
    numbers, side = torch.zeros(8, device=GPU), torch.cuda.Stream(GPU)
    event = torch.cuda.Event()
    event.record()
    with torch.cuda.stream(side):
        side.wait_event(event)
        copy = numbers + 1
        event.record()
        later = numbers + 2
    torch.cuda.current_stream(GPU).wait_event(event)
    assert (copy + 1).tolist() == [2] * 8
    with pytest.raises(Race):
        later + 1
    with pytest.raises(Race):
        numbers.zero_()  # what was read second may still be


def test_memory_that_another_stream_still_reads_must_not_be_given_back(gpu: PretendedGpu) -> None:
    numbers, side = torch.zeros(8, device=GPU), torch.cuda.Stream(GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        numbers.to("cpu", non_blocking=True)
    del numbers
    with pytest.raises(Race, match="reads"):
        torch.ones(8, device=GPU)


def test_the_host_must_wait_before_it_reads_or_writes_pinned_memory(gpu: PretendedGpu) -> None:
    here, there = torch.zeros(8, dtype=torch.int32, pin_memory=True), torch.zeros(8, dtype=torch.int32, device=GPU)
    there.copy_(here, non_blocking=True)
    with pytest.raises(Race, match="the host writes"):
        here.numpy()[2:4] = 1
    torch.cuda.synchronize()
    here.numpy()[2:4] = 1
    back = there.to("cpu", non_blocking=True)
    with pytest.raises(Race, match="the host reads"):
        back.tolist()
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert back.tolist() == [0] * 8


def test_pinned_memory_comes_back_only_when_its_copy_is_over(gpu: PretendedGpu) -> None:
    for _ in range(3):
        torch.ones(8).pin_memory().to(GPU, non_blocking=True)
    assert torch.from_numpy(np.ones(8)).to(GPU).tolist() == [1] * 8


def test_rows_picked_by_index_are_all_that_is_touched(gpu: PretendedGpu) -> None:
    table, side = torch.zeros(8, 3, device=GPU), torch.cuda.Stream(GPU)
    rows = torch.tensor([1, 4], device=GPU)
    side.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(side):
        table[rows] = 1.0
    assert table[torch.tensor([0, 5], device=GPU)].sum() == 0
    with pytest.raises(Race):
        table.index_select(0, torch.tensor([3, 4], device=GPU))


def test_a_graph_runs_when_it_is_replayed_and_its_memory_is_the_next_ones(gpu: PretendedGpu) -> None:
    pool, given = torch.cuda.graph_pool_handle(), torch.arange(4, device=GPU)
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    with torch.cuda.graph(graphs[0], pool=pool):
        first = (given + 1) * 2
        given += 1
    assert given.tolist() == [0, 1, 2, 3]
    with torch.cuda.graph(graphs[1], pool=pool):
        second = given * 10
    graphs[0].replay()
    graphs[1].replay()
    assert first.tolist() == [2, 4, 6, 8] and second.tolist() == [10, 20, 30, 40]
    graphs[0].replay()  # its sum lies where the second's result does
    assert second.tolist() == [2, 3, 4, 5]

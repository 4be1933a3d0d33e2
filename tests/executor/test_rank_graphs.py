"""Graphs of decoding steps on two ranks: both capture in the same order, so that their collectives meet.

Two ranks in one process, on two threads, over gloo; the graphs are test_graphs.py's made-up ones. A rank that captured
or replayed while the other did not would wait for it in a collective, and the test with it. On a real GPU both share it,
without graphs: gloo waits for the host, and NCCL takes one rank per GPU.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import HashStore

from penstock.executor.parallel import Connections, RankGroup
from penstock.executor.protocol import EplbConfig, Executor, ExecutorConfig, ExpertUpdate, Sampling, Step, StepResult
from penstock.executor.ranks.rank import Rank
from penstock.executor.ranks.rank_builder import build_rank
from penstock.executor.ranks.rank_settings import choose_device
from penstock.executor.ranks.worker import _backend
from penstock.executor.step.runner import LaunchedStep
from tests.executor.test_digests import meeting_of
from tests.executor.test_graphs import DEVICES, GPU, PROMPTS, SMALL, Recorder, open_small, pretend_a_gpu
from tests.support.checkpoints import config_of, executor_of
from tests.support.driver import Driver
from tests.support.refusals import cases, hardest
from tests.support.small_models import greedy

WORLD = 2
TIMEOUT_S = 60.0
RECORDER: ContextVar[Recorder] = ContextVar("of the rank that runs in this thread")


class Staged:
    """Connections over gloo for tensors on any device: each call waits, and its tensors pass through host memory."""

    def __init__(self, gloo: Connections) -> None:
        self._gloo = gloo

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._run, getattr(self._gloo, name))

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_host(part: Any) -> Any:
            if isinstance(part, list):
                return [on_host(each) for each in part]
            if not isinstance(part, torch.Tensor):
                return part
            copies.append((part, part.to("cpu", copy=True)))
            return copies[-1][1]

        collective(*map(on_host, arguments)).wait()
        for tensor, held in copies:
            tensor.copy_(held)
        return Mock()  # whose `wait` is over


class Threads:
    """The parts of an executor that `driver_of` needs. Its ranks are threads, which make the calls of `worker.compute`."""

    def __init__(self, config: ExecutorConfig, recorders: list[Recorder]) -> None:
        self._threads = [ThreadPoolExecutor(1) for _ in range(WORLD)]
        self._launches: list[Future[LaunchedStep]] = []
        meet, device = meeting_of(WORLD), choose_device(config.device)

        def build(rank: int) -> Rank:
            met = meet(rank)  # held until the other rank has connected, too
            connect = cast(Any, met._connect)
            group = RankGroup(rank, WORLD, lambda name: cast(Connections, Staged(connect(f"staged/{name}"))), device)
            RECORDER.set(recorders[rank])
            return build_rank(config, group, device, lambda _: None)

        opening = [thread.submit(build, rank) for rank, thread in enumerate(self._threads)]
        self.ranks = [each.result(TIMEOUT_S) for each in opening]
        self.info = self.ranks[0].info

    def submit(self, step: Step) -> None:
        ranks = zip(self._threads, self.ranks, strict=True)
        self._launches = [thread.submit(rank.runner.launch, step) for thread, rank in ranks]
        self._launches[0].result(TIMEOUT_S)
        if not any(row.masked for row in step.rows):  # or else the others wait for what the first rank will sample
            self._launches[1].result(TIMEOUT_S)

    def set_masks(self, step_id: int, rows: np.ndarray, masks: np.ndarray) -> None:
        self.ranks[0].runner.sample_masked(self._launches[0].result(), rows, masks)
        self._launches[1].result(TIMEOUT_S)

    def collect(self) -> StepResult:
        return self.ranks[0].runner.finish(self._launches[0].result())

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


def driver_of(executor: Threads) -> Driver:
    return Driver(cast(Executor, executor))


@pytest.fixture
def open_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Threads, list[Recorder]]]]:
    opened: list[Threads] = []

    def open_(case: str, **options: Any) -> tuple[Threads, list[Recorder]]:
        if options.get("device") != "cuda":
            pretend_a_gpu(monkeypatch, RECORDER.get)
        recorders = [Recorder() for _ in range(WORLD)]
        opened.append(Threads(config_of(case, WORLD, **SMALL, **options), recorders))
        return opened[-1], recorders

    yield open_
    for executor in opened:
        executor.close()


@pytest.mark.slow
def test_work_of_the_first_rank_leaves_all_in_step(open_ranks: Callable[..., tuple[Threads, list[Recorder]]]) -> None:
    """Draws, and beside them edits, log-probabilities and masks, for which only the first half is a graph."""
    samplings = cases(__file__, "samplings of several ranks", Sampling=Sampling)
    outputs = []
    for eager in (True, False):
        executor, recorders = open_ranks("qwen3", enforce_eager=eager)
        driver = driver_of(executor)
        sequences = [driver.admit(prompt, s) for prompt, s in zip(PROMPTS, samplings, strict=True)]
        for several in (sequences, sequences[:1], sequences, sequences[:1], sequences, sequences[:1]):
            driver.advance(*several)
        driver.advance(*sequences[:1], masks={0: {17, 18}})
        driver.advance(*sequences[:1])
        outputs.append([sequence.output for sequence in sequences])
        tables = [r.runner._inputs.tokens for r in executor.ranks]
        assert all(torch.equal(tables[0][s.slot], tables[1][s.slot]) for s in sequences)
    assert outputs[0] == outputs[1]
    replays = [recorder.replays for recorder in recorders]
    # The last bucket is one row's; three rows have no second half.
    assert replays[0] == replays[1] == [0, 0, 2, 0, 0, 0, 5, 4]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("case", hardest(["qwen3", "qwen3-moe"], "qwen3-moe"))
def test_two_ranks_give_the_tokens_of_one_while_experts_move_beneath_captured_graphs(
    open_ranks: Callable[..., tuple[Threads, list[Recorder]]], case: str, device: str
) -> None:
    """A graph follows the plan that holds when it is replayed, and the rows that pad its batch count for no load."""
    options: dict[str, Any] = {"device": device, "enforce_eager": device == "cuda"}
    if case == "qwen3-moe":
        restless = EplbConfig(window=2, interval=1, redundant_experts=2, target=1.0, min_gain_per_gib=0.0)
        options |= {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": restless}
    executor, recorders = open_ranks(case, **options)
    driver = driver_of(executor)
    sequences = [driver.admit(prompt) for prompt in PROMPTS]
    updates: list[ExpertUpdate | None] = []
    while len(sequences[-1].output) < 40:  # three rows, in a bucket of four
        updates.append(driver.advance(*sequences).experts)
    got = [sequence.output[:40] for sequence in sequences]
    assert got == [greedy(case, prompt, 40)[0] for prompt in PROMPTS]
    if case == "qwen3-moe":
        last = [update for update in updates if update is not None][-1]
        assert last.num_rebalances >= 2 and last.num_moved > 0 and last.num_aborted == 0
    replays = [recorder.replays for recorder in recorders]
    assert replays[0] == replays[1] and (device == "cuda" or sum(replays[0]) >= 60)


@pytest.mark.parametrize("device", DEVICES)
def test_a_graph_holds_the_collectives_of_a_group_of_one(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A rank alone launches none, so this one is connected to itself, over NCCL on a GPU. What it sums
    comes out of a collective, which on a GPU only graphs launch."""
    where = torch.device("cpu" if device == "pretended" else device)
    group = RankGroup(device=where, is_ordered=True)
    group._backend = itself = Mock(wraps=_backend(HashStore(), 0, 1, "127.0.0.1", where))
    monkeypatch.setattr("penstock.executor.uniproc.RankGroup", lambda: group)
    if device == "pretended":
        executor = open_small(monkeypatch, recorder=Recorder(), chunks=(16,))
    else:
        executor = executor_of("qwen3", **SMALL, device=device)
    num_captured = itself.allgather.call_count
    driver = Driver(executor)
    assert driver.generate(*map(driver.admit, PROMPTS), count=9) == [greedy("qwen3", each, 9)[0] for each in PROMPTS]
    assert num_captured > 0 and (device == "pretended" or itself.allgather.call_count == num_captured)
    executor.close()


def test_collectives_run_in_the_order_of_the_stream() -> None:
    """NCCL then returns no handle to wait for, which a graph could not hold."""

    def gather(parts: list[list[torch.Tensor]], tensors: list[torch.Tensor], options: Any) -> None:
        for part in parts[0]:
            part.copy_(tensors[0])

    backend = Mock(gather=Mock(side_effect=gather))
    backend.allreduce.return_value = backend.broadcast.return_value = None
    group = RankGroup(0, WORLD, lambda _: backend)
    tensor = torch.ones(2, 3)
    assert group.sum(tensor) is tensor and group.broadcast(tensor) is tensor
    gathered = group.gather_columns(tensor, 5)
    assert gathered is not None and gathered.shape == (2, 5)
    calls = [(name, arguments[-1].asyncOp) for name, arguments, _ in backend.method_calls]
    assert calls == [("allreduce", False), ("broadcast", False), ("gather", False)]

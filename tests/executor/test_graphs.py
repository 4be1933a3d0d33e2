"""Graphs of decoding steps: which steps they take, what padding does, and that nothing changes but the speed.

On the CPU a made-up graph calls what it was made of. Its results are garbage until it is replayed, as a graph's are.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.engine.config import SchedulerConfig
from penstock.executor.outbox import HostCopy, Outbox
from penstock.executor.protocol import ExecutorConfig, ExecutorError, Row, Sampling, Step, StepResult
from penstock.executor.ranks import rank_settings, runner_factory
from penstock.executor.ranks.rank_settings import STEP_TOKENS_ON_GPU, RankSettings
from penstock.executor.step import graphs
from penstock.executor.step.graphs import CHUNK_BUCKETS, StepGraphs, choose_buckets
from penstock.executor.step.inputs import DeviceInputs, PaddedSize
from penstock.executor.step.layout import Layout
from penstock.executor.uniproc import UniprocExecutor
from tests.support.adapters import EVERYWHERE, Adapter, keep_in_slots
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver, Sequence
from tests.support.oracle import OracleExecutor
from tests.support.refusals import cases, hardest, hardest_rows
from tests.support.simulation import Simulation, submit
from tests.support.small_models import greedy
from tests.support.twins import sampling as sampling_twin
from tests.support.twins import torch_inputs, torch_ops

SMALL: dict[str, Any] = {"kv_cache_bytes": 2**20, "block_size": 4, "max_num_seqs": 6}
PROMPTS = [[5, 17, 3, 99, 42, 8, 71, 150], [7, 7, 21], [3, 1, 4, 1, 5, 9, 2, 6, 5]]


class Recorded:
    """Stands for a graph: its results have addresses, and a replay writes there."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call, self.num_replays = call, -1  # the first is the capture's own
        self.results = call()
        for tensor in tensors(self.results):
            tensor.fill_(-1 if not tensor.is_floating_point() else float("nan"))

    def replay(self) -> None:
        self.num_replays += 1
        for target, value in zip(tensors(self.results), tensors(self._call()), strict=True):
            target.copy_(value)


def tensors(results: Any) -> list[torch.Tensor]:
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for part in results for tensor in tensors(part)]


class Recorder:
    def __init__(self) -> None:
        self.graphs: list[Recorded] = []

    @property
    def replays(self) -> list[int]:
        """Return how often each graph was replayed, in the order of their captures."""
        return [graph.num_replays for graph in self.graphs]

    def capture(self, call: Callable[[], Any]) -> tuple[Recorded, Any]:
        self.graphs.append(Recorded(call))
        return self.graphs[-1], self.graphs[-1].results


# Measures a device of 80 GiB on which nothing takes any memory.
FREE_GPU = SimpleNamespace(
    **dict.fromkeys(("allocated", "start_peak", "peak", "reserved"), lambda: 0), device=lambda: (80 << 30, 80 << 30)
)


def pretend_a_gpu(
    monkeypatch: pytest.MonkeyPatch, open_pool: Callable[[], Recorder], chunks: tuple[int, ...] = ()
) -> None:
    """Let ranks that are opened from now on run as on a GPU. `chunks`: tokens of the graphs with prompts."""
    monkeypatch.setattr(runner_factory, "CHUNK_BUCKETS", chunks)
    monkeypatch.setattr(RankSettings, "is_on_gpu", True)
    monkeypatch.setattr(rank_settings, "CudaMeter", lambda _: FREE_GPU)
    monkeypatch.setattr(runner_factory, "select_input_ops", lambda _: torch_inputs)
    monkeypatch.setattr(runner_factory, "select_sampling_ops", lambda _: sampling_twin)
    monkeypatch.setattr(runner_factory, "CudaGraphs", open_pool)
    monkeypatch.setattr(Outbox, "send", lambda _, tensors: HostCopy((), [tensor.clone() for tensor in tensors], None))
    monkeypatch.setattr("penstock.executor.models.moe.Experts.is_fused", True)


def open_small(
    monkeypatch: pytest.MonkeyPatch,
    case: str | Path = "qwen3",
    recorder: Recorder | None = None,
    chunks: tuple[int, ...] = (),
    **options: Any,
) -> UniprocExecutor:
    """Open a model with its inputs made "on the device", and with graphs if there is a recorder for them."""
    pretend_a_gpu(monkeypatch, lambda: recorder or pytest.fail("a graph that was not asked for"), chunks)
    return executor_of(case, **SMALL, enforce_eager=recorder is None, **options)


def test_buckets_end_with_what_the_engine_may_run_at_once() -> None:
    assert choose_buckets(1) == (1,)
    assert choose_buckets(6) == (1, 2, 4, 6)
    assert choose_buckets(256) == (1, 2, 4, 8, 16, 24, 32, *range(48, 257, 16))
    assert choose_buckets(2000)[-2:] == (496, 512)


GPU = pytest.mark.gpu
DEVICES = ["pretended", pytest.param("cuda", marks=GPU)]
RECURRENT = ("qwen3.5", "granite4-mamba", "lfm2", "nemotron-h")
PROMPTS_IN_GRAPHS = ("qwen3", "gemma3", "qwen3-moe", "opt", "deepseek-v2-lite", *RECURRENT)


OTHER_WAYS = [pytest.param("pretended", True, marks=pytest.mark.slow)]
OTHER_WAYS += [pytest.param("cuda", False, marks=GPU), pytest.param("cuda", True, marks=(GPU, pytest.mark.slow))]


@pytest.mark.parametrize(("device", "is_eager"), [("pretended", False), *OTHER_WAYS])
@pytest.mark.parametrize("case", hardest(PROMPTS_IN_GRAPHS, "gemma3", "qwen3-moe", "deepseek-v2-lite"))
def test_graphs_give_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, case: str, device: str, is_eager: bool
) -> None:
    """Prompts alone, several at once, and beside rows that decode; what pads a graph reads nothing and writes to block 0.
    Without graphs, too, inputs are made on the device."""
    recorder = Recorder()
    if device == "cuda":
        executor = executor_of(case, **SMALL, device=device, enforce_eager=is_eager)
    else:
        executor = open_small(monkeypatch, case, None if is_eager else recorder, chunks=(4, 16))
    assert isinstance(executor._rank.runner._inputs, DeviceInputs)
    assert (executor._rank.runner.graphs is None) == is_eager
    executor._rank.kv[1:].fill_(float("nan"))
    driver = Driver(executor)
    sequences = [driver.admit(PROMPTS[0])]
    driver.advance(*sequences, chunk=3)
    driver.advance(*sequences, chunk=5)
    sequences += [driver.admit(prompt) for prompt in PROMPTS[1:]]
    driver.advance(*sequences, chunk=5)
    if recorder.graphs:
        assert recorder.replays[:2] == [2, 1]  # of 16 tokens, of 4
    while min(len(sequence.output) for sequence in sequences) < 9:
        driver.advance(*sequences, chunk=5)
    for sequence, prompt in zip(sequences, PROMPTS, strict=True):
        assert sequence.output[:9] == greedy(case, prompt, 9)[0]
    assert not recorder.graphs or sum(recorder.replays) >= 10
    executor.close()


@pytest.mark.parametrize("device", DEVICES)
def test_graphs_of_adapters_equal_merged_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str) -> None:
    """Prompts and single tokens, beside rows without an adapter; three adapters take turns in two slots."""
    recorder, options = Recorder(), {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    if device == "cuda":
        executor = executor_of("qwen3", **SMALL, device=device, **options)
    else:
        compute_with(monkeypatch, torch_ops)
        keep_in_slots(monkeypatch)
        executor = open_small(monkeypatch, "qwen3", recorder, (4, 24), **options)
    # The third one has fewer numbers than the second, whose slot it gets.
    targets = EVERYWHERE, EVERYWHERE, ("v_proj", "up_proj")
    adapters = [Adapter("qwen3", tmp_path / str(seed), seed, targets[seed], rank=6 - seed) for seed in range(3)]
    keys = [executor.load_adapter(str(adapter.path)).key for adapter in adapters]
    for number, (first, second) in enumerate(((1, 0), (2, 0)), 1):
        driver = Driver(executor)
        adapted = [driver.admit(PROMPTS[0], adapter=keys[first]), driver.admit(PROMPTS[1], adapter=keys[second])]
        got = driver.generate(*adapted, driver.admit(PROMPTS[2]), count=6, chunk=9)
        expected = [adapters[first].tokens(PROMPTS[0], 6), adapters[second].tokens(PROMPTS[1], 6)]
        assert got == [*expected, greedy("qwen3", PROMPTS[2], 6)[0]]
        # Without adapters and with them: 24 tokens, 4 tokens, then forward pass and draw of 6, 4, 2 and 1 rows.
        replays = recorder.replays
        assert device == "cuda" or replays == [0, number, 0, 0, *[0] * 6, 5 * number, 5 * number, *[0] * 8]
    executor.unload_adapter(keys[1])  # which has no slot any more


def test_steps_that_no_graph_of_prompts_takes_are_launched_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than the largest has, prompt log-probabilities, and too many rows of several tokens. The answer after
    prompt log-probabilities comes from graphs."""
    executor, recorder = open_small(monkeypatch, recorder=Recorder(), chunks=(4, 8, 128)), Recorder()
    several = [Layout([Row(slot, 0, 2, True) for slot in range(count)]) for count in (8, 32, 33)]
    captured = executor._rank.runner.graphs
    assert captured and [captured.size_for(layout) is not None for layout in several] == [True, True, False]
    executor = open_small(monkeypatch, recorder=recorder, chunks=(4, 8))
    driver = Driver(executor)
    driver.advance(driver.admit(PROMPTS[2]))
    asking = driver.admit(PROMPTS[1], Sampling(temperature=0.0, prompt_logprobs=1))
    driver.advance(asking, chunk=2)
    driver.advance(asking)
    monkeypatch.setattr(graphs, "MAX_SEVERAL", 1)
    driver.advance(driver.admit(PROMPTS[1]), driver.admit(PROMPTS[1]))
    assert not any(recorder.replays)
    driver.advance(asking)
    assert recorder.replays == [0] * 8 + [1, 1]  # forward pass and draw of one row


class Idle(OracleExecutor):
    """Computes nothing, and keeps the layouts of its steps."""

    layouts: list[Layout]

    def submit(self, step: Step) -> None:
        self._queue.append(step)

    def collect(self) -> StepResult:
        step = self._queue.popleft()
        self.layouts.append(Layout(step.rows))
        return StepResult(step.step_id, [7 if row.sample else -1 for row in step.rows])


# Rate: requests a second, of which about 64 run at a time; 0: all 256 at once.
TRAFFIC = [(512, 128, 0, 17), (512, 128, 36, 3), (1500, 150, 0, 48), (1500, 150, 16, 53)]


@pytest.mark.parametrize(("prompt", "answer", "rate", "most"), hardest_rows(TRAFFIC, TRAFFIC[:2]))
def test_only_steps_beyond_the_largest_graph_replay_none(prompt: int, answer: int, rate: int, most: int) -> None:
    """docs/decisions/steps-without-graphs.md has the counts, and the times of a step, which are estimates."""
    config, rng = SchedulerConfig(max_num_batched_tokens=STEP_TOKENS_ON_GPU), random.Random(0)
    executor = Idle(ExecutorConfig(device="cuda", kv_cache_bytes=2**22))
    executor.layouts, simulation = [], Simulation(executor, config)
    times_s = accumulate(rng.expovariate(rate) if rate else 0.0 for _ in range(256))
    arrivals = deque((at_s, submit(f"{number}", [number] * prompt, answer)) for number, at_s in enumerate(times_s))
    while arrivals or simulation.scheduler.has_work():
        while arrivals and (arrivals[0][0] <= simulation.now_s or not simulation.scheduler.has_work()):
            at_s, message = arrivals.popleft()
            simulation.now_s = max(simulation.now_s, at_s)
            simulation.submit(message)
        simulation.step(check=False)
        layout = executor.layouts[-1]
        simulation.now_s += max(6.4e-3, 28e-6 * layout.num_tokens) + 51e-9 * int(layout.context_lens.sum())
    inputs = DeviceInputs(config.max_num_seqs, 2048, 16, STEP_TOKENS_ON_GPU, torch_inputs, torch.device("cpu"))
    buckets = choose_buckets(config.max_num_seqs), CHUNK_BUCKETS
    captured = StepGraphs(inputs, Mock(), [], sampling_twin, *buckets, Mock(), Mock(), None)
    without = [layout.num_tokens for layout in executor.layouts if captured.size_for(layout) is None]
    assert min(without) > CHUNK_BUCKETS[-1] and len(without) <= most


def test_requests_with_any_options_get_the_same_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests come and go, so that buckets change; some have options that graphs do not compute."""

    def run(recorder: Recorder | None) -> list[Any]:
        driver = Driver(open_small(monkeypatch, recorder=recorder))
        samplings = cases(__file__, "samplings in graphs", Sampling=Sampling)
        seen: list[Any] = []

        def advance(sequences: list[Sequence], masks: dict[int, set[int]] | None = None) -> None:
            result = driver.advance(*sequences, masks=masks)
            ids = [{row: (value.ids, value.rank) for row, value in result.logprobs.items()}]
            seen.append((result.tokens, ids, result.errors))

        sequences = [driver.admit([n, 2 * n, 7], sampling) for n, sampling in enumerate(samplings)]
        plain, all_six = sequences[:3], sequences
        for several in (all_six, plain, plain, plain, plain, all_six, all_six, all_six, plain[:1], plain[:1], plain):
            advance(several)
        advance(plain, {1: {17, 18}})
        advance(plain)
        late = Sequence(5, [1, 2, 3], 3, sampling=Sampling(temperature=0.5, seed=9))
        driver.readmit(late)  # into a slot whose last request has ended
        for _ in range(4):
            advance([*plain, late])
        return seen

    recorder = Recorder()
    with_graphs = run(recorder)
    assert with_graphs == run(None)
    assert sum(recorder.replays) > 10


def test_drafts_are_rows_of_graphs_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    driver = Driver(open_small(monkeypatch, recorder=recorder))
    expected = [greedy("qwen3", prompt, 20)[0] for prompt in PROMPTS]
    sequences = [driver.admit(prompt) for prompt in PROMPTS]
    driver.advance(*sequences)
    for _ in range(4):
        _, second, third = (len(sequence.output) for sequence in sequences)
        drafts = {1: expected[1][second : second + 2], 2: [159 - expected[2][third]]}  # right, and wrong
        assert driver.advance_with_drafts(drafts, *sequences) == [1, 3, 1]
    for sequence, tokens in zip(sequences, expected, strict=True):
        assert sequence.output == tokens[: len(sequence.output)]
    assert recorder.replays == [4, 4, 0, 0, 0, 0, 0, 0]  # six rows each


def test_all_buckets_are_captured_at_the_start_the_largest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    driver = Driver(open_small(monkeypatch, recorder=recorder))
    rows = [len(tensors(graph.results)[0]) for graph in recorder.graphs]
    assert rows == [6, 6, 4, 4, 2, 2, 1, 1]  # hidden states, and tokens
    sequences = [driver.admit(prompt) for prompt in PROMPTS]
    driver.advance(*sequences)  # prompts
    for several in (sequences, sequences[:2], sequences[:1], sequences):
        driver.advance(*several)
    assert recorder.replays == [0, 0, 2, 2, 1, 1, 1, 1]
    driver.advance(*sequences, masks={0: {5}})  # the first half alone
    assert recorder.replays == [0, 0, 3, 2, 1, 1, 1, 1]


@pytest.mark.parametrize(("case", "takes_drafts"), [("qwen3", True), ("lfm2", False)])
def test_graphs_take_only_rows_of_one_token(case: str, takes_drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent state goes through one row after the other, so that drafts cannot be rows of a graph."""
    graphs = open_small(monkeypatch, case, Recorder())._rank.runner.graphs
    assert graphs is not None
    several = [Row(slot, 3, 1, True) for slot in range(7)]
    drafted = [Row(0, 3, 1, True, first_token=4, tokens=(9,)), Row(0, 4, 1, True)]
    assert graphs.size_for(Layout(several[:3])) == PaddedSize(4, 4, False)
    assert (graphs.size_for(Layout(drafted)) is not None) == takes_drafts
    for rows in ([several[0], Row(1, 3, 2, True)], [several[0], Row(1, 3, 1, False)], several):
        assert graphs.size_for(Layout(rows)) is None


def test_no_room_for_a_graph_names_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def other() -> None:
        raise ValueError("something else")

    @contextlib.contextmanager
    def capturing(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    with pytest.raises(ExecutorError, match="gpu_memory_utilization.*enforce_eager.*2.00 GiB"):
        graphs.CudaGraphs().capture(full)
    with pytest.raises(RuntimeError, match="invalidated"):
        graphs.CudaGraphs().capture(other)

"""How much of a GPU the KV cache may take: what this process uses is measured, what others use is only a limit."""

import itertools
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from penstock.executor.kernels.state import DeviceState
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError, Sampling, Step
from penstock.executor.ranks import rank_builder, rank_settings, runner_factory
from penstock.executor.ranks.rank_builder import RankBuilder
from penstock.executor.sampling.edits import TokenCounts
from penstock.executor.step import memory
from penstock.executor.step.memory import GpuUse, KvPlan, allocate_kv, naming_options, plan_kv, wait_for_release
from penstock.executor.step.runner import LaunchedStep, ModelRunner
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_graphs import Recorder, pretend_a_gpu
from tests.support.driver import Driver
from tests.support.refusals import cases, hardest_rows
from tests.support.small_models import folder

GIB = 1 << 30


class Meter:
    """A device of 80 GiB on which a step takes 2 beside the 16 that are allocated and the requests' 1; 50 are free."""

    def __init__(self, *reserved: int, free: int = 50) -> None:
        self.events: list[str] = []
        self._allocated, self._reserved = iter((16 * GIB, 17 * GIB)), itertools.cycle(reserved or (20 * GIB,))
        self._free = free * GIB

    def allocated(self) -> int:
        self.events.append("allocated")
        return next(self._allocated)

    def start_peak(self) -> None:
        self.events.append("start")

    def peak(self) -> int:
        self.events.append("peak")
        return 19 * GIB

    def reserved(self) -> int:
        return next(self._reserved)

    def device(self) -> tuple[int, int]:
        return self._free, 80 * GIB


Opener = Callable[..., tuple[UniprocExecutor, list[str]]]


@pytest.fixture
def open_metered(monkeypatch: pytest.MonkeyPatch) -> Opener:
    """Return what opens a model as on a GPU with a meter; it returns the executor and the lines that it logged."""

    def opened(meter: Meter, case: str = "qwen3", **options: Any) -> tuple[UniprocExecutor, list[str]]:
        lines: list[str] = []
        pretend_a_gpu(monkeypatch, Recorder)
        monkeypatch.setattr(rank_settings, "CudaMeter", lambda _: meter)
        config = ExecutorConfig(model=str(folder(case)), dtype="float32", **options)
        return UniprocExecutor(config, lines.append), lines

    return opened


def use(**fields: int) -> GpuUse:
    usual = {"allocated": 16, "activations": 3, "requests": 1, "graphs": 1, "context": 1, "free": 63, "total": 80}
    return GpuUse(**{name: value * GIB for name, value in (usual | fields).items()})


def test_the_cache_gets_the_rest_of_the_share_as_far_as_it_is_free() -> None:
    assert use().left(0.9) == 72 * GIB - 22 * GIB
    # Another process came or went during the measurement: the share stays the same as long as there is room.
    assert use(free=60).left(0.5) == use(free=30).left(0.5) == use().left(0.5) == 40 * GIB - 22 * GIB
    assert use(free=20).left(0.9) == 15 * GIB
    assert use(allocated=60, free=19).left(0.5) == 0


def test_a_start_waits_for_a_process_that_ends_and_for_others_only_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    lines, slept = list[str](), list[float]()
    monkeypatch.setattr("penstock.executor.step.memory.time.sleep", slept.append)
    ending = iter([use(free=10), use(free=10), use(free=63)])
    assert wait_for_release(lambda: next(ending), 0.9, lines.append) == use(free=63)
    assert len(slept) == 2 and len(lines) == 1
    assert "5.0 GiB are left for the KV cache instead of 50.0 GiB" in lines[0] and "up to 20 s" in lines[0]
    slept.clear()
    assert wait_for_release(lambda: use(free=10), 0.9, lines.append) == use(free=10)
    assert sum(slept) == 20.0 and len(lines) == 2
    assert wait_for_release(use, 0.9, lines.append) == use() and len(lines) == 2


@pytest.mark.parametrize(("kv_bytes", "is_named"), [(None, True), (2**18, False)])
def test_a_cache_that_other_processes_make_small_is_named_with_both_sizes(
    kv_bytes: int | None, is_named: bool, open_metered: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "wait_for_release", lambda measure, *_: measure())
    _, lines = open_metered(Meter(free=30), max_num_seqs=2, kv_cache_bytes=kv_bytes)
    assert any("24.0 GiB are left for the KV cache instead of 49.0 GiB" in line for line in lines) == is_named


WITH_ADAPTERS = {"enable_lora": True, "enforce_eager": True}
LARGEST: list[tuple[str, int, dict[str, Any]]] = [
    (case, tokens, {}) for case in ("qwen3", "deepseek-v2-lite", "opt") for tokens in (1, 40, 2048)
]


@pytest.mark.parametrize(
    ("case", "num_tokens", "options"), [*hardest_rows(LARGEST, LARGEST[3:6]), ("qwen3", 40, WITH_ADAPTERS)]
)
def test_the_largest_steps_are_run_and_measured(
    case: str, num_tokens: int, options: dict[str, Any], open_metered: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run after the weights are loaded and before the cache exists. The requests of all slots do not count, and steps
    with an adapter, which compute fused operations in parts, do."""
    meter, launch = Meter(), ModelRunner.launch
    seen: list[tuple[int, int]] = []
    with_adapter: list[int] = []  # tokens
    planned: list[int] = []  # steps that had run at each plan

    def watched(self: ModelRunner, step: Step) -> LaunchedStep:
        if step.rows:
            meter.events.append("step")
            seen.append((sum(row.count for row in step.rows), max(row.start + row.count for row in step.rows)))
            if all(admission.adapter is not None for admission in step.admissions):
                with_adapter.append(seen[-1][0])
        return launch(self, step)

    def plan(*arguments: Any) -> KvPlan:
        planned.append(len(seen))
        return plan_kv(*arguments)

    monkeypatch.setattr(ModelRunner, "launch", watched)
    monkeypatch.setattr(memory, "plan_kv", plan)
    limits = {"max_num_batched_tokens": num_tokens, "max_num_seqs": 3, "block_size": 4}
    info = open_metered(meter, case, **limits, **options)[0].info
    # Graphs will need as much memory as their largest step, which is run by itself at the end.
    graphs = [] if "enforce_eager" in options else ["start", "step", "peak"]
    steps = ["step"] * (len(seen) - len(graphs) // 3)
    assert meter.events == ["allocated", "allocated", "start", *steps, "peak", *graphs]
    assert not graphs or seen[-1][0] == min(num_tokens, 3)
    assert planned == [0, len(seen)]  # first, how long a request may be; then what it is
    assert max(tokens for tokens, _ in seen) == min(num_tokens, 3 * 256)
    # A long chunk expands latents, most of them at the end of the longest request.
    assert (min(num_tokens, 256), 256) in seen
    assert (info.memory["activations"], info.memory["requests"]) == (2 * GIB, GIB)
    assert (num_tokens in with_adapter) == ("enable_lora" in options)


def test_counts_for_penalties_are_allocated_when_needed(open_metered: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, allocate = Meter(), TokenCounts.allocate

    def recorded(counts: TokenCounts) -> None:
        meter.events.append("counts")
        allocate(counts)

    monkeypatch.setattr(TokenCounts, "allocate", recorded)
    executor, _ = open_metered(meter, max_num_seqs=3, enforce_eager=True)
    assert meter.events[:3] == ["allocated", "counts", "allocated"]
    meter.events.clear()
    driver = Driver(executor)
    driver.advance(driver.admit([0, 1, 2, 3]))
    assert meter.events == []
    driver.advance(driver.admit([0, 1, 2, 3], Sampling(frequency_penalty=0.5)))
    assert meter.events == ["counts"]


@pytest.mark.parametrize(("graph_bytes", "is_warned"), [(3 * GIB, False), (4 * GIB, True)])
def test_graphs_beyond_their_memory_are_warned_of(graph_bytes: int, is_warned: bool, open_metered: Opener) -> None:
    executor, lines = open_metered(Meter(5 * GIB, 5 * GIB + graph_bytes), max_num_seqs=2, kv_cache_bytes=2**18)
    assert executor.info.memory["graphs"] == graph_bytes
    assert any(f"they take {graph_bytes >> 20:,} MiB" in line for line in lines)
    assert any("more than the 3,072 MiB set aside" in line for line in lines) == is_warned


def test_the_plan_follows_the_measurement_and_the_table_lists_it(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExecutorConfig(model=str(folder("qwen3")), gpu_memory_utilization=0.9)
    assert plan_kv(config, GIB, 10**9, RankGroup(), use()).num_blocks == 50
    assert plan_kv(ExecutorConfig(kv_cache_bytes=2 * GIB), GIB, 1000, RankGroup(), use(allocated=71)).num_blocks == 2
    assert use().table(15 * GIB, 7) == dict(cases(__file__, "memory of a GPU", GIB=GIB))
    with pytest.raises(ExecutorError, match=r"share for the KV cache \(0 bytes\) holds 0 blocks"):
        plan_kv(config, GIB, 1000, RankGroup(), use(allocated=71))
    small = GpuUse(allocated=0, activations=0, requests=7, graphs=0, context=0, free=2**20, total=2**20)
    pretend_a_gpu(monkeypatch, Recorder)
    monkeypatch.setattr(RankBuilder, "_warm_up", lambda *_: small)
    info = UniprocExecutor(config).info
    assert info.num_blocks * info.block_bytes <= 0.9 * 2**20
    assert list(info.memory)[:3] == ["weights", "KV cache", "tables"] and info.memory["requests"] == 7


def test_a_cache_above_the_free_memory_is_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_builder, "load_model", Mock(side_effect=AssertionError("the weights are read")))
    with pytest.raises(ExecutorError, match=rf"kv_cache_bytes: {2**60} given; \d+ bytes of memory are free"):
        UniprocExecutor(ExecutorConfig(model=str(folder("qwen3")), kv_cache_bytes=2**60))


def test_a_limited_address_space_is_named_and_not_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr("penstock.executor.step.memory.available_memory", lambda: 8 * GIB)
    for left, message in (
        (GIB, "limit on the address space .*RLIMIT_AS.* for a thing"),
        (99 * GIB, r"a thing \(8.0 GiB"),
    ):
        limits = (used + left, resource.RLIM_INFINITY)
        monkeypatch.setattr(resource, "getrlimit", lambda _kind, limits=limits: limits)
        with pytest.raises(ExecutorError, match=message), naming_options("a thing", "lower it"):
            raise MemoryError


def test_memory_that_does_not_suffice_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    full = Mock(side_effect=torch.OutOfMemoryError("Tried to allocate 2.00 GiB"))
    with (
        pytest.raises(ExecutorError, match=r"does not suffice for a thing: lower it\. Tried to allocate 2.00 GiB"),
        naming_options("a thing", "lower it"),
    ):
        full()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(ExecutorError, match="for the KV cache: lower kv_cache_bytes or gpu_memory_utilization"):
            allocate_kv(2, 1, 2, 16, 8, torch.float32, torch.device("cuda", 0))
    config = ExecutorConfig(model=str(folder("qwen3")), kv_cache_bytes=2**18)
    with monkeypatch.context() as patch:
        pretend_a_gpu(patch, Recorder)
        patch.setattr("penstock.executor.models.decoder.Decoder.forward", full)
        with pytest.raises(ExecutorError, match="for a step of 8192 tokens: lower max_num_batched_tokens or"):
            UniprocExecutor(config)
    executor = UniprocExecutor(config)
    monkeypatch.setattr(executor._rank.runner._inputs, "flush", full)
    with pytest.raises(ExecutorError, match="for a step: lower .*max_num_batched_tokens or max_num_seqs"):
        executor.submit(Step(1, [], []))
    monkeypatch.setattr("penstock.executor.ranks.weights_lifecycle.load_update", full)
    with pytest.raises(
        ExecutorError, match="for the weights, beside those that compute,: put the engine to sleep before"
    ):
        executor.update_weights(config.model or "")
    monkeypatch.setattr(rank_builder, "load_model", full)
    with pytest.raises(ExecutorError, match="for the weights: .*tensor_parallel_size"):
        UniprocExecutor(config)


def test_tables_are_as_wide_as_the_longest_request_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as the model's longest context: with a million positions and 256 slots that is a gigabyte."""
    pretend_a_gpu(monkeypatch, Recorder)
    open_inputs = Mock(side_effect=runner_factory.open_inputs)
    monkeypatch.setattr(runner_factory, "open_inputs", open_inputs)
    config = ExecutorConfig(model=str(folder("qwen3")), dtype="float32", kv_cache_bytes=2**15, block_size=4)
    info = UniprocExecutor(config).info
    widths = [opened.args[1] for opened in open_inputs.call_args_list]
    assert widths == [info.max_model_len, info.max_model_len] and info.max_model_len < 256


def test_tables_that_kernels_cannot_count_are_refused_by_the_options_to_lower() -> None:
    message = "max_num_seqs: the tables of 2048 requests of up to 1048576 tokens .* lower max_num_seqs or max_model_len"
    with pytest.raises(ExecutorError, match=message):
        DeviceState(2048, 1048577, 65536, 16, torch.device("cpu"))

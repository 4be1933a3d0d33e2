"""How much of a GPU the KV cache may take: what this process uses is measured, what others use is only a limit."""

import pytest
import torch

from penstock.executor import profile, rank
from penstock.executor.memory import allocate_kv, naming_options, plan_kv
from penstock.executor.parallel import Group
from penstock.executor.profile import GpuUse, measure
from penstock.executor.protocol import ExecutorConfig, ExecutorError, Step
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.small_models import folder

GIB = 1 << 30
CPU = torch.device("cpu")


class Meter:
    """A device of 80 GiB on which a step takes 3 beside the 16 that are allocated; 50 are free."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def allocated(self) -> int:
        return 16 * GIB

    def start_peak(self) -> None:
        self.said.append("start")

    def peak(self) -> int:
        self.said.append("peak")
        return 19 * GIB

    def device(self) -> tuple[int, int]:
        return 50 * GIB, 80 * GIB


def use(**fields: int) -> GpuUse:
    given = {"allocated": 16, "activations": 3, "requests": 1, "graphs": 1, "context": 1, "free": 63, "total": 80}
    return GpuUse(**{name: value * GIB for name, value in (given | fields).items()})


def test_the_cache_gets_what_this_process_leaves_of_its_share() -> None:
    assert use().left(0.9) == 72 * GIB - 22 * GIB
    assert use().left(0.5) == 40 * GIB - 22 * GIB
    assert use(allocated=60, free=19).left(0.5) == 0


def test_what_others_take_is_a_limit_and_not_counted_as_ours() -> None:
    # A neighbour came or went while we measured: the share stays the same as long as there is room.
    assert use(free=60).left(0.5) == use(free=30).left(0.5)
    assert use(free=20).left(0.9) == 15 * GIB


@pytest.mark.parametrize("case", ["qwen3", "deepseek-v2-lite", "opt"])
@pytest.mark.parametrize("num_tokens", [1, 40, 2048])
def test_the_largest_step_is_run_and_measured(case: str, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExecutorConfig(
        model=str(folder(case)), dtype="float32", kv_cache_bytes=2**18, max_num_batched_tokens=num_tokens
    )
    model = UniprocExecutor(config)._runner._model
    seen, meter, forward = [], Meter(), model.forward

    def watched(batch, pages):
        meter.said.append(f"forward of {len(batch.tokens)}")
        seen.append(forward(batch, pages))
        return seen[-1]

    monkeypatch.setattr(model, "forward", watched)
    found = measure(model, config, torch.float32, 256, meter, CPU)
    # Of latents, once for a chunk at the end of the longest request and once for many short ones.
    forwards = 2 if case == "deepseek-v2-lite" and num_tokens > 1 else 1
    assert meter.said == ["start", *[f"forward of {min(num_tokens, 256)}"] * forwards, "peak"]
    assert seen[0].isfinite().all()
    assert (found.allocated, found.activations) == (16 * GIB, 3 * GIB)
    assert (found.free, found.total, found.graphs) == (50 * GIB, 80 * GIB, profile.GRAPHS_BYTES)
    eager = ExecutorConfig(model=config.model, enforce_eager=True, max_num_batched_tokens=2)
    assert measure(model, eager, torch.float32, 256, meter, CPU).graphs == 0


def test_the_plan_and_the_table_say_where_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ExecutorConfig(model=str(folder("qwen3")), gpu_memory_utilization=0.9)
    assert plan_kv(config, GIB, 10**9, Group(), use()).num_blocks == 50
    assert use().table(15 * GIB) == {
        "tables": GIB,
        "requests": GIB,
        "activations": 3 * GIB,
        "graphs (set aside)": GIB,
        "context (set aside)": GIB,
    }
    with pytest.raises(ExecutorError, match=r"share for the KV cache \(0 bytes\) holds 0 blocks"):
        plan_kv(config, GIB, 1000, Group(), use(allocated=71))
    small = GpuUse(allocated=0, activations=0, requests=7, graphs=0, context=0, free=2**20, total=2**20)
    monkeypatch.setattr(rank, "_measure", lambda *_: small)
    info = UniprocExecutor(config).info
    assert info.num_blocks * info.block_bytes <= 0.9 * 2**20
    assert list(info.memory)[:3] == ["weights", "KV cache", "tables"] and info.memory["requests"] == 7


def test_bytes_that_were_given_are_taken_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "measure", lambda *_: pytest.fail("nobody asked"))
    given = ExecutorConfig(kv_cache_bytes=2**20)
    assert rank._measure(given, None, torch.device("cuda", 0)) is None
    assert rank._measure(ExecutorConfig(), None, CPU) is None


def test_memory_that_does_not_suffice_names_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_, **__):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with (
        pytest.raises(ExecutorError, match=r"does not suffice for a thing: lower it\. Tried to allocate 2.00 GiB"),
        naming_options("a thing", "lower it"),
    ):
        full()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", full)
        with pytest.raises(ExecutorError, match="for the KV cache: lower kv_cache_bytes or gpu_memory_utilization"):
            allocate_kv(2, 1, 2, 16, 8, torch.float32, torch.device("cuda", 0))
    executor = UniprocExecutor(ExecutorConfig(model=str(folder("qwen3")), kv_cache_bytes=2**18))
    monkeypatch.setattr(executor._runner._inputs, "flush", full)
    with pytest.raises(ExecutorError, match="for a step: lower .*max_num_batched_tokens or max_num_seqs"):
        executor.submit(Step(1, [], []))
    monkeypatch.setattr(rank, "load_model", full)
    with pytest.raises(ExecutorError, match="for the weights: .*tensor_parallel_size"):
        UniprocExecutor(ExecutorConfig(model=str(folder("qwen3"))))

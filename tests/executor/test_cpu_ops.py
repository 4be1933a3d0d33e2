"""The C kernels give the same bits alone and in a batch, whole and in chunks, on one thread and on two, at every instruction
level that this CPU has; recurrent layers, too, whose gates reach their limits and whose convolutions have any length.
tests/executor/kernels/test_ops.py compares operations with their plain-torch twins."""

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock import _csrc
from penstock.executor.kernels import NO_EXTRAS, Ops, ScoreExtras, cpu_ops
from penstock.executor.protocol import ExecutorError
from tests.support.paged import Cache, attend, random
from tests.support.programs import printed
from tests.support.recurrent import Layer, States, batch_of
from tests.support.refusals import cases
from tests.support.twins import torch_ops

every_level = pytest.mark.parametrize("level", cpu_ops.levels())
both_dtypes = pytest.mark.parametrize("dtype", cpu_ops.DTYPES, ids=["float32", "bfloat16"])


def sinks_and_cap(q_heads: int) -> ScoreExtras:
    """Return sinks that take next to all of the weight, half of it and none, and a cap that scores come near to."""
    return ScoreExtras(cap=2.0, sinks=torch.linspace(-3, 12, q_heads))


@both_dtypes
def test_attention_without_tokens_is_empty(dtype: torch.dtype) -> None:
    cache = Cache([5], 1, 64, 16, dtype)
    ops = cpu_ops.make_ops(dtype, 64, 2)
    q = torch.empty(0, 3, 64, dtype=dtype)
    assert ops.paged_attention(q, (cache.k_pages, cache.v_pages), cache.batch([(0, 0, 5)]), 0.125).shape == (0, 3, 64)


@every_level
@both_dtypes
def test_a_nan_in_the_context_shows_and_one_behind_it_does_not(level: str, dtype: torch.dtype) -> None:
    ops = cpu_ops.make_ops(dtype, 64, 1, level)
    cache = Cache([150], 1, 64, 16, dtype)
    q = random(1, 150, 3, 64, dtype=dtype)
    assert not attend(ops, cache, q, [(0, 20, 150)]).isnan().any()
    for pages in (cache.k_pages, cache.v_pages):
        seen = pages[cache.tables[0, 2], 5]  # of position 37
        kept = seen.clone()
        seen[3] = float("nan")
        assert attend(ops, cache, q, [(0, 20, 150)]).isnan().any(-1).all()
        assert not attend(ops, cache, q, [(0, 1, 37)]).isnan().any()
        seen.copy_(kept)


@every_level
@both_dtypes
@pytest.mark.parametrize(("window", "has_extras"), [(None, False), (70, False), (70, True)])
def test_a_query_gets_the_same_bits_alone_in_a_batch_and_in_any_chunk(
    level: str, dtype: torch.dtype, window: int | None, has_extras: bool
) -> None:
    ops, one_thread = cpu_ops.make_ops(dtype, 80, 2, level), cpu_ops.make_ops(dtype, 80, 1, level)
    contexts = [401, 300, 129]
    cache = Cache(contexts, 2, 80, 16, dtype)
    q = random(3, 401, 6, 80, dtype=dtype)
    extras = sinks_and_cap(6) if has_extras else NO_EXTRAS
    whole = attend(one_thread, cache, q, [(0, 401, 401)], window, extras)

    for cuts in ([0, 1, 128, 129, 250, 401], [0, 63, 256, 400, 401]):
        chunks = [
            attend(ops, cache, q, [(0, end - start, end)], window, extras) for start, end in itertools.pairwise(cuts)
        ]
        assert torch.equal(torch.cat(chunks), whole)
    for end in (1, 2, 16, 17, 127, 128, 129, 300, 401):
        alone = attend(ops, cache, q, [(0, 1, end)], window, extras)
        together = attend(ops, cache, q, [(1, 1, 300), (0, 1, end), (2, 129, 129)], window, extras)
        assert torch.equal(alone[0], whole[end - 1])
        assert torch.equal(together[1], whole[end - 1])


@every_level
@both_dtypes
def test_a_long_context_cut_over_threads_gives_the_same_bits(level: str, dtype: torch.dtype) -> None:
    cache = Cache([3000, 5], 1, 64, 32, dtype)
    q = random(2, 3000, 4, 64, dtype=dtype)
    for rows in ([(0, 1, 3000)], [(0, 5, 3000), (1, 5, 5)], [(1, 1, 4), (0, 1, 2999)]):
        for extras in (NO_EXTRAS, sinks_and_cap(4)):
            threaded = (cpu_ops.make_ops(dtype, 64, threads, level) for threads in (1, 2, 3))
            results = [attend(ops, cache, q, rows, None, extras) for ops in threaded]
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])


@every_level
@both_dtypes
def test_a_token_gets_the_same_bits_from_the_other_kernels_in_any_batch(level: str, dtype: torch.dtype) -> None:
    x, residual, weight = random(700, 576, dtype=dtype), random(700, 576, dtype=dtype, seed=1), random(576, seed=2)
    one, two = (cpu_ops.make_ops(dtype, 64, threads, level) for threads in (1, 2))
    runs: list[Callable[[Ops, slice], torch.Tensor]] = [
        lambda ops, rows: ops.rms_norm(x[rows], weight, 1e-5),
        lambda ops, rows: ops.add_rms_norm(x[rows], residual[rows], weight, 1e-5)[0],
        lambda ops, rows: ops.gate(x[rows], "silu"),
        lambda ops, rows: ops.gate(x[rows], "gelu_tanh"),
        lambda ops, rows: ops.apply_gate(x[rows], x[rows]),
    ]
    for run in runs:
        whole = run(two, slice(None))
        assert torch.equal(run(one, slice(None)), whole)
        for rows in (slice(0, 1), slice(17, 40), slice(699, 700)):
            assert torch.equal(run(two, rows), whole[rows])


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 64), (torch.float32, 7)])
def test_what_the_kernels_do_not_compute_in_is_refused(dtype: torch.dtype, head_dim: int) -> None:
    with pytest.raises(ExecutorError, match="a CPU computes in float32 and bfloat16, with heads of an even size"):
        cpu_ops.make_ops(dtype, head_dim)


def test_an_unknown_level_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="level: 'sse9' is not one of .*portable"):
        cpu_ops.make_ops(torch.float32, 64, level="sse9")


@pytest.mark.parametrize(("cpu", "instructions", "level"), cases(__file__, "instructions of CPUs"))
def test_integer_and_bfloat16_products_are_chosen_apart(cpu: str, instructions: tuple[str, ...], level: str) -> None:
    lib: Any = _csrc.lib
    best = lib.penstock_cpu_best_level(sum(getattr(lib, f"PENSTOCK_{name}") for name in instructions))
    assert _csrc.ffi.string(lib.penstock_cpu_level_name(best)).decode() == level, cpu


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_the_kernels_run_on_torchs_own_threads() -> None:
    script = """
import os, torch
from penstock.executor.kernels import cpu_ops
torch.set_num_threads(2)
x = torch.ones(4096, 4096)
torch.sin(x)  # torch's team is up
before = len(os.listdir("/proc/self/task"))
cpu_ops.make_ops(torch.float32, 64, 2).gate(x, "silu")
print(cpu_ops._csrc.lib.penstock_cpu_has_team(), len(os.listdir("/proc/self/task")) - before)
"""
    assert printed(script) == "1 0"


def test_without_torch_in_the_process_the_calling_thread_does_all_the_work() -> None:
    script = """
from penstock._csrc import ffi, lib
cpu = ffi.new("struct penstock_cpu *", {"level": 0, "num_threads": 2, "is_bfloat16": 0})
x, y = ffi.new("float[]", [1.0] * 2 * 64 * 4096), ffi.new("float[]", 64 * 4096)
address = int(ffi.cast("uintptr_t", x))
lib.penstock_gate(cpu, [(address, address + 4096 * 4, int(ffi.cast("uintptr_t", y)), 8192, 8192, 64, 4096, 0)])
print(lib.penstock_cpu_has_team(), {round(value, 4) for value in y})
"""
    assert printed(script) == "0 {0.7311}"


both_rules = pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])


@every_level
@both_dtypes
@both_rules
def test_chunks_and_batches_of_any_size_give_the_same_bits(level: str, dtype: torch.dtype, erases: bool) -> None:
    layer = Layer.random(75, (2, 4, 32, 48), dtype, erases=erases)
    one, two = (cpu_ops.make_ops(dtype, 64, threads, level) for threads in (1, 2))
    whole = States(layer, 2)
    expected = layer.run(one, whole.pages, batch_of([75], whole.tables[:1]))
    for chunks in ([1] * 75, [2, 1, 16, 17, 39], [33, 42]):
        states, got, first = States(layer, 2), [], 0
        for count in chunks:
            part = layer.part(torch.arange(first, first + count))
            got.append(part.run(two, states.pages, batch_of([count], states.tables[:1])))
            first += count
        assert torch.equal(torch.cat(got), expected)
        assert torch.equal(states.pages.base, whole.pages.base)
    beside = States(layer, 2)
    tokens = torch.cat((torch.arange(5, 6), torch.arange(75)))
    got = [layer.part(tokens).run(two, beside.pages, batch_of([1, 75], beside.tables.flip(0)))[1:]]
    assert torch.equal(got[0], expected)


@every_level
@both_rules
def test_strong_and_weak_gates_reach_their_limits(level: str, erases: bool) -> None:
    """A decay of nothing and of everything, and a key of zeros: no NaN where there is a limit."""
    layer = Layer.random(4, (1, 1, 16, 16), erases=erases)
    gates = torch.tensor([[300.0, -300.0], [-300.0, 300.0], [100.0, 25.0], [0.0, 19.0]])
    layer.inputs.gates[:] = gates if erases else gates[:, 1:]
    layer.inputs.qkv[2] = 0
    states, twins = States(layer, 1), States(layer, 1)
    actual = layer.run(cpu_ops.make_ops(torch.float32, 64, 1, level), states.pages, batch_of([4], states.tables))
    torch.testing.assert_close(
        actual, layer.run(torch_ops, twins.pages, batch_of([4], twins.tables)), rtol=1e-4, atol=1e-4
    )


@every_level
@both_dtypes
@pytest.mark.parametrize(("taps", "channels", "silu"), [(3, 300, False), (1, 8, True), (8, 513, True)])
def test_convolutions_equal_the_twin(level: str, dtype: torch.dtype, taps: int, channels: int, silu: bool) -> None:
    layer = Layer.random(30, (1, 1, (channels - 8) // 2 or 1, 8), dtype, taps)
    weight, bias = random(taps, channels, seed=1), None
    x = random(30, channels, dtype=dtype)
    layer = Layer(layer.heads, taps, layer.inputs._replace(qkv=x), weight, bias)
    states, twins = States(layer, 4), States(layer, 4)
    batch = batch_of([1, 1, 8, 20], states.tables, new=(1,))
    actual = cpu_ops.make_ops(dtype, 64, 2, level).convolve(x, weight, bias, states.pages, batch, silu)
    expected = torch_ops.convolve(x, weight, bias, twins.pages, batch, silu)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(states.pages.base, twins.pages.base)

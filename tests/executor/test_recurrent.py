"""Recurrent layers in C, at every instruction level: the same bits whole and in chunks, alone and in a batch, on one thread
and on two; gates at their limits; convolutions of any length."""

import pytest
import torch

from penstock.executor.kernels import cpu_ops
from tests.support.paged import random
from tests.support.recurrent import Layer, States, batch_of
from tests.support.twins import torch_ops

every_level = pytest.mark.parametrize("level", cpu_ops.levels())
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
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

"""The short convolution, the gated delta rule and Mamba 2 in Triton: padding, precision, NaN, and tokens far apart."""

import mmap

import pytest
import torch
import torch.nn.functional as F

from penstock.executor.kernels.cuda.ops import OPS
from tests.support.recurrent import Layer, States, as_in_a_graph, batch_of
from tests.support.twins import torch_ops


@pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])
def test_a_padded_batch_has_the_bits_of_its_rows(device: torch.device, erases: bool) -> None:
    """In a graph, only the device knows the rows: padding reads no state and writes to page 0."""
    counts, padding = [1, 3, 64, 65], [1, 69, 0]
    layer = Layer.random(133 + 70, (1, 2, 16, 16), torch.bfloat16, device=device, erases=erases)
    padded, plain = States(layer, 4, device), States(layer, 4, device)
    tables = F.pad(padded.tables, (0, 0, 0, 3))
    batch = as_in_a_graph(batch_of([*counts, *padding], tables, new=(0, 4, 5, 6)), 4)
    out = layer.run(OPS, padded.pages, batch)
    expected = layer.part(torch.arange(133)).run(OPS, plain.pages, batch_of(counts, plain.tables, new=(0,)))
    assert torch.equal(out[:133], expected) and out.isfinite().all()
    assert torch.equal(padded.pages.base[1:], plain.pages.base[1:])


def test_a_convolution_reads_tokens_more_than_two_billion_numbers_apart() -> None:
    """So are 174,763 tokens of Qwen3-Next. Here the stride is large, and memory between the tokens is never touched."""
    tokens, stride, before = 36, 1 << 26, 1 << 31  # an offset of 32 bits would be negative: it must not crash the test
    layer = Layer.random(tokens, (1, 1, 16, 16), torch.bfloat16)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 has no name for
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (before + tokens * stride), flags=flags), dtype=torch.bfloat16)
    apart = memory.as_strided(layer.inputs.qkv.shape, (stride, 1), before).copy_(layer.inputs.qkv)
    outputs, states = [], [States(layer, 1) for _ in range(2)]
    for qkv, own in zip((layer.inputs.qkv, apart), states, strict=True):
        batch = batch_of([tokens], own.tables)
        outputs.append(OPS.convolve(qkv, layer.weight, layer.bias, own.pages, batch, True))
    assert torch.equal(*outputs)
    assert torch.equal(*(own.pages.base for own in states))


def test_keys_that_are_all_alike_lose_no_precision(device: torch.device) -> None:
    """The triangular system is at its worst where every token overwrites what the one before it wrote. Queries lean to
    the one key: of those across it the norm would make float16's own rounding ten times as large."""
    layer = Layer.random(130, (1, 1, 16, 16), torch.float16, device=device)
    layer.weight[:] = 0
    layer.weight[-1] = 1
    layer.inputs.qkv[:, 16:32] = layer.inputs.qkv[:1, 16:32]
    layer.inputs.qkv[:, :16] += 3 * layer.inputs.qkv[:, 16:32]
    layer.inputs.gates[:] = torch.tensor([6.0, -20.0])
    states = States(layer, 1, device)
    expected_states = states.copy()
    batch = batch_of([130], states.tables, new=(0,))
    actual, expected = layer.run(OPS, states.pages, batch), layer.run(torch_ops, expected_states.pages, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1.5e-2 if device.type == "cpu" else 3e-2)


@pytest.mark.parametrize("counts", [[1], [70]])
@pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])
def test_a_gate_of_nan_makes_its_whole_head_nan(device: torch.device, counts: list[int], erases: bool) -> None:
    """`tl.minimum` drops a NaN unless it is asked not to: the softplus of NaN would be 20 on a GPU."""
    layer = Layer.random(sum(counts), (1, 2, 16, 16), torch.bfloat16, device=device, erases=erases)
    layer.inputs.gates[-1, -1] = float("nan")  # what softplus takes for the last token of the second head
    states = States(layer, 1, device)
    out = layer.run(OPS, states.pages, batch_of(counts, states.tables, new=(0,)))
    first, second = out[-1].chunk(2)
    assert first.isfinite().all() and second.isnan().all()

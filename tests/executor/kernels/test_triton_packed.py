"""Packed codes against the numbers that they stand for, and products with them of which programs share the depth."""

import numpy as np
import pytest
import torch
from benchmarks.gpu.cases import Kit, packed

from penstock.executor.kernels.cuda import linear_products
from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.stored_formats import Groups, as_groups, group_of, half_of
from penstock.executor.kernels.weight import Weight, pack_for_gpu
from tests.support.coded import FILE_TYPES, coded
from tests.support.kernel_cases import close, every_dtype
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.twins import grouped as twin
from tests.support.twins import torch_ops

CPU = torch.device("cpu")
Tensor = torch.Tensor
Kind = tuple[int, int, str | None]  # bits (0: floats of eight bits), group, what is below
KINDS = cases(__file__, "kinds of packed weights")


def grouped(rows: int, columns: int, kind: Kind, seed: int = 0) -> Weight:
    bits, group, below = kind
    made = torch.Generator().manual_seed(seed)
    groups = columns // group
    if bits:
        codes = torch.randint(1 << bits, (rows, columns), generator=made, dtype=torch.uint8)
    else:
        codes = random(rows, columns, seed=seed).to(torch.float8_e4m3fn)
    scales = (torch.rand(rows, groups, generator=made) + 0.5).half() / (bits + 1)
    under = None
    if below == "zeros":
        under = torch.randint(1 << bits, (rows, groups), generator=made, dtype=torch.uint8)
    elif below == "minima":
        under = torch.randn(rows, groups, generator=made).half()
    return Weight(Groups(bits or 8), codes, scales, under, "a weight")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_packed_stands_for_the_numbers(kind: Kind) -> None:
    parts = [grouped(rows, 384, kind, seed=5) for rows in (40, 24)]
    expected = torch.cat([part.dequantize(CPU, torch.float32) for part in parts])
    packed = pack_for_gpu(parts, CPU)
    assert torch.equal(twin.widen(packed), expected)
    assert packed.shape == (64, 384)
    rows = torch.tensor([3, 63, 3])
    assert torch.equal(Linear([packed], None, torch_ops).rows(rows, torch.float32), expected[rows])


@every_dtype
@pytest.mark.parametrize("splits", [1, 4])
def test_the_depth_may_be_cut(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, splits: int, dtype: torch.dtype
) -> None:
    """There are three steps, so the last of four parts has none. Rows and bias lie in wider tensors."""
    monkeypatch.setattr(linear_products, "depth_splits", lambda *_: splits)
    kit = Kit(device, dtype)
    weight, x, bias = (
        packed(kit, 64, 384, group=64, below=torch.uint8),
        kit.random(3, 400)[:, :384],
        kit.random(65)[1:],
    )
    expected = x.double() @ twin.widen(weight).to(dtype).double().t() + bias.double()
    close(linear_products.linear(x, weight, bias), expected)


def test_half_a_step_fits_the_depth_and_the_groups() -> None:
    def half(bits: int, columns: int, group: int) -> int | None:
        return half_of(Weight(Groups(bits), torch.zeros(1, columns), torch.zeros(1, columns // group)))

    given = {(4, 4096, 128): 64, (4, 576, 32): 32, (8, 576, 32): 64, (4, 96, 96): 16, (8, 48, 48): 16}
    assert {case: half(*case) for case in given} == given
    assert half(4, 48, 48) is None and half(8, 40, 40) is None


@pytest.mark.parametrize("kind", [kind for kind in FILE_TYPES if kind != "MXFP4"])
def test_gguf_types_become_groups(kind: str) -> None:
    """Products of two scales, in 16 bits, are off by no more than 1 in 4,096."""
    weight, values = coded(np.random.default_rng(1), (30, 512), kind)
    part = as_groups(weight)
    assert half_of(part) is not None and part.scales is not None and isinstance(part.format, Groups)
    made = part.dequantize(CPU, torch.float32).double()
    if "_K" not in kind and kind not in ("Q4_1", "Q5_1", "IQ4_XS"):
        assert torch.equal(made, values)
    else:
        least = part.scales.double().abs().repeat_interleave(group_of(part), 1)
        largest = {"Q4_K": 15, "Q4_1": 15, "IQ4_XS": 128}.get(kind, 32)  # of a code, less that of zero
        bound = (least * largest) / 2048 + 2e-6
        if part.zeros is not None:
            bound += part.zeros.double().abs().repeat_interleave(group_of(part), 1) / 2048
        assert ((made - values).abs() <= bound).all()

"""Products in eight bits against their twin, and the twin against the product it stands for."""

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu.cases import Kit, blocks

from penstock.executor.kernels import Fp8Rows
from penstock.executor.kernels.cuda import linear_products, tiles
from penstock.executor.kernels.cuda import rows as row_kernels
from tests.support import cards
from tests.support.kernel_cases import close, every_dtype, matrix
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins import torch_ops
from tests.support.twins.eight_bits import quantize, widen_rows


@every_dtype
def test_what_quantizes_equals_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = random(3, 384, dtype=dtype).to(device), random(3, 384, dtype=dtype, seed=1).to(device)
    x[1, :128] = 0
    weight = random(384, seed=2).to(device)
    actual, total = row_kernels.add_rms_norm_quantize(x, residual, weight, 1e-5)
    expected, expected_total = eight_bits_twin.add_rms_norm_quantize(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    pairs = [(actual, expected), (row_kernels.quantize(x), quantize(x))]
    gate_up = random(3, 512, dtype=dtype, seed=4).to(device)
    pairs.append((row_kernels.silu_mul_quantize(gate_up), eight_bits_twin.silu_mul_quantize(gate_up)))
    for (values, scales), (twin_values, twin_scales) in pairs:
        assert scales.stride() == twin_scales.stride() == (1, 4)
        torch.testing.assert_close(scales, twin_scales, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=0)
        # Where a quotient lies between two numbers of eight bits, the next one may be taken.
        torch.testing.assert_close(values.float(), twin_values.float(), rtol=0.13, atol=2**-9)
        assert (values.float() != twin_values.float()).float().mean() < 0.05


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter, for the whole row behind a norm
def test_a_nan_stays_one_in_eight_bits(device: torch.device) -> None:
    """Plain minima and maxima of a GPU drop NaN, which would become -448."""
    x, weight = random(2, 512, dtype=torch.bfloat16).to(device), torch.ones(512, device=device)
    x[1, 130] = torch.nan
    for quantized in (
        row_kernels.quantize(x),
        row_kernels.add_rms_norm_quantize(x, x, weight, 1e-5)[0],
        row_kernels.silu_mul_quantize(x),
    ):
        wide = widen_rows(quantized)
        assert wide[1, 130].isnan() and wide[0].isfinite().all()


@matrix("rows, splits", (1, 20, 70), (1, 4), hardest=[(1, 4), (20, 4), (70, 1)])
def test_the_product_equals_the_twin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, splits: int
) -> None:
    """The depth has three blocks, so the last of four parts has none."""
    monkeypatch.setattr(linear_products, "depth_splits", lambda *_: splits)
    weight, x = (
        blocks(Kit(device, torch.float32), 200, 384),
        Fp8Rows(quantize(random(rows, 384).to(device)), torch.float32),
    )
    actual, expected = linear_products.linear(x, weight), torch_ops.linear(x, weight)
    if device.type == "cpu":
        close(actual, expected)
    else:  # Hopper's tensor cores add products of eight bits in fewer than 24 bits
        assert (actual - expected).norm() < 1e-3 * expected.norm()


def test_the_depth_is_cut_where_few_programs_have_much_of_it() -> None:
    splits = dict(cases(__file__, "depth splits"))
    assert {case: tiles.depth_splits(*case) for case in splits} == splits


def test_cublas_gets_many_tokens_and_whole_blocks_where_it_has_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {(64, 512): False, (65, 512): True, (257, 576): False, (8192, 576): False, (8192, 128): True}
    assert {case: linear_products.is_cublas(*case) for case in counts} == counts
    for card in (cards.L40S, cards.B200, cards.RTX_PRO):
        monkeypatch.setattr(linear_products, "current_card", lambda card=card: card)
        assert not linear_products.is_cublas(512, 512)


@pytest.mark.parametrize(("rows", "depth"), [(65, 128), (509, 384), (510, 640), (512, 512), (1001, 384)])
def test_many_tokens_take_cublas(monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, depth: int) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm, raising=False)
    assert linear_products.is_cublas(rows, 256)
    weight, x = blocks(Kit(device, torch.float32), 256, depth), quantize(random(rows, depth).bfloat16().to(device))
    assert weight.scales is not None
    if device.type == "cpu":
        actual = linear_products.scaled_mm(x, weight.codes, weight.scales, torch.bfloat16)
    else:
        actual = linear_products.linear(Fp8Rows(x, torch.bfloat16), weight)
    assert actual.shape == (rows, 256)
    close(actual, torch_ops.linear(Fp8Rows(x, torch.float32), weight), torch.bfloat16)


def strict_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    a_recipe: F.ScalingType,
    b_scales: torch.Tensor,
    b_recipe: F.ScalingType,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Check what torch checks and cuBLASLt documents of these scales; multiply as it reads them, by their strides."""
    assert (a_recipe, b_recipe) == (F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128)
    (rows, depth), (_, width) = a.shape, b.shape
    groups, padded = -(-depth // 128), -(-depth // 512) * 4
    assert a.stride() == (depth, 1) and b.stride() == (1, depth) and depth % 16 == width % 16 == 0
    assert a_scales.shape == (rows, groups) and b_scales.shape == (padded, -(-width // 128))
    assert a_scales.stride(0) == b_scales.stride(0) == 1
    assert a_scales.stride(1) == rows and b_scales.stride(1) == padded
    assert rows % 4 == 0, "a column of scales begins at 16 bytes"
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (a, b, a_scales, b_scales))
    wide = a.float().unflatten(1, (-1, 128)) * a_scales[..., None]
    by_column = b_scales[:groups].repeat_interleave(128, 1)[:, :width]  # [groups, width]
    products = torch.einsum("tgk,gkn->tgn", wide, b.float().unflatten(0, (-1, 128)))
    return (products * by_column).sum(1).to(output_dtype)

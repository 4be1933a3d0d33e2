"""Products in eight bits against their twin, and the twin against the product it stands for."""

import pytest
import torch
import torch.nn.functional as F

from penstock.executor.kernels import Fp8Rows, Quantized, eight_bits
from penstock.executor.kernels.cuda import fp8, linear_products, tiles
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight
from tests.support import cards
from tests.support.kernel_cases import close, every_dtype, matrix
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.twins import eight_bits as eight_bits_twin


def quantized_weight(width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [width, depth], then its blocks of 128 × 128 in eight bits and their scales."""
    weight = random(width, depth, seed=3) / depth**0.5
    padded = F.pad(weight, (0, 0, 0, -width % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = padded.abs().amax((1, 3)) / 448
    values = (padded / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:width].to(torch.float8_e4m3fn)
    return weight, values, eight_bits.pad_scales(scales)


@every_dtype
def test_what_quantizes_equals_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = random(3, 384, dtype=dtype).to(device), random(3, 384, dtype=dtype, seed=1).to(device)
    x[1, :128] = 0
    weight = random(384, seed=2).to(device)
    actual, total = fp8.add_rms_norm_quantize(x, residual, weight, 1e-5)
    expected, expected_total = eight_bits_twin.add_rms_norm_quantize(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    pairs = [(actual, expected), (fp8.quantize(x), eight_bits_twin.quantize(x))]
    gate_up = random(3, 512, dtype=dtype, seed=4).to(device)
    pairs.append((fp8.silu_mul_quantize(gate_up), eight_bits_twin.silu_mul_quantize(gate_up)))
    for (values, scales), (twin_values, twin_scales) in pairs:
        assert scales.stride() == twin_scales.stride() == (1, 4)
        torch.testing.assert_close(scales, twin_scales, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=0)
        # Where a quotient lies between two numbers of eight bits, the next one may be taken.
        torch.testing.assert_close(values.float(), twin_values.float(), rtol=0.13, atol=2**-9)
        assert (values.float() != twin_values.float()).float().mean() < 0.05


@matrix("rows, splits", (1, 20, 70), (1, 4), hardest=[(1, 4), (20, 4), (70, 1)])
def test_the_product_equals_the_twin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, splits: int
) -> None:
    """Three blocks of the depth: of four parts the last has none."""
    monkeypatch.setattr(linear_products, "depth_splits", lambda *_: splits)
    _, weight, weight_scales = quantized_weight(200, 384)
    x = eight_bits_twin.quantize(random(rows, 384))
    moved_weight = Weight(BLOCKS, weight.to(device), weight_scales.to(device))
    actual = linear_products.linear(Fp8Rows(moved(x, device), torch.float32), moved_weight)
    expected = eight_bits_twin.block_linear(x, weight, weight_scales, torch.float32)
    if device.type == "cpu":
        close(actual, expected)
    else:  # Hopper's tensor cores add products of eight bits in fewer than 24 bits
        assert (actual.cpu() - expected).norm() < 1e-3 * expected.norm()


def moved(x: Quantized, device: torch.device) -> Quantized:
    made = eight_bits.make_quantized(len(x[0]), x[0].shape[1], device)
    for tensor, given in zip(made, x, strict=True):
        tensor.copy_(given)
    return made


def test_the_depth_is_cut_where_few_programs_have_much_of_it() -> None:
    splits = dict(cases(__file__, "depth splits"))
    assert {case: tiles.depth_splits(*case) for case in splits} == splits


def test_cublas_gets_many_tokens_and_whole_blocks_where_it_has_such_products(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {(64, 512): False, (65, 512): True, (257, 576): False, (8192, 576): False, (8192, 128): True}
    assert {case: linear_products.is_cublas(*case) for case in counts} == counts
    for card in (cards.L40S, cards.B200, cards.RTX_PRO):
        monkeypatch.setattr(linear_products, "current_card", lambda given=card: given)
        assert not linear_products.is_cublas(512, 512)


@pytest.mark.parametrize(("rows", "depth"), [(65, 128), (509, 384), (510, 640), (512, 512), (1001, 384)])
def test_many_tokens_go_through_cublas(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int, depth: int
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(F, "scaled_mm", strict_scaled_mm, raising=False)
    assert linear_products.is_cublas(rows, 256)
    _, weight, weight_scales = quantized_weight(256, depth)
    x = eight_bits_twin.quantize(random(rows, depth, dtype=torch.bfloat16))
    factors = moved(x, device), weight.to(device), weight_scales.to(device)
    if device.type == "cpu":
        actual = linear_products.scaled_mm(*factors, torch.bfloat16)
    else:
        actual = linear_products.linear(Fp8Rows(factors[0], torch.bfloat16), Weight(BLOCKS, *factors[1:]))
    assert actual.shape == (rows, 256)
    close(actual, eight_bits_twin.block_linear(x, weight, weight_scales, torch.float32), torch.bfloat16)


def strict_scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    a_recipe: F.ScalingType,
    b_scales: torch.Tensor,
    b_recipe: F.ScalingType,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """What torch checks and cuBLASLt documents of these scales, and the product as it reads them, by their strides."""
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

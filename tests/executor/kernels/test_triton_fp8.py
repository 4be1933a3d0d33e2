"""Products in eight bits against their twin, and the twin against the product it stands for."""

import pytest
import torch
import torch.nn.functional as F

from penstock.executor.kernels import torch_fp8
from penstock.executor.kernels.cuda import fp8
from tests.executor.kernels.cases import close, every_dtype
from tests.executor.paged import random


def quantized_weight(width: int, depth: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight [width, depth], then its blocks of 128 × 128 in eight bits and their scales."""
    weight = random(width, depth, seed=3) / depth**0.5
    padded = F.pad(weight, (0, 0, 0, -width % 128)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = padded.abs().amax((1, 3)) / 448
    values = (padded / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:width].to(torch.float8_e4m3fn)
    return weight, values, torch_fp8.pad_scales(scales)


@every_dtype
def test_what_quantizes_equals_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    x, residual = random(3, 384, dtype=dtype).to(device), random(3, 384, dtype=dtype, seed=1).to(device)
    x[1, :128] = 0
    weight = random(384, seed=2).to(device)
    actual, total = fp8.add_rms_norm_quantize(x, residual, weight, 1e-5)
    expected, expected_total = torch_fp8.add_rms_norm_quantize(x, residual, weight, 1e-5)
    assert torch.equal(total, expected_total)
    pairs = [(actual, expected), (fp8.quantize(x), torch_fp8.quantize(x))]
    gate_up = random(3, 512, dtype=dtype, seed=4).to(device)
    pairs.append((fp8.silu_mul_quantize(gate_up), torch_fp8.silu_mul_quantize(gate_up)))
    for (values, scales), (twin_values, twin_scales) in pairs:
        assert scales.stride() == twin_scales.stride() == (1, 3)
        torch.testing.assert_close(scales, twin_scales, rtol=2e-2 if dtype is torch.bfloat16 else 2e-3, atol=0)
        # Where a quotient lies between two numbers of eight bits, the next one may be taken.
        torch.testing.assert_close(values.float(), twin_values.float(), rtol=0.13, atol=2**-9)
        assert (values.float() != twin_values.float()).float().mean() < 0.05


@pytest.mark.parametrize("rows", [1, 20, 70])
def test_the_product_equals_the_twin(device: torch.device, rows: int) -> None:
    _, weight, weight_scales = quantized_weight(200, 384)
    values, scales = torch_fp8.quantize(random(rows, 384))
    x = values.to(device), scales.t().contiguous().to(device).t()
    actual = fp8.block_linear(x, weight.to(device), weight_scales.to(device), torch.float32)
    close(actual, torch_fp8.block_linear((values, scales), weight, weight_scales, torch.float32))


def test_the_twin_comes_near_the_product_in_full() -> None:
    weight, values, scales = quantized_weight(200, 384)
    x = random(20, 384)
    actual = torch_fp8.block_linear(torch_fp8.quantize(x), values, scales, torch.float32)
    exact = F.linear(x, weight)
    assert (actual - exact).norm() < 0.05 * exact.norm()


def test_cublas_gets_many_tokens_and_whole_blocks() -> None:
    cases = {(256, 512): False, (257, 512): True, (257, 576): False, (8192, 576): False, (8192, 128): True}
    assert {case: fp8.is_cublas(*case) for case in cases} == cases


@pytest.mark.gpu
def test_many_tokens_go_through_cublas() -> None:
    _, weight, weight_scales = quantized_weight(256, 512)
    x = torch_fp8.quantize(random(512, 512, dtype=torch.bfloat16))
    moved = x[0].cuda(), x[1].t().contiguous().cuda().t()
    actual = fp8.block_linear(moved, weight.cuda(), weight_scales.cuda(), torch.bfloat16)
    close(actual, torch_fp8.block_linear(x, weight, weight_scales, torch.float32), torch.bfloat16)

"""Norms, gated activations, rotation and the way into the pages: the Triton kernels against their twins."""

from typing import get_args

import pytest
import torch

from penstock.executor.kernels import Activation, NormedRows, Ops
from penstock.executor.kernels.cuda import few_rows
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.weight import plain_weight
from tests.support.kernel_cases import TOLERANCE, close, every_dtype, matrix
from tests.support.paged import latent_step, random, rotated_step
from tests.support.twins import torch_ops


@every_dtype
@pytest.mark.parametrize("width", [8, 100, 576, 1100])
def test_norms_equal_the_twin(device: torch.device, dtype: torch.dtype, width: int) -> None:
    weight = random(width, seed=3).to(device)
    for rows in (0, 1, 5, 9):
        x = random(rows, width + 16, dtype=dtype).to(device)[:, 16:]  # the rows of a part of a wider product
        residual = random(rows, width, dtype=dtype, seed=1).to(device)
        close(OPS.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5))
        y, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
        expected_y, expected_total = torch_ops.add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(total, expected_total)
        close(y, expected_y)


@every_dtype
@pytest.mark.parametrize("activation", get_args(Activation))
def test_gated_activations_equal_the_twin(device: torch.device, dtype: torch.dtype, activation: Activation) -> None:
    for rows, width in ((0, 64), (1, 2), (3, 172), (2, 1536), (9, 128)):
        gate_up = 4 * random(rows, 2 * width, dtype=dtype).to(device)
        close(OPS.gate(gate_up, activation), torch_ops.gate(gate_up, activation))


@every_dtype
@pytest.mark.parametrize("activation", get_args(Activation))
def test_products_with_their_activation_equal_the_twin(
    device: torch.device, dtype: torch.dtype, activation: Activation
) -> None:
    """Few rows and many, widths and depths that are whole tiles and that are not."""
    for rows, depth, width in ((0, 64, 32), (2, 200, 20), (1, 1100, 9), (few_rows.MAX_ROWS + 1, 64, 32)):
        x = random(rows, depth, dtype=dtype).to(device)
        weight = random(2 * width, depth, dtype=dtype, seed=1).to(device) / depth**0.5
        actual = OPS.gated_linear(x, weight, activation)
        close(actual, torch_ops.gated_linear(x, weight, activation))


@every_dtype
def test_products_of_few_rows_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    for rows, depth, width, has_bias in ((1, 300, 30, True), (2, 1100, 8, False)):
        x = random(rows, depth, dtype=dtype).to(device)
        weight = random(width, depth, dtype=dtype, seed=1).to(device) / depth**0.5
        bias = random(width, dtype=dtype, seed=2).to(device) if has_bias else None
        close(OPS.linear(x, plain_weight(weight), bias), torch_ops.linear(x, plain_weight(weight), bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", [OPS, InvariantOps(None)], ids=["any order", "fixed order"])
def test_a_product_of_16_bits_rounds_nothing_but_its_float32_sums(
    device: torch.device, dtype: torch.dtype, ops: Ops
) -> None:
    bias = random(40, seed=2).to(device)
    for rows in (1, few_rows.MAX_ROWS + 1):
        x, weight = (random(count, 300, dtype=dtype, seed=count).to(device) for count in (rows, 40))
        assert ops.wide_linear is not None
        actual, expected = ops.wide_linear(x, weight, bias), x.double() @ weight.double().t() + bias
        assert actual.dtype is torch.float32 and (actual - expected).abs().max() < 1e-3


def test_rows_and_weights_that_begin_anywhere_are_multiplied_as_well(device: torch.device) -> None:
    wide, weights = random(1, 65).to(device), random(9, 64, seed=1).to(device)
    for x, weight in ((wide[:, 1:], weights[1:]), (wide[:, :64], weights.t()[:, :5].t()), (wide[:, :64], weights)):
        close(OPS.linear(x, plain_weight(weight)), torch_ops.linear(x, plain_weight(weight)))


@matrix("dtype", TOLERANCE, hardest=[(torch.bfloat16,)])
def test_products_of_few_rows_add_and_normalize_them(device: torch.device, dtype: torch.dtype) -> None:
    """The sum is the twin's bit for bit. The product is not rounded between the norm and its result."""
    for rows, depth, width in ((2, 700, 20), (1, 96, 33)):
        update, residual = (random(rows, depth, dtype=dtype, seed=seed).to(device) for seed in (1, 2))
        norm = 1 + 0.1 * random(depth, seed=3).to(device)
        weight = random(2 * width, depth, dtype=dtype, seed=4).to(device) / depth**0.5
        bias = random(2 * width, dtype=dtype, seed=5).to(device)
        normed, total = torch_ops.add_rms_norm(update, residual, norm, 1e-5)
        for has_gate in (False, True):
            given = NormedRows(update, residual, torch.empty_like(residual), norm, 1e-5)
            if has_gate:
                close(OPS.gated_linear(given, weight, "silu"), torch_ops.gated_linear(normed, weight, "silu"))
            else:
                close(
                    OPS.linear(given, plain_weight(weight), bias), torch_ops.linear(normed, plain_weight(weight), bias)
                )
            assert torch.equal(given.total, total)


def test_large_float16_residuals_do_not_overflow_in_products_of_few_rows(device: torch.device) -> None:
    update, residual = (torch.full((1, 64), value, dtype=torch.float16, device=device) for value in (0.0, 3e4))
    norm = torch.full((64,), 2.5, device=device)
    weight = torch.full((8, 64), 1 / 64, dtype=torch.float16, device=device)
    given = NormedRows(update, residual, torch.empty_like(residual), norm, 1e-5)
    close(OPS.linear(given, plain_weight(weight)), torch.full((1, 8), 2.5, dtype=torch.float16, device=device))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_reach_their_limits_without_overflow(device: torch.device, activation: Activation) -> None:
    gate = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4, float("nan")]], device=device)
    y = OPS.gate(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)[0]
    assert torch.equal(y[2:5], gate[0, 2:5])
    assert y[:2].abs().max() < 1e-30
    assert y[5].isnan()


@every_dtype
@pytest.mark.parametrize(
    ("dim", "rotated", "normed", "has_v"),
    [(64, 64, False, True), (8, 8, True, True), (80, 32, True, True), (96, 0, False, True), (160, 32, False, False)],
)
def test_rope_writes_the_pages_like_the_twin(
    device: torch.device, dtype: torch.dtype, dim: int, rotated: int, normed: bool, has_v: bool
) -> None:
    sizes = (7, 3, 2 if has_v else 1, 4)
    results = [rotated_step(ops, dtype, device, sizes, dim, rotated, normed, has_v) for ops in (OPS, torch_ops)]
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)


@every_dtype
@pytest.mark.parametrize("is_whole", [False, True], ids=["absorbed", "whole"])
def test_latents_and_their_queries_equal_the_twin(device: torch.device, dtype: torch.dtype, is_whole: bool) -> None:
    """More heads and tokens than a program has, of which the first two are another call's; sizes of no power of two."""
    results = [latent_step(ops, dtype, device, 2, is_whole) for ops in (OPS, torch_ops)]
    for actual, expected in zip(*results, strict=True):
        close(actual, expected)

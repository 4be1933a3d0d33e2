"""Products of few rows in Triton: their precision, their largest sums, and tensors that they cannot read."""

import pytest
import torch

from penstock.executor.kernels import NormedRows, Ops
from penstock.executor.kernels.cuda import few_rows
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.weight import plain_weight
from tests.support.kernel_cases import close
from tests.support.paged import random
from tests.support.twins import torch_ops


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ops", [OPS, InvariantOps(None)], ids=["any order", "fixed order"])
def test_a_product_of_16_bits_rounds_only_its_float32_sums(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
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


def test_large_float16_residuals_do_not_overflow_in_products_of_few_rows(device: torch.device) -> None:
    update, residual = (torch.full((1, 64), value, dtype=torch.float16, device=device) for value in (0.0, 3e4))
    norm = torch.full((64,), 2.5, device=device)
    weight = torch.full((8, 64), 1 / 64, dtype=torch.float16, device=device)
    given = NormedRows(update, residual, torch.empty_like(residual), norm, 1e-5)
    close(OPS.linear(given, plain_weight(weight)), torch.full((1, 8), 2.5, dtype=torch.float16, device=device))

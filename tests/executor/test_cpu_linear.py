"""The C linear layer against float64 arithmetic, at every instruction level that this CPU has, and against itself."""

import pytest
import torch

from penstock.executor.kernels import cpu_ops
from penstock.executor.kernels.cpu_product import CpuProduct, is_repacked
from penstock.executor.kernels.weight import plain_weight
from tests.support.paged import random

pytestmark = pytest.mark.usefixtures("two_threads")

every_level = pytest.mark.parametrize("level", cpu_ops.levels())
both_dtypes = pytest.mark.parametrize("dtype", cpu_ops.DTYPES, ids=["float32", "bfloat16"])


def product_of(
    weight: torch.Tensor, bias: torch.Tensor | None = None, num_threads: int | None = None, level: str | None = None
) -> CpuProduct:
    return CpuProduct([plain_weight(weight)], weight.dtype, bias, num_threads, level)


@every_level
@both_dtypes
@pytest.mark.parametrize(("depth", "width"), [(2, 1), (64, 63), (576, 200), (1536, 576), (130, 65)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_it_equals_the_product_in_float64(
    level: str, dtype: torch.dtype, depth: int, width: int, has_bias: bool
) -> None:
    weight = random(width, depth, dtype=dtype, seed=1) / depth**0.5
    bias = random(width, dtype=dtype, seed=2) if has_bias else None
    linear = product_of(weight, bias, 2, level)
    exact = CpuProduct([plain_weight(weight)], torch.float32, bias, 2, level)
    for rows in (0, 1, 5, 6, 19, 100):
        x = random(rows, depth, dtype=dtype, seed=3)
        expected = x.double() @ weight.double().T + (bias.double() if bias is not None else 0)
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(linear(x).double(), expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(exact(x.float()).double(), expected, rtol=1e-5, atol=1e-5)


@every_level
@both_dtypes
def test_rows_of_the_weight_come_back_as_they_were_given(level: str, dtype: torch.dtype) -> None:
    weight = random(701, 130, dtype=dtype, seed=1)
    linear = product_of(weight, None, 2, level)
    some = [torch.tensor([700, 0, 3, 3, 64]), torch.tensor([5]).int()]
    for indices in (*some, torch.arange(701), torch.empty(0).long()):
        assert torch.equal(linear.rows(indices), weight[indices])
    for wrong in (701, -1):
        with pytest.raises(AssertionError, match="none of the rows"):
            linear.rows(torch.tensor([0, wrong]))


@every_level
@both_dtypes
def test_a_row_gets_the_same_bits_alone_among_others_and_on_two_threads(level: str, dtype: torch.dtype) -> None:
    weight, x = random(700, 1536, dtype=dtype, seed=1), random(200, 1536, dtype=dtype, seed=2)
    one, two = (product_of(weight, None, threads, level) for threads in (1, 2))
    whole = two(x)
    assert torch.equal(one(x), whole)
    for rows in (slice(0, 1), slice(199, 200), slice(93, 100), slice(5, 69)):
        assert torch.equal(two(x[rows]), whole[rows])


@every_level
@both_dtypes
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1, 1], [3, 120, 1], [97, 200]], ids=str)
def test_several_layers_in_one_call_give_the_bits_of_one_by_one(
    level: str, dtype: torch.dtype, threads: int, counts: list[int]
) -> None:
    weights = random(len(counts), 300, 512, dtype=dtype, seed=1)
    linears = [product_of(weight, None, threads, level) for weight in weights]
    x = random(sum(counts), 514, dtype=dtype, seed=2)[:, 2:]
    one_by_one = [linear(part) for linear, part in zip(linears, x.split(counts), strict=True)]
    assert torch.equal(CpuProduct.each(linears, counts, x), torch.cat(one_by_one))


@both_dtypes
def test_rows_may_be_views_of_wider_ones(dtype: torch.dtype) -> None:
    linear = product_of(random(100, 64, dtype=dtype, seed=1))
    odd, even = random(9, 161, dtype=dtype, seed=2), random(9, 160, dtype=dtype, seed=3)
    for x in (odd[:, 32:96], odd[::2, 1:65], even[:, 32:96], even[:, :128:2], random(64, 9, dtype=dtype, seed=4).T):
        assert torch.equal(linear(x), linear(x.contiguous()))


def test_it_says_which_weights_it_does_not_take() -> None:
    assert not is_repacked(torch.empty(8, 8, dtype=torch.float16))
    assert not is_repacked(torch.empty(8, 7))
    assert is_repacked(torch.empty(8, 8)) == (cpu_ops.levels()[-1] != "portable")

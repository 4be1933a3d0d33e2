"""Products with weights that are kept as codes, against float64 products of the values that the gguf package reads."""

import numpy as np
import pytest
import torch

from penstock.executor.code_types import has_vectors
from penstock.executor.kernels.cpu_ops import levels
from penstock.executor.kernels.cpu_product import CpuProduct
from penstock.executor.protocol import ExecutorError
from tests.support.coded import FILE_TYPES, coded

pytestmark = [
    pytest.mark.skipif(not has_vectors(), reason="without AVX2 codes become numbers"),
    pytest.mark.usefixtures("two_threads"),
]
CPU = torch.device("cpu")
OUTPUT_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}


def is_near(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | float = 0.0) -> bool:
    """Off by what the input's integers round, half a unit in 32,512 of the largest of 32 neighbours, and what sums in
    float32 do."""
    x = x.double()
    largest = x.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
    exact = x @ values.T + bias
    bound = largest @ values.abs().T / 65_000 + 1e-5 * (x.abs() @ values.abs().T) + 1e-6
    return bool(((got.double() - exact).abs() <= bound + OUTPUT_ROUNDING[got.dtype] * exact.abs()).all())


def inputs(rows: int, depth: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Neighbours of very different size, as real activations have."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, depth, generator=made) * torch.rand(depth, generator=made).pow(4) * 10).to(dtype)


@pytest.mark.parametrize("dtype", OUTPUT_ROUNDING, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("level", levels()[1:])
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_products_are_those_of_the_file_s_values(kind: str, level: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(1)
    weight, values = coded(rng, (70, 768), kind)
    bias = torch.randn(70)
    linear = CpuProduct([weight], dtype, bias, level=level)
    for rows in (1, 2, 3, 7, 100):
        x = inputs(rows, 768, dtype)
        assert is_near(linear(x), x, values, bias)


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_rows_come_back_as_the_file_has_them(kind: str) -> None:
    weight, values = coded(np.random.default_rng(2), (50, 512), kind)
    assert torch.equal(weight.dequantize(CPU, torch.float64), values)
    linear = CpuProduct([weight], torch.float32)
    numbers = torch.tensor([3, 0, 49, 3, 17])
    assert torch.equal(linear.rows(numbers).double(), values[numbers])
    assert linear.rows(numbers[:0]).shape == (0, 512)


@pytest.mark.parametrize("dtype", OUTPUT_ROUNDING, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_row_is_the_same_bits_in_every_batch_and_on_any_number_of_threads(kind: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    weights = [coded(rng, (size, 1024), kind)[0] for size in (1500, 40)]
    one, two = (CpuProduct(weights, dtype, num_threads=number) for number in (1, 2))
    x = inputs(200, 1024, dtype)
    whole = two(x)
    assert torch.equal(one(x), whole)
    for first, rows in ((5, 1), (11, 2), (90, 10), (100, 97)):
        assert torch.equal(two(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_level_makes_the_same_bits(kind: str) -> None:
    """A model gives the same answers on an old CPU and on a new one."""
    weights = [coded(np.random.default_rng(8), (size, 1024), kind)[0] for size in (70, 40)]
    fused = [CpuProduct(weights, torch.float32, level=level) for level in levels()[1:]]
    for rows in (1, 2, 3, 5, 9, 17, 33, 130):
        x = inputs(rows, 1024, torch.float32)
        made = [linear(x) for linear in fused]
        assert all(torch.equal(each, made[0]) for each in made)


def test_layers_of_mixed_types_lie_side_by_side_and_each_reads_its_own_rows() -> None:
    rng = np.random.default_rng(4)
    given = [coded(rng, (size, 256), kind) for size, kind in ((33, "Q4_K"), (16, "Q6_K"), (7, "Q8_0"))]
    x = inputs(5, 256, torch.float32)
    bias = torch.randn(56)
    together = CpuProduct([weight for weight, _ in given], torch.float32, bias)(x)
    alone = [CpuProduct([weight], torch.float32)(x) for weight, _ in given]
    assert torch.equal(together, torch.cat(alone, 1) + bias)
    assert torch.equal(CpuProduct([given[0][0]], torch.float32)(x.T.contiguous().T), alone[0]), "any strides"

    experts = [CpuProduct([coded(rng, (24, 256), kind)[0]], torch.float32) for kind in ("Q4_K", "Q5_K", "Q4_K")]
    counts, x = [1, 7, 120], inputs(128, 256, torch.float32)
    each = [expert(part) for expert, part in zip(experts, x.split(counts), strict=True)]
    assert torch.equal(CpuProduct.each(experts, counts, x), torch.cat(each))


def test_parts_of_a_weight_are_cut_between_blocks_or_become_numbers() -> None:
    weight, values = coded(np.random.default_rng(5), (48, 1024), "Q4_K")
    part = weight.narrow(0, 16, 24).narrow(1, 256, 512)
    assert part.shape == (24, 512) and part.format is weight.format
    assert torch.equal(part.dequantize(CPU, torch.float64), values[16:40, 256:768])
    linear, x = CpuProduct([part], torch.float32), inputs(3, 512, torch.float32)
    assert is_near(linear(x), x, values[16:40, 256:768])
    cut = weight.narrow(1, 128, 512)
    assert cut.is_numbers and torch.equal(cut.codes.double(), values[:, 128:640])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_no_number_spoils_its_own_row_alone(bad: float) -> None:
    weight, _ = coded(np.random.default_rng(6), (20, 256), "Q4_0")
    linear, x = CpuProduct([weight], torch.float32), inputs(4, 256, torch.float32)
    expected = linear(x)
    x[2, 77] = bad
    assert linear(x)[2].isnan().all()
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(linear(x)[kept], expected[kept])
    assert torch.equal(linear(torch.zeros(1, 256)), torch.zeros(1, 20))


@pytest.mark.parametrize(("kind", "at"), [("Q4_K", 2), ("Q8_0", 0), ("Q6_K", 208), ("MXFP4", 0)])
def test_a_scale_that_is_not_finite_is_refused_with_its_row(kind: str, at: int) -> None:
    weight, _ = coded(np.random.default_rng(7), (9, 512), kind)
    rows = weight.codes.clone()
    rows[4, at : at + 2] = 255 if kind == "MXFP4" else torch.tensor([0, 0x7C], dtype=torch.uint8)
    for use in (lambda it: it.dequantize(CPU, torch.float32), lambda it: CpuProduct([it], torch.float32)):
        with pytest.raises(ExecutorError, match=f"tensor 'a weight': row 4 has a scale of {kind} that is not finite"):
            use(weight._replace(codes=rows))

"""The C products: with numbers, and with weights that are kept as codes, against float64 products of the stored values, at
every instruction level that this CPU has, and against themselves. All layers of a decoder without experts in one call: the
same bits as one call after the other, whatever the layers have.

The values of codes are those that the gguf package reads. Without AVX2, codes become numbers.
"""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from penstock.executor.code_types import has_vectors
from penstock.executor.kernels import cpu_ops
from penstock.executor.kernels.cpu_product import CpuProduct, is_repacked
from penstock.executor.kernels.weight import Weight, plain_weight
from penstock.executor.models.decoder import Decoder
from penstock.executor.protocol import DType, ExecutorError
from tests.support.checkpoints import executor_of, prompts
from tests.support.coded import FILE_TYPES, coded
from tests.support.driver import Driver
from tests.support.paged import random
from tests.support.refusals import hardest

pytestmark = pytest.mark.usefixtures("two_threads")
needs_codes = pytest.mark.skipif(not has_vectors(), reason="without AVX2 codes become numbers")
CPU = torch.device("cpu")
OUTPUT_ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-8}
NUMBERS = "numbers"
ON_NUMBERS = [(NUMBERS, level) for level in cpu_ops.levels()]
ON_CODES = [(kind, level) for kind in FILE_TYPES for level in cpu_ops.levels()[1:]]
SHAPES = [(1, 2), (63, 64), (200, 576), (576, 1536), (65, 130)]
both_dtypes = pytest.mark.parametrize("dtype", cpu_ops.DTYPES, ids=["float32", "bfloat16"])


def stored(
    rng: np.random.Generator, shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> tuple[Weight, torch.Tensor]:
    """Return a weight and its values in float64. Numbers are of the dtype."""
    if kind != NUMBERS:
        return coded(rng, shape, kind)
    numbers = (torch.from_numpy(rng.standard_normal(shape)) / shape[1] ** 0.5).to(dtype)
    return plain_weight(numbers), numbers.double()


def is_near(got: torch.Tensor, x: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, is_coded: bool) -> bool:
    """Tell whether a product is off by no more than what its output and sums in float32 round. Codes are multiplied by
    integers: an input may be off by half a unit in 32,512 of the largest of 32 neighbours."""
    x = x.double()
    exact = x @ values.T + bias
    bound = 1e-6 * (x.abs() @ values.abs().T) + 1e-6
    if is_coded:
        largest = x.abs().unflatten(1, (-1, 32)).amax(2).repeat_interleave(32, 1)
        bound = 10 * bound + largest @ values.abs().T / 65_000
    return bool(((got.double() - exact).abs() <= bound + OUTPUT_ROUNDING[got.dtype] * exact.abs()).all())


def inputs(rows: int, depth: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return neighbours of very different size, as real activations have."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, depth, generator=generator) * torch.rand(depth, generator=generator).pow(4) * 10).to(
        dtype
    )


@both_dtypes
@pytest.mark.parametrize(("kind", "level"), ON_NUMBERS + ON_CODES)
def test_products_are_those_of_the_stored_values(kind: str, level: str, dtype: torch.dtype) -> None:
    """Weights in bfloat16 are also multiplied in float32."""
    is_coded, rng = kind != NUMBERS, np.random.default_rng(1)
    for shape in [(70, 768)] if is_coded else SHAPES:
        weight, values = stored(rng, shape, kind, dtype)
        for bias in (None, torch.randn(shape[0])):
            for computed in {dtype, dtype if is_coded else torch.float32}:
                product = CpuProduct([weight], computed, bias, level=level)
                for rows in (0, 1, 2, 3, 5, 6, 7, 19, 100):
                    x = inputs(rows, shape[1], dtype).to(computed)
                    assert is_near(product(x), x, values, torch.zeros(()) if bias is None else bias, is_coded), rows


@both_dtypes
@pytest.mark.parametrize(("kind", "level"), ON_NUMBERS + ON_CODES)
def test_rows_come_back_as_they_are_stored(kind: str, level: str, dtype: torch.dtype) -> None:
    rows, depth = (701, 130) if kind == NUMBERS else (50, 512)
    weight, values = stored(np.random.default_rng(2), (rows, depth), kind, dtype)
    assert torch.equal(weight.dequantize(CPU, torch.float64), values)
    product = CpuProduct([weight], dtype, level=level)
    some = [torch.tensor([rows - 1, 0, 3, 3, 17]), torch.tensor([5]).int()]
    for indices in (*some, torch.arange(rows), torch.empty(0).long()):
        assert torch.equal(product.rows(indices), values[indices].to(dtype))
    for wrong in (rows, -1):
        with pytest.raises(AssertionError, match="none of the rows"):
            product.rows(torch.tensor([0, wrong]))


@both_dtypes
@pytest.mark.parametrize(("kind", "level"), [*ON_NUMBERS, *((kind, None) for kind in FILE_TYPES if has_vectors())])
def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(kind: str, level: str | None, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    weights = [stored(rng, (size, 1024), kind, dtype)[0] for size in (1500, 40)]
    one, two = (CpuProduct(weights, dtype, num_threads=number, level=level) for number in (1, 2))
    x = inputs(200, 1024, dtype)
    whole = two(x)
    assert torch.equal(one(x), whole)
    for first, rows in ((0, 1), (5, 1), (11, 2), (90, 10), (100, 97), (199, 1)):
        assert torch.equal(two(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_every_level_makes_the_same_bits(kind: str) -> None:
    """A model gives the same answers on an old CPU and on a new one."""
    weights = [coded(np.random.default_rng(8), (size, 1024), kind)[0] for size in (70, 40)]
    fused = [CpuProduct(weights, torch.float32, level=level) for level in cpu_ops.levels()[1:]]
    for rows in (1, 2, 3, 5, 9, 17, 33, 130):
        x = inputs(rows, 1024, torch.float32)
        outputs = [product(x) for product in fused]
        assert all(torch.equal(each, outputs[0]) for each in outputs)


@both_dtypes
@pytest.mark.parametrize("level", cpu_ops.levels())
@pytest.mark.parametrize("counts", [[1], [1, 1, 1, 1], [3, 120, 1], [97, 200]], ids=str)
def test_layers_in_one_call_have_the_bits_of_one_by_one(level: str, dtype: torch.dtype, counts: list[int]) -> None:
    weights = random(len(counts), 300, 512, dtype=dtype, seed=1)
    x = random(sum(counts), 514, dtype=dtype, seed=2)[:, 2:]
    for threads in (1, 2):
        products = [CpuProduct([plain_weight(weight)], dtype, None, threads, level) for weight in weights]
        one_by_one = [product(part) for product, part in zip(products, x.split(counts), strict=True)]
        assert torch.equal(CpuProduct.each(products, counts, x), torch.cat(one_by_one))


@needs_codes
def test_layers_of_mixed_types_lie_side_by_side_and_each_reads_its_own_rows() -> None:
    rng = np.random.default_rng(4)
    layers = [coded(rng, (size, 256), kind)[0] for size, kind in ((33, "Q4_K"), (16, "Q6_K"), (7, "Q8_0"))]
    x = inputs(5, 256, torch.float32)
    bias = torch.randn(56)
    together = CpuProduct(layers, torch.float32, bias)(x)
    alone = [CpuProduct([weight], torch.float32)(x) for weight in layers]
    assert torch.equal(together, torch.cat(alone, 1) + bias)

    experts = [CpuProduct([coded(rng, (24, 256), kind)[0]], torch.float32) for kind in ("Q4_K", "Q5_K", "Q4_K")]
    counts, x = [1, 7, 120], inputs(128, 256, torch.float32)
    each = [expert(part) for expert, part in zip(experts, x.split(counts), strict=True)]
    assert torch.equal(CpuProduct.each(experts, counts, x), torch.cat(each))


@both_dtypes
@pytest.mark.parametrize("kind", [NUMBERS, pytest.param("Q4_K", marks=needs_codes)])
def test_rows_may_be_views_of_wider_ones(kind: str, dtype: torch.dtype) -> None:
    product = CpuProduct([stored(np.random.default_rng(1), (100, 256), kind, dtype)[0]], dtype)
    odd, even = random(9, 641, dtype=dtype, seed=2), random(9, 640, dtype=dtype, seed=3)
    turned = random(256, 9, dtype=dtype, seed=4).T
    for x in (odd[:, 32:288], odd[::2, 1:257], even[:, 32:288], even[:, :512:2], turned):
        assert torch.equal(product(x), product(x.contiguous()))


@needs_codes
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_an_input_that_is_no_number_spoils_its_own_row_alone(bad: float) -> None:
    weight, _ = coded(np.random.default_rng(6), (20, 256), "Q4_0")
    product, x = CpuProduct([weight], torch.float32), inputs(4, 256, torch.float32)
    expected = product(x)
    x[2, 77] = bad
    assert product(x)[2].isnan().all()
    kept = torch.tensor([0, 1, 3])
    assert torch.equal(product(x)[kept], expected[kept])
    assert torch.equal(product(torch.zeros(1, 256)), torch.zeros(1, 20))


@needs_codes
@pytest.mark.parametrize(("kind", "at"), [("Q4_K", 2), ("Q8_0", 0), ("Q6_K", 208), ("MXFP4", 0)])
def test_a_scale_that_is_not_finite_is_refused_with_its_row(kind: str, at: int) -> None:
    weight, _ = coded(np.random.default_rng(7), (9, 512), kind)
    rows = weight.codes.clone()
    rows[4, at : at + 2] = 255 if kind == "MXFP4" else torch.tensor([0, 0x7C], dtype=torch.uint8)
    for use in (lambda it: it.dequantize(CPU, torch.float32), lambda it: CpuProduct([it], torch.float32)):
        with pytest.raises(ExecutorError, match=f"tensor 'a weight': row 4 has a scale of {kind} that is not finite"):
            use(weight._replace(codes=rows))


def test_numbers_that_c_multiplies_faster_than_torch_are_repacked() -> None:
    assert not is_repacked(torch.empty(8, 8, dtype=torch.float16))
    assert not is_repacked(torch.empty(8, 7))
    assert is_repacked(torch.empty(8, 8)) == (cpu_ops.levels()[-1] != "portable")


needs_vectors = pytest.mark.skipif(cpu_ops.levels()[-1] == "portable", reason="without AVX2 torch multiplies")
CASES = ["llama", "llama-one-layer", "qwen2", "qwen3", "gemma3", "mistral-sliding", "llama-tied-biases", "qwen3.5"]


@pytest.fixture
def filled() -> Iterator[None]:
    """Fill new tensors with NaN until they are written."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def run(case: str, dtype: DType, is_joined: bool) -> None:
    """Run a model that computes all its layers in one call, or each by itself."""
    executor = executor_of(case, dtype=dtype)
    model = executor._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is not None
    if not is_joined:
        model._joined = None
    driver, running = Driver(executor), []
    for prompt in prompts(4, seed=3):
        running.append(driver.admit(prompt))
        driver.advance(*reversed(running), chunk=7)
    driver.generate(*running, count=10, chunk=7)


@pytest.mark.parametrize("dtype", hardest(["float32", "bfloat16"], "bfloat16"))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("filled")
@needs_vectors
def test_one_call_gives_the_bits_of_many(case: str, dtype: DType, recorded: list[torch.Tensor]) -> None:
    for is_joined in (True, False):
        run(case, dtype, is_joined)
    steps = len(recorded) // 2
    assert steps > 10 and len(recorded) == 2 * steps
    assert all(torch.equal(one, many) for one, many in zip(recorded[:steps], recorded[steps:], strict=True))


@needs_vectors
@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v2-lite", "qwen3-next", "granite4-mamba-groups", "lfm2"])
def test_what_that_call_does_not_have_goes_layer_by_layer(case: str) -> None:
    model = executor_of(case)._rank.loaded.model
    assert isinstance(model, Decoder) and model._joined is None

"""Products in Triton: of few rows, with packed codes of which programs share the depth, and in eight bits, against their twins; and
the twins against the numbers and the products that they stand for.
The experts in Triton: tiles, products in eight bits, and models that compute their experts in one call. The router's choice of
experts where logits tie or are NaN, and the order of its entries, against a stable sort."""

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu import cases as calls
from benchmarks.gpu.cases import Kit, blocks, packed
from triton.runtime.interpreter import InterpretedFunction

from penstock.executor.kernels import Fp8Rows, NormedRows, Ops
from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import few_rows, linear_products, routing, tiles
from penstock.executor.kernels.cuda import rows as row_kernels
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.stored_formats import Groups, as_groups, group_of, half_of
from penstock.executor.kernels.weight import Weight, plain_weight
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.uniproc import UniprocExecutor
from tests.support import cards
from tests.support.checkpoints import compute_with, executor_of
from tests.support.coded import FILE_TYPES, coded
from tests.support.driver import Driver
from tests.support.kernel_cases import TOLERANCE, check, close, every_dtype, matrix, triton_kernels
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.twins import changed, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins import grouped as twin
from tests.support.twins.eight_bits import quantize, widen_rows
from tests.support.twins.experts import fused_experts

CPU = torch.device("cpu")
Kind = tuple[int, int, str | None]  # bits (0: floats of eight bits), group, what is below
KINDS = cases(__file__, "kinds of packed weights")


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
    joined = parts[0].format.pack_for_gpu(parts, CPU)
    assert torch.equal(twin.widen(joined), expected)
    assert joined.shape == (64, 384)
    rows = torch.tensor([3, 63, 3])
    assert torch.equal(Linear([joined], None, torch_ops).rows(rows, torch.float32), expected[rows])


@every_dtype
@pytest.mark.parametrize("splits", [1, 4])
def test_the_depth_may_be_cut(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, splits: int, dtype: torch.dtype
) -> None:
    """There are three steps, so the last of four parts has none. Rows and bias lie in wider tensors."""
    monkeypatch.setattr(linear_products, "depth_splits", lambda *_: splits)
    kit = Kit(device, dtype)
    weight = packed(kit, 64, 384, group=64, below=torch.uint8)
    x, bias = kit.random(3, 400)[:, :384], kit.random(65)[1:]
    expected = x.double() @ twin.widen(weight).to(dtype).double().t() + bias.double()
    close(linear_products.linear(x, weight, bias), expected)


def test_half_a_step_fits_the_depth_and_the_groups() -> None:
    for bits, columns, group, half in cases(__file__, "halves of steps"):
        assert half_of(Weight(Groups(bits), torch.zeros(1, columns), torch.zeros(1, columns // group))) == half


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
    weight = blocks(Kit(device, torch.float32), 200, 384)
    x = Fp8Rows(quantize(random(rows, 384).to(device)), torch.float32)
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


@pytest.mark.parametrize("width", [96, pytest.param(200, marks=pytest.mark.slow)])
def test_many_rows_by_channels_of_eight_bits_have_one_scale_each(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, width: int
) -> None:
    """The codes of 200 outputs do not fit cuBLAS and are dequantized, like those of any width by default."""
    kit = Kit(device, torch.bfloat16)
    weight, x = packed(kit, width, 384, bits=0, group=None), kit.random(515, 400)[:, :384]
    bias = kit.random(width)
    assert weight.scales is not None
    wide = weight.codes.double() * weight.scales.t().double()
    exact = x.double() @ wide.t() + bias.double()
    close(linear_products.linear(x, weight, bias), exact, torch.bfloat16)
    monkeypatch.setattr(linear_products, "MULTIPLIES_BY_ROW_SCALES", True)
    actual = linear_products.linear(x, weight, bias)
    largest = x.double().abs().amax(1, keepdim=True) / 448
    rows = (x.double() / largest).float().to(torch.float8_e4m3fn).double() * largest
    by_rows = rows @ wide.t() + bias.double()
    close(actual, by_rows if width == 96 else exact, torch.bfloat16)
    assert 0.005 < (by_rows - exact).norm() / exact.norm() < 0.05
    close(linear_products.linear(x, weight, bias, is_fixed=True), exact, torch.bfloat16)


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


QWEN3 = MoeSpec(128, 8, 768, renormalize=True)
V2 = MoeSpec(160, 6, 1536, renormalize=False, scale=16.0, num_groups=8, top_groups=3)


@pytest.mark.parametrize(
    ("tokens", "sizes", "make", "rows"), cases(__file__, "tiles of experts", calls=calls, pytest=pytest)
)
def test_experts_in_tiles_of_any_size_equal_the_twin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, tokens: int, sizes: calls.ExpertSizes, make: Any, rows: int
) -> None:
    """The depth of the second product is cut in two."""
    monkeypatch.setattr(moe, "expert_tile", lambda *_: tiles.Tile(rows, 32, 4, 2))
    monkeypatch.setattr(moe, "expert_splits", lambda *_: 2)
    kit = calls.Kit(device, torch.float32 if make is calls.plain else torch.bfloat16)
    check(triton_kernels(device), kit, TOLERANCE, calls.experts, tokens, sizes, make)


@pytest.mark.parametrize(("num_grouped", "ops", "card", "shape"), cases(__file__, "grouped experts", **globals()))
def test_experts_of_many_rows_in_grouped_products_equal_the_twin(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, num_grouped: int, ops: Ops, card: Any, shape: tuple[Any, ...]
) -> None:
    monkeypatch.setattr(moe, "USES_GROUPED_MM", True)
    monkeypatch.setattr(moe, "current_card", lambda: card)
    monkeypatch.setattr(moe, "expert_tile", lambda *_: tiles.Tile(128, 32, 4, 2))
    monkeypatch.setattr(F, "grouped_mm", grouped_mm := mock.Mock(wraps=F.grouped_mm))
    kernels = triton_kernels(device)._replace(ops=ops)
    check(kernels, calls.Kit(device, torch.bfloat16), TOLERANCE, calls.experts, *shape)
    assert grouped_mm.call_count == num_grouped


@matrix("tokens, first", (25, 70), (0, 1), hardest=[(25, 0)])
def test_experts_with_many_entries_multiply_in_eight_bits(device: torch.device, tokens: int, first: int) -> None:
    """Kernel and twin may round to different eight-bit numbers. Hopper's tensor cores add eight-bit products in fewer than
    24 bits, so this happens more often there. The same experts in full differ by what eight bits cannot hold."""
    kernels, answers = triton_kernels(device), []
    for make, used in ((calls.blocks, kernels), (calls.blocks, calls.TWINS), (calls.plain, calls.TWINS)):
        torch.manual_seed(0)
        kit, held = calls.Kit(device, torch.bfloat16), (first, 3)
        (layer,) = calls.experts(kit, "", tokens, (3, 2, 384, 128), make, has_added=True, held=held)
        answers.append(layer.call(used).double())
    actual, expected, full = answers
    assert (actual - expected).norm() < (5e-3 if device.type == "cpu" else 1e-2) * expected.norm()
    assert 0.01 * full.norm() < (actual - full).norm() < 0.06 * full.norm()


@pytest.mark.parametrize(("case", "shared_width", "num_shared"), cases(__file__, "shared experts"))
def test_experts_in_one_call_give_the_tokens_of_one_by_one(
    monkeypatch: pytest.MonkeyPatch, case: str, shared_width: int | None, num_shared: int
) -> None:
    """Through the models' seam: the experts' weights in one tensor, the shared ones too where their width allows it."""
    overrides = {} if shared_width is None else {"shared_expert_intermediate_size": shared_width}
    given = {"hf_overrides": overrides, "load_format": "dummy"}
    drivers = [driver_of(monkeypatch, fused, case, **given) for fused in (None, fused_experts)]
    assert [counts_of_shared(driver) for driver in drivers] == [{0}, {num_shared}]
    first, second = (driver.generate(driver.admit([5, 17, 3, 99, 42, 8]), count=8) for driver in drivers)
    assert first == second


def counts_of_shared(driver: Driver) -> set[int]:
    assert isinstance(driver.executor, UniprocExecutor)
    return {experts.num_shared for experts in driver.executor._rank.runner._model.experts}


def driver_of(monkeypatch: pytest.MonkeyPatch, fused: Any, model: str, **options: Any) -> Driver:
    """Return a driver on a CPU whose linear layers are plain. `fused` computes the experts; None: each alone."""
    compute_with(monkeypatch, changed(torch_ops, fused_experts=fused))
    return Driver(executor_of(model, **options))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are left out, which only the interpreter can")
@pytest.mark.parametrize(("tokens", "expected"), [(1, [(23, 360, 16), (12, 720, 16)]), (256, [(23, 2880, 32)] * 2)])
def test_mxfp4_experts_take_few_steps(monkeypatch: pytest.MonkeyPatch, tokens: int, expected: list[Any]) -> None:
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **options: noted.append(options))
    kit = calls.Kit(CPU, torch.bfloat16, is_empty=True)
    (layer,) = calls.experts(kit, "", tokens, (32, 4, 2880, 2880), calls.mxfp4, "clamped_swish", True)
    layer.call(triton_kernels(CPU))
    products = [(each["SPEC"], math.prod(each["grid"]), each["ROWS"]) for each in noted if "SPEC" in each]
    assert [(-(-spec.depth // (spec.step * spec.splits)), *rest) for spec, *rest in products] == expected


def test_of_equal_experts_the_first_is_chosen(device: torch.device) -> None:
    ids, shares = routing.choose_experts(torch.zeros(2, 128, device=device), None, QWEN3)
    assert ids.dtype is torch.int32 and ids.tolist() == [list(range(8))] * 2
    close(shares, torch.full((2, 8), 1 / 8))


def test_logits_that_are_no_numbers_choose_experts_that_there_are(device: torch.device) -> None:
    logits = torch.full((3, 160), torch.nan, device=device)
    ids, _ = routing.choose_experts(logits, None, V2)
    assert ((ids >= 0) & (ids < 160)).all()


@matrix(
    "entries, first, num_slots", (0, 1, 32, 33, 200), (0, 5), (7, 20), hardest=[(0, 0, 20), (33, 0, 20), (200, 5, 7)]
)
def test_entries_lie_by_slot_and_in_their_order(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, entries: int, first: int, num_slots: int
) -> None:
    """In one chunk of 32, and in several; in four parts of a chunk; in more tiles than a program compares at once."""
    monkeypatch.setattr(routing, "CHUNK_ENTRIES", 32)
    monkeypatch.setattr(routing, "CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(routing, "PAIRS", 8 * 32)
    slots = torch.randint(20, (entries, 1), generator=torch.Generator().manual_seed(entries))
    slots[: entries // 3] = 6  # a favourite
    for dtype in (torch.int32, torch.int64):
        sorted_by = routing.sort_entries(slots.to(device, dtype), num_slots, first, 16)
        expected = [
            (slot - first, part.tolist())
            for slot in range(first, first + num_slots)
            for part in (slots[:, 0] == slot).nonzero()[:, 0].split(16)
            if len(part)
        ]
        ids, tiles = sorted_by.ids.view(-1, 16).tolist(), sorted_by.tiles.tolist()
        assert [(slot, own[:rows]) for (slot, rows), own in zip(tiles, ids, strict=True) if rows] == expected
        assert all(rows == 0 for _, rows in tiles[len(expected) :])
        alone = routing.sort_entries(slots.to(device, dtype), num_slots, first, 1)
        own = [entry for _, part in expected for entry in part]
        assert alone.ids.tolist()[: len(own)] == own and not alone.ids[len(own) :].any()
        assert alone.places[own].tolist() == list(range(len(own)))
        assert alone.ends.tolist() == [
            sum(first <= slot <= first + each for slot in slots[:, 0].tolist()) for each in range(num_slots)
        ]

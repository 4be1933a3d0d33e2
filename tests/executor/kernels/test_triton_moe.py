"""The experts in Triton against their twin, and both against the loop over experts that a CPU runs."""

import math
from typing import Any, NamedTuple, cast

import pytest
import torch
from benchmarks.gpu import cases as calls
from benchmarks.gpu import twin_part
from triton.runtime.interpreter import InterpretedFunction

from penstock.executor.kernels import UNGATED, Activation
from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import tiles
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.kernels.eight_bits import are_quantized, pad_scales
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight, pack_for_gpu, plain_weight, stack
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.kernels.test_triton_packed import KINDS, Kind, as_int4, grouped, moved
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.eight_bits import quantize
from tests.support.kernel_cases import TOLERANCE, close, matrix
from tests.support.launch_counts import launches
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.small_models import greedy
from tests.support.twins import changed, torch_ops
from tests.support.twins import experts as experts_twin
from tests.support.twins.experts import fused_experts

Tensor = torch.Tensor
CPU = torch.device("cpu")
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # tokens, slots, shares, and the two weights


def case(
    tokens: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype, device: torch.device
) -> Case:
    choice = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    choice[:, 0] += 0.5  # a favourite, so that some tiles are full and some experts have none
    slots = choice.topk(top_k).indices
    shares = random(tokens, top_k, seed=2).softmax(-1)
    gate_up = random(experts, 2 * inner, width, dtype=dtype, seed=3) / width**0.5
    down = random(experts, width, inner, dtype=dtype, seed=4) / inner**0.5
    hidden = random(tokens, width, dtype=dtype)
    return hidden.to(device), slots.to(device), shares.to(device), gate_up.to(device), down.to(device)


class Row(NamedTuple):
    format: str | Kind  # "numbers", "blocks", "mxfp4", or a kind of packed weights
    sizes: tuple[int, int, int, int, int]  # tokens, experts, top_k, width, inner
    dtype: torch.dtype = torch.float32
    activation: Activation = "silu"
    has_biases: bool = False
    has_added: bool = False
    held: tuple[int, int] = (0, 99)  # the experts of this rank
    tile_rows: int | None = None
    is_slow: bool = False


PACKED = [(KINDS[0], 9), (KINDS[1], 1), ((0, 64, *KINDS[7][2:]), 70)]
FAST = PACKED[1:]
NAMES = {"Row": Row, "TOLERANCE": TOLERANCE, "torch": torch, "PACKED": PACKED, "FAST": FAST}
ROWS = [row for rows in cases(__file__, "experts", **NAMES) for row in rows]


def weights_of(row: Row, gate_up: Tensor, down: Tensor) -> tuple[Weight, Weight]:
    """Return both weights of the rank's experts in the row's format: of these numbers, or random codes."""
    if row.format == "numbers":
        return plain_weight(gate_up), plain_weight(down)
    if row.format == "blocks":
        return in_blocks(gate_up), in_blocks(down)
    shapes = [(each.shape[1], each.shape[2]) for each in (gate_up, down)]
    if row.format == "mxfp4":
        up, narrow = (as_int4(len(down), *shape, seed) for seed, shape in enumerate(shapes))
    else:
        kind = cast(Kind, row.format)
        up, narrow = (
            stack([pack_for_gpu([grouped(*shape, kind, seed)], CPU) for seed in range(len(down))]) for shape in shapes
        )
    return up, narrow


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow_in_interpreter if row.is_slow else ()) for row in ROWS],
    ids=[f"{row.format}-{row.sizes[0]}-{row.dtype}" for row in ROWS],
)
def test_experts_equal_the_twin(monkeypatch: pytest.MonkeyPatch, device: torch.device, row: Row) -> None:
    if row.tile_rows is not None:
        monkeypatch.setattr(moe, "expert_tile", lambda *_: tiles.Tile(row.tile_rows, 32, 4, 2))
        monkeypatch.setattr(moe, "expert_splits", lambda *_: 2)
    hidden, slots, shares, gate_up, down = case(*row.sizes, row.dtype, CPU)
    if not isinstance(row.format, str):  # its numbers are large
        hidden = hidden / 20
    held, (tokens, experts, _, width, inner) = slice(*row.held), row.sizes
    if row.activation in UNGATED:
        gate_up = gate_up[:, :inner].contiguous()
    weights = weights_of(row, gate_up[held], down[held])
    added = random(tokens, width, dtype=row.dtype, seed=8) if row.has_added else None
    both = random(experts, 2 * inner, dtype=row.dtype, seed=5), random(experts, width, dtype=row.dtype, seed=6)
    biases = both if row.has_biases else (None, None)

    def computed(kernel: Any, weights: tuple[Weight, Weight], is_wide: bool) -> Tensor:
        def move(tensor: Tensor | None) -> Any:
            return None if tensor is None else (tensor.double() if is_wide else tensor).to(device)

        given = move(hidden), slots.to(device), move(shares), *(moved(weight, device) for weight in weights)
        made: Tensor = kernel(*given, row.held[0], row.activation, move(added), [*map(move, biases)])
        return made

    wide = plain_weight(gate_up[held].double()), plain_weight(down[held].double())
    exact = computed(fused_experts, wide if row.format == "numbers" else weights, True)
    scale = 1.0 if isinstance(row.format, str) else exact.abs().max()
    close(computed(moe.fused_experts, weights, False) / scale, exact / scale, row.dtype)
    assert row.format != "blocks" or (exact - computed(fused_experts, wide, True)).norm() < 0.06 * exact.norm()


@matrix("tokens, first", (25, 70), (0, 1), hardest=[(25, 0)])
def test_experts_with_many_entries_multiply_in_eight_bits(device: torch.device, tokens: int, first: int) -> None:
    """Kernel and twin may round to different eight-bit numbers. Hopper's tensor cores add eight-bit products in fewer than
    24 bits, so this happens more often there."""
    hidden, slots, shares, gate_up, down = case(tokens, 3, 2, 384, 128, torch.bfloat16, torch.device("cpu"))
    weights = in_blocks(gate_up[first:]), in_blocks(down[first:])
    added = random(tokens, 384, dtype=torch.bfloat16, seed=8)
    assert are_quantized(slots.numel(), 3 - first)
    given = hidden.to(device), slots.to(device), shares.to(device)
    up, narrow = (moved(weight, device) for weight in weights)
    actual = moe.fused_experts(*given, up, narrow, first, "silu", added.to(device)).double().cpu()
    expected = fused_experts(hidden, slots, shares, *weights, first, "silu", added).double()
    assert (actual - expected).norm() < (5e-3 if device.type == "cpu" else 1e-2) * expected.norm()
    exact = hidden.double(), slots, shares, gate_up[first:].double(), down[first:].double()
    full = fused_experts(*exact[:3], plain_weight(exact[3]), plain_weight(exact[4]), first, "silu", added.double())
    assert 0.01 * full.norm() < (actual - full).norm() < 0.06 * full.norm()


def in_blocks(weights: torch.Tensor) -> Weight:
    """[S, N, K] in eight bits, with scales as the kernels take them."""
    pairs = [quantize(weight.float()) for weight in weights]
    return Weight(BLOCKS, torch.stack([values for values, _ in pairs]), torch.stack([pad_scales(s) for _, s in pairs]))


@pytest.mark.gpu
def test_an_entry_has_the_same_bits_in_whatever_company() -> None:
    """Which the interpreter's products do not have, numpy's."""
    device = torch.device("cuda")
    hidden, slots, shares, gate_up, down = case(40, 3, 2, 64, 32, torch.bfloat16, device)
    weights = plain_weight(gate_up), plain_weight(down)
    together = moe.fused_experts(hidden, slots, shares, *weights, 0, "silu")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(5)).to(device)
    shuffled = moe.fused_experts(hidden[order], slots[order], shares[order], *weights, 0, "silu")
    assert torch.equal(shuffled, together[order])


@pytest.mark.parametrize("kind", ["the twin", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("case_name", "num_shared"), [("mixtral", 0), ("deepseek-v2-lite", 2), ("qwen2-moe", 0)])
def test_a_model_gives_the_tokens_of_transformers(
    monkeypatch: pytest.MonkeyPatch, case_name: str, num_shared: int, kind: str
) -> None:
    """Through the models' seam: the experts' weights in one tensor, the shared ones too where their width allows it."""
    driver = driver_of(monkeypatch, moe if kind == "triton" else experts_twin, case_name)
    assert counts_of_shared(driver) == {num_shared}
    prompt = [5, 17, 3, 99, 42, 8, 71, 150]
    assert driver.generate(driver.admit(prompt), count=4) == [greedy(case_name, prompt, 4)[0]]


@pytest.mark.parametrize("width", [64, 96])
def test_a_shared_expert_with_a_gate_is_cut_into_experts(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    overrides = {"shared_expert_intermediate_size": width}
    given = {"hf_overrides": overrides, "load_format": "dummy"}
    drivers = [driver_of(monkeypatch, fused, "qwen2-moe", **given) for fused in (None, experts_twin)]
    assert [counts_of_shared(driver) for driver in drivers] == [{0}, {width // 32}]
    first, second = (driver.generate(driver.admit([5, 17, 3, 99, 42, 8]), count=8) for driver in drivers)
    assert first == second


def counts_of_shared(driver: Driver) -> set[int]:
    assert isinstance(driver.executor, UniprocExecutor)
    return {experts.num_shared for experts in driver.executor._rank.runner._model.experts}


def driver_of(monkeypatch: pytest.MonkeyPatch, kernels: Any, model: str, **given: Any) -> Driver:
    """On a CPU whose linear layers are plain. `kernels`: where the experts' come from, if from anywhere."""
    changes = {"fused_experts": None if kernels is None else kernels.fused_experts}
    if kernels is moe:
        changes["choose_experts"] = OPS.choose_experts
    compute_with(monkeypatch, changed(torch_ops, **changes))
    return Driver(executor_of(model, **given))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are left out, which only the interpreter can")
@pytest.mark.parametrize(("tokens", "expected"), [(1, [(23, 360, 16), (12, 720, 16)]), (256, [(23, 2880, 32)] * 2)])
def test_mxfp4_experts_take_few_steps(monkeypatch: pytest.MonkeyPatch, tokens: int, expected: list[Any]) -> None:
    noted: list[dict[str, Any]] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **options: noted.append(options))
    kit, kernels = calls.Kit(CPU, torch.bfloat16, is_empty=True), twin_part.open_kernels(CPU)
    assert kernels is not None
    (layer,) = calls.experts(kit, "", tokens, (32, 4, 2880, 2880), calls.mxfp4, "clamped_swish", True)
    layer.call(kernels)
    products = [(each["SPEC"], math.prod(each["grid"]), each["ROWS"]) for each in noted if "SPEC" in each]
    assert [(-(-spec.depth // (spec.step * spec.splits)), *rest) for spec, *rest in products] == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are left out, which only the interpreter can")
@pytest.mark.parametrize(("tokens", "expected"), [(1, 5), (40, 6)])
def test_a_layer_of_experts_is_few_launches(tokens: int, expected: int) -> None:
    """Behind the router's product: the choice, one or two to sort, up, down and the sum; no copies, no fills."""
    spec = MoeSpec(num_experts=30, top_k=14, intermediate_size=32, renormalize=True, scale=2.0)
    hidden, _, _, gate_up, down = case(tokens, 32, 2, 64, 32, torch.bfloat16, CPU)
    logits, weights = random(tokens, 30), (plain_weight(gate_up), plain_weight(down))
    with launches() as names:
        ids, shares = OPS.choose_experts(logits, None, spec, 2)
        OPS.fused_experts(hidden, ids, shares, *weights, 0, "silu")
    assert len(names) == expected, names

"""The experts in Triton: tiles, products in eight bits, and models that compute their experts in one call. The router's choice of
experts where logits tie or are NaN, and the order of its entries, against a stable sort."""

import math
from typing import Any

import pytest
import torch
from benchmarks.gpu import cases as calls
from triton.runtime.interpreter import InterpretedFunction

from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import routing, tiles
from penstock.executor.moe_spec import MoeSpec
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.kernel_cases import TOLERANCE, check, close, matrix, triton_kernels
from tests.support.refusals import cases
from tests.support.twins import changed, torch_ops
from tests.support.twins.experts import fused_experts

CPU = torch.device("cpu")
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

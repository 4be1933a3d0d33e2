"""The experts in Triton: tiles, products in eight bits, and models that compute their experts in one call."""

import math
from typing import Any

import pytest
import torch
from benchmarks.gpu import cases as calls
from triton.runtime.interpreter import InterpretedFunction

from penstock.executor.kernels.cuda import expert_products as moe
from penstock.executor.kernels.cuda import tiles
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.kernel_cases import TOLERANCE, check, matrix, triton_kernels
from tests.support.refusals import cases
from tests.support.twins import changed, torch_ops
from tests.support.twins.experts import fused_experts

CPU = torch.device("cpu")
TILES = [(70, (3, 2, 32, 32), calls.plain, rows) for rows in (16, 64, 128)]


@pytest.mark.parametrize(
    ("tokens", "sizes", "make", "rows"),
    [
        TILES[0],
        *(pytest.param(*each, marks=pytest.mark.slow_in_interpreter) for each in TILES[1:]),
        (19, (2, 2, 96, 160), calls.mxfp4, 32),
    ],
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

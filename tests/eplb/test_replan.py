"""Changing a plan that is in use: as little as will do, never for the worse, never more than allowed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from benchmarks.eplb_workloads import plan_by_definition
from numpy.typing import NDArray

from penstock.eplb import Plan, balance, plan, replan
from penstock.eplb.replanner import overlay
from tests.support.loads import SHAPES, awkward, drifted, num_repeats, skewed

KINDS = ["zipf", "logn1"]
DEPLOYMENTS = [(26, 64, 72, 8), (6, 64, 64, 8), (8, 256, 288, 32), (8, 256, 320, 64)]


def moves(old: Plan, new: Plan) -> int:
    return int((old.phy2log != new.phy2log).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", DEPLOYMENTS, ids=str)
def test_sampling_noise_alone_moves_nothing(shape: tuple[int, int, int, int], kind: str) -> None:
    layers, experts, slots, ranks = shape
    load = skewed(kind, layers, experts, tokens=8 << 20)
    old = plan(load, slots, ranks)
    again = np.random.default_rng(5).poisson(load)
    assert moves(old, replan(again, old)) == 0


def later_loads(shape: tuple[int, int, int, int]) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield kinds of a load, what becomes of it, and the later load."""
    layers, experts, *_ = shape
    if shape in DEPLOYMENTS:
        for kind, sigma in zip(KINDS, (0.1, 0.3), strict=True):
            yield kind, f"drifts by {sigma}", drifted(skewed(kind, layers, experts), sigma)
    for kind in KINDS:
        yield kind, "another", skewed(kind, layers, experts, seed=9)
    for name, load in awkward(layers, experts).items() if shape == DEPLOYMENTS[0] else ():
        yield "zipf", name, load


@pytest.mark.parametrize("shape", dict.fromkeys((*DEPLOYMENTS[:3], *SHAPES)), ids=str)
@pytest.mark.parametrize("target", [0.96, 1.0])
def test_a_new_plan_is_whole_and_no_layer_is_less_even(shape: tuple[int, int, int, int], target: float) -> None:
    layers, experts, slots, ranks = shape
    for kind, name, later in later_loads(shape):
        old = plan(skewed(kind, layers, experts), slots, ranks)
        new = replan(later, old, target=target)
        new.check()
        assert num_repeats(new) == 0 or slots > experts * ranks, name
        assert (balance(later, new) >= balance(later, old)).all(), name


@pytest.mark.parametrize(("drift", "most"), [(0.1, 0.08), (0.3, 0.15), ("switch", 0.33)])
@pytest.mark.parametrize("shape", [DEPLOYMENTS[0], DEPLOYMENTS[2]], ids=str)
def test_drift_is_met_to_the_target_with_few_moves(
    shape: tuple[int, int, int, int], drift: float | str, most: float
) -> None:
    layers, experts, slots, ranks = shape
    load = skewed("logn1", layers, experts)
    old = plan(load, slots, ranks)
    later = skewed("logn1", layers, experts, seed=9) if drift == "switch" else drifted(load, float(drift))
    new = replan(later, old, target=0.95)
    assert balance(later, new).min() >= 0.94 and balance(later, new).mean() >= 0.95
    assert moves(old, new) <= most * layers * slots


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_plan_at_its_target_is_returned_itself(shape: tuple[int, int, int, int]) -> None:
    layers, experts, slots, ranks = shape
    load = skewed("logn0.5", layers, experts)
    old = plan(load, slots, ranks)
    target = max(0.01, min(0.96, balance(load, old).min()))
    assert replan(load, old, target=target) is old


@pytest.mark.parametrize("allowed", [0, 1, 5, 200])
@pytest.mark.parametrize("shape", DEPLOYMENTS[:3], ids=str)
def test_no_more_moves_are_made_than_allowed_and_those_help(shape: tuple[int, int, int, int], allowed: int) -> None:
    layers, experts, slots, ranks = shape
    old = plan(skewed("logn1", layers, experts), slots, ranks)
    later = skewed("logn1", layers, experts, seed=9)
    new = replan(later, old, max_moves=allowed)
    new.check()
    assert moves(old, new) <= allowed
    assert (balance(later, new) >= balance(later, old)).all()
    if allowed >= 40:
        assert moves(old, new) > 0
        assert balance(later, new).mean() > balance(later, replan(later, old, max_moves=0)).mean()


def test_a_plan_of_another_make_is_improved_too() -> None:
    load = skewed("zipf", 8, 64)
    old = Plan.of(np.tile(np.arange(72) % 64, (8, 1)), 64, 8)
    new = replan(load, old)
    assert balance(load, new).min() > 0.9 > balance(load, old).mean()
    published = Plan.of(plan_by_definition(load, 72, 8), 64, 8)
    later = drifted(load, 0.5)
    assert balance(later, replan(later, published)).mean() > 0.94


def test_layers_are_replanned_independently() -> None:
    load, later = skewed("logn1", 12, 64), skewed("logn1", 12, 64, seed=9)
    old = plan(load, 72, 8)
    order = np.random.default_rng(1).permutation(12)
    shuffled = old.with_(old.phy2log[order], old.weight[order])
    together = replan(later, old)
    assert (replan(later[order], shuffled).phy2log == together.phy2log[order]).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [({"target": 0}, "target: 0"), ({"target": 1.5}, "target: 1.5"), ({"max_moves": -1}, "max_moves: -1")],
)
def test_limits_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replan(np.ones((1, 4)), plan(np.ones((1, 4)), 4, 2), **options)


def test_ranks_and_slots_in_another_order_are_no_moves() -> None:
    old = plan(skewed("zipf", 5, 64), 72, 8).phy2log
    rng = np.random.default_rng(0)
    mixed = rng.permuted(old.reshape(5, 8, 9)[:, rng.permutation(8)], axis=2).reshape(5, 72)
    assert (mixed != old).any()
    assert (overlay(mixed, old, 8) == old).all()

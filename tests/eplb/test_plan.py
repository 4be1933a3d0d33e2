"""Plans from scratch: against the published algorithm, brute force, and the properties that every plan has. Changes of a
plan in use: as little as will do, never for the worse, never more than allowed. What cannot be used is refused by name."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from benchmarks.eplb_workloads import plan_by_definition, replicate
from numpy.typing import NDArray

from penstock import eplb
from penstock.eplb import Plan, balance, bound, plan, replan
from penstock.eplb.load import MAX_SLOTS
from penstock.eplb.maps import WHOLE, max_copies
from penstock.eplb.planner import copies
from penstock.eplb.replanner import overlay
from tests.support.loads import SHAPES, Shape, awkward, drifted, num_repeats, skewed
from tests.support.programs import printed
from tests.support.refusals import table

KINDS = ["zipf", "logn1", "logn0.5"]
DEPLOYMENTS = [Shape(26, 64, 72, 8), Shape(6, 64, 64, 8), Shape(8, 256, 288, 32), Shape(8, 256, 320, 64)]


@pytest.mark.parametrize("shape", [*SHAPES, Shape(2, 8, 8, 2)], ids=str)
def test_a_plan_is_whole_spreads_copies_over_ranks_and_stays_below_the_bound(shape: Shape) -> None:
    layers, experts, slots, ranks = shape
    for name, load in ({kind: shape.load(kind) for kind in KINDS} | awkward(layers, experts)).items():
        made = plan(load, slots, ranks)
        made.check()
        assert made.phy2log.shape == (layers, slots)
        assert (balance(load, made) <= bound(load, slots, ranks) + 1e-12).all(), name
        if slots <= experts * ranks:
            assert num_repeats(made) == 0, name
            assert (made.count <= ranks).all()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_a_plan_is_at_least_as_even_as_the_published_algorithm(shape: Shape, kind: str, seed: int) -> None:
    load = shape.load(kind, seed)
    published = Plan.of(plan_by_definition(load, shape.slots, shape.ranks), shape.experts, shape.ranks)
    assert balance(load, shape.plan(kind, seed)).mean() >= balance(load, published).mean() - 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shares_equal_those_of_assigning_spare_slots_one_by_one(shape: Shape, kind: str) -> None:
    layers, experts, slots, ranks = shape
    load = shape.load(kind) + 1.0
    limit = max_copies(experts, slots, ranks)
    ids, shares = copies(load.astype(np.float32), slots, limit)
    for row in range(layers):
        count = np.bincount(ids[row], minlength=experts)
        assert count.min() >= 1 and count.max() <= limit and count.sum() == slots
        assert shares[row, 0] == pytest.approx(replicate(load[row], slots, limit)[1].max(), rel=1e-6)


@pytest.mark.parametrize("slots", [80, 64])
def test_layers_are_planned_independently(slots: int) -> None:
    load = skewed("logn1", 12, 64)
    alone = [plan(load[layer : layer + 1], slots, 16).phy2log[0] for layer in range(12)]
    assert (plan(load, slots, 16).phy2log == np.stack(alone)).all()


def test_without_load_spare_slots_go_to_different_experts() -> None:
    assert plan(np.zeros((2, 64)), 72, 8).count.max() == 2
    one_hot = awkward(1, 64)["one hot"]
    made = plan(one_hot, 80, 8)
    assert made.count[0, 32] == 8 and np.sort(made.count[0])[-2] == 2


def digest_of_plans() -> str:
    """Return a digest of many plans and of changes to them."""
    digest, ties = hashlib.sha256(), np.random.default_rng(0).integers(0, 6, (6, 64))
    for load in (skewed("zipf", 6, 64), skewed("logn1", 6, 64), ties, *awkward(6, 64).values()):
        for slots, ranks in ((64, 8), (72, 8), (80, 16)):
            made = plan(load, slots, ranks)
            digest.update(made.digest())
            digest.update(replan(np.roll(load, 3, axis=1), made).digest())
    return digest.hexdigest()


def test_a_plan_is_the_same_whatever_the_processors_vector_width() -> None:
    cpu = import_module("numpy._core._multiarray_umath")
    usable = [each for each in cpu.__cpu_dispatch__ if cpu.__cpu_features__[each] and each not in cpu.__cpu_baseline__]
    if not usable:
        pytest.skip("this processor has nothing beyond numpy's baseline to switch off")
    widest = [name for name in usable if "512" in name or name == "X86_V4"]
    code = "from tests.eplb.test_plan import digest_of_plans; print(digest_of_plans())"
    disabled = {"", " ".join(widest), " ".join(usable)}
    assert len({printed(code, NPY_DISABLE_CPU_FEATURES=names) for names in disabled}) == 1


def test_plans_are_a_function_of_their_input() -> None:
    load = skewed("zipf", 4, 64)
    first, second = plan(load, 72, 8), plan(load.astype(np.float32), 72, 8)
    assert first.digest() == second.digest() == plan(load.tolist(), 72, 8).digest()
    assert len(first.digest()) == hashlib.sha256().digest_size
    assert plan(load, 80, 8).digest() != first.digest()


def moves(old: Plan, new: Plan) -> int:
    return int((old.phy2log != new.phy2log).sum())


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("shape", DEPLOYMENTS, ids=str)
def test_sampling_noise_alone_moves_nothing(shape: Shape, kind: str) -> None:
    load = skewed(kind, shape.layers, shape.experts, tokens=8 << 20)
    old = plan(load, shape.slots, shape.ranks)
    again = np.random.default_rng(5).poisson(load)
    assert moves(old, replan(again, old)) == 0


def later_loads(shape: Shape) -> Iterator[tuple[str, str, NDArray[Any]]]:
    """Yield kinds of a load, what becomes of it, and the later load."""
    if shape in DEPLOYMENTS:
        for kind, sigma in (("zipf", 0.1), ("logn1", 0.3)):
            yield kind, f"drifts by {sigma}", drifted(shape.load(kind), sigma)
    for kind in KINDS[:2]:
        yield kind, "another", shape.load(kind, seed=9)
    for name, load in awkward(shape.layers, shape.experts).items() if shape == DEPLOYMENTS[0] else ():
        yield "zipf", name, load


@pytest.mark.parametrize("shape", dict.fromkeys((*DEPLOYMENTS[:3], *SHAPES)), ids=str)
@pytest.mark.parametrize("target", [0.96, 1.0])
def test_a_new_plan_is_whole_and_no_layer_is_less_even(shape: Shape, target: float) -> None:
    for kind, name, later in later_loads(shape):
        old = shape.plan(kind)
        new = replan(later, old, target=target)
        new.check()
        assert num_repeats(new) == 0 or shape.slots > shape.experts * shape.ranks, name
        assert (balance(later, new) >= balance(later, old)).all(), name


@pytest.mark.parametrize(("drift", "most"), [(0.1, 0.08), (0.3, 0.15), ("switch", 0.33)])
@pytest.mark.parametrize("shape", [DEPLOYMENTS[0], DEPLOYMENTS[2]], ids=str)
def test_drift_is_met_to_the_target_with_few_moves(shape: Shape, drift: float | str, most: float) -> None:
    old = shape.plan("logn1")
    later = shape.load("logn1", seed=9) if drift == "switch" else drifted(shape.load("logn1"), float(drift))
    new = replan(later, old, target=0.95)
    assert balance(later, new).min() >= 0.94 and balance(later, new).mean() >= 0.95
    assert moves(old, new) <= most * shape.layers * shape.slots


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_plan_at_its_target_is_returned_itself(shape: Shape) -> None:
    load, old = shape.load("logn0.5"), shape.plan("logn0.5")
    target = max(0.01, min(0.96, balance(load, old).min()))
    assert replan(load, old, target=target) is old


@pytest.mark.parametrize("allowed", [0, 1, 5, 200])
@pytest.mark.parametrize("shape", DEPLOYMENTS[:3], ids=str)
def test_no_more_moves_are_made_than_allowed_and_those_help(shape: Shape, allowed: int) -> None:
    old, later = shape.plan("logn1"), shape.load("logn1", seed=9)
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


def test_ranks_and_slots_in_another_order_are_no_moves() -> None:
    old = plan(skewed("zipf", 5, 64), 72, 8).phy2log
    rng = np.random.default_rng(0)
    mixed = rng.permuted(old.reshape(5, 8, 9)[:, rng.permutation(8)], axis=2).reshape(5, 72)
    assert (mixed != old).any()
    assert (overlay(mixed, old, 8) == old).all()


LOAD, PLACEMENT = np.ones((1, 4)), [[0, 1, 2, 3, 0, 1]]
NAMES = {name: getattr(eplb, name) for name in eplb.__all__} | {"LOAD": LOAD, "PLACEMENT": PLACEMENT}
NAMES |= {"OLD": eplb.plan(np.ones((3, 16)), 24, 4), "MAX_SLOTS": MAX_SLOTS, "WHOLE": WHOLE}


@pytest.mark.parametrize(("call", "words"), table(__file__, "calls", np=np, partial=partial, **NAMES))
def test_arguments_that_cannot_be_used_are_refused(call: Callable[[], object], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as refusal:
        call()
    assert [word for word in words if word not in str(refusal.value)] == [], refusal.value

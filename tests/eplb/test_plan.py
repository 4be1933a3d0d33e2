"""Plans from scratch: against the published algorithm, brute force, and the properties that every plan has."""

import hashlib
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.eplb_workloads import plan_by_definition, replicate

from penstock.eplb import balance, bound, plan
from penstock.eplb.maps import Plan, max_copies
from penstock.eplb.planner import copies
from tests.support.loads import SHAPES, awkward, num_repeats, skewed
from tests.support.programs import printed
from tests.support.refusals import table

ROOT = Path(__file__).resolve().parents[2]
KINDS = ["zipf", "logn1", "logn0.5"]


@pytest.mark.parametrize("shape", [*SHAPES, (2, 8, 8, 2)], ids=str)
def test_a_plan_is_whole_spreads_copies_over_ranks_and_stays_below_the_bound(shape: tuple[int, int, int, int]) -> None:
    layers, experts, slots, ranks = shape
    for name, load in ({kind: skewed(kind, layers, experts) for kind in KINDS} | awkward(layers, experts)).items():
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
def test_a_plan_is_at_least_as_even_as_the_published_algorithm(
    shape: tuple[int, int, int, int], kind: str, seed: int
) -> None:
    layers, experts, slots, ranks = shape
    load = skewed(kind, layers, experts, seed)
    published = Plan.of(plan_by_definition(load, slots, ranks), experts, ranks)
    assert balance(load, plan(load, slots, ranks)).mean() >= balance(load, published).mean() - 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shares_equal_those_of_assigning_spare_slots_one_by_one(shape: tuple[int, int, int, int], kind: str) -> None:
    layers, experts, slots, ranks = shape
    load = skewed(kind, layers, experts) + 1.0
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


PROBE = """
import hashlib, numpy as np
from penstock.eplb import plan, replan
from tests.support.loads import awkward, drifted, skewed
digest = hashlib.sha256()
ties = np.random.default_rng(0).integers(0, 6, (6, 64))
for load in [skewed("zipf", 6, 64), skewed("logn1", 6, 64), ties, *awkward(6, 64).values()]:
    for slots, ranks in [(64, 8), (72, 8), (80, 16)]:
        made = plan(load, slots, ranks)
        digest.update(made.digest())
        digest.update(replan(np.roll(load, 3, axis=1), made).digest())
print(digest.hexdigest())
"""


def test_a_plan_is_the_same_whatever_the_processors_vector_width() -> None:
    cpu = import_module("numpy._core._multiarray_umath")
    usable = [each for each in cpu.__cpu_dispatch__ if cpu.__cpu_features__[each] and each not in cpu.__cpu_baseline__]
    if not usable:
        pytest.skip("this processor has nothing beyond numpy's baseline to switch off")
    widest = [name for name in usable if "512" in name or name == "X86_V4"]
    digests = set()
    for disabled in {"", " ".join(widest), " ".join(usable)}:
        digests.add(printed(PROBE, NPY_DISABLE_CPU_FEATURES=disabled))
    assert len(digests) == 1


@pytest.mark.parametrize(("change", "words"), table(__file__, "plans", np=np))
def test_bad_input_is_refused_by_field_value_and_limit(change: dict[str, Any], words: tuple[str, ...]) -> None:
    arguments: dict[str, Any] = {"load": np.ones((1, 4)), "slots": 6, "ranks": 2}
    with pytest.raises(ValueError) as refusal:
        plan(**(arguments | change))
    for word in words:
        assert word in str(refusal.value)


def test_plans_are_a_function_of_their_input() -> None:
    load = skewed("zipf", 4, 64)
    first, second = plan(load, 72, 8), plan(load.astype(np.float32), 72, 8)
    assert first.digest() == second.digest() == plan(load.tolist(), 72, 8).digest()
    assert len(first.digest()) == hashlib.sha256().digest_size
    assert plan(load, 80, 8).digest() != first.digest()

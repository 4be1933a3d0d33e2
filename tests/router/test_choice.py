"""The choice in C against the formulas in numpy, on fleets of every kind."""

import numpy as np
import numpy.typing as npt
import pytest

from penstock._csrc import lib
from penstock.router.config import PolicyName
from penstock.router.placement.load import POLICIES, Column, LoadTable, PolicyConfig

COLUMNS = ("queued", "head", "head_since", "active", "held", "filled", "cached")
NOW_S = 50.0
TIE_S = 1e-6


def some_fleet(rng: np.random.Generator, policy: PolicyConfig, num_replicas: int) -> LoadTable:
    """Return a table with every column set, and a row that is free again."""
    fleet = LoadTable(policy, seed=int(rng.integers(1000)))
    for _ in range(num_replicas + 1):
        fleet.learn(fleet.add(float(rng.choice([np.inf, 50_000, 100_000]))), float(rng.uniform(1_000, 20_000)))
    fleet.remove(int(rng.integers(num_replicas + 1)))
    for name in COLUMNS:
        getattr(fleet, name)[:] = rng.integers(0, 60, fleet.num_rows) * (1000 if name != "active" else 1)
    fleet.head_since[:] = rng.uniform(40, 51, fleet.num_rows)
    fleet.is_open[:] = (rng.random(fleet.num_rows) < 0.8) & (fleet.capacity > 0)
    fleet.filled[fleet.capacity == 0] = 0.0
    return fleet


def scores(fleet: LoadTable, cached: Column, num_tokens: int, policy: PolicyConfig) -> Column:
    """Return the scores of predicted-ttft, also of replicas that are not open."""
    own = num_tokens - np.minimum(cached, num_tokens - 1)
    done = np.minimum((NOW_S - fleet.head_since) * fleet.speed, fleet.head)
    backlog = fleet.queued - np.maximum(done, 0)
    overflow = np.maximum(fleet.held + num_tokens - fleet.capacity, 0)
    share = fleet.filled * fleet.per_capacity
    crowding = share / share[fleet.capacity > 0].mean() if share.any() else share
    ttft = (backlog + own + overflow) / fleet.speed + fleet.delay * fleet.active
    score: Column = ttft + policy.wear * crowding * own / fleet.speed
    return score


def equals(scores: Column, is_open: npt.NDArray[np.bool_]) -> set[int]:
    """Return the rows among which a lot decides."""
    scores = np.where(is_open, scores, np.inf)
    return set(np.flatnonzero(scores <= scores.min() + TIE_S).tolist())


@pytest.mark.parametrize("name", POLICIES)
def test_the_replica_that_is_chosen_is_the_best_by_the_formulas(name: PolicyName) -> None:
    policy, rng = PolicyConfig(name=name), np.random.default_rng(3)
    for _ in range(150):
        fleet = some_fleet(rng, policy, int(rng.choice([1, 2, 8, 70])))
        if rng.random() < 0.3:
            fleet.active[:] = fleet.cached[:] = 0  # equals
        cached, is_open = fleet.cached.copy(), fleet.is_open > 0
        excluded = set(np.flatnonzero(rng.random(fleet.num_rows) < 0.1).tolist())
        is_open[list(excluded)] = False
        num_tokens = int(rng.choice([1, 500, 40_000]))
        row = fleet.choose(num_tokens, NOW_S, excluded=excluded)
        if not is_open.any():
            assert row == -1
            continue
        match name:
            case "predicted-ttft":
                predicted = scores(fleet, cached, num_tokens, policy)
                assert row in equals(predicted, is_open)
                np.testing.assert_allclose(fleet.score[is_open], predicted[is_open], rtol=1e-9)
            case "least-loaded":
                assert row in equals(fleet.active, is_open)
            case "round-robin":
                assert row == np.flatnonzero(is_open)[0]
        assert fleet.backlog[row] == pytest.approx(fleet.backlog_of(row, NOW_S))


def test_equal_replicas_are_drawn_equally_often_and_repeatably() -> None:
    def drawn(seed: int) -> list[int]:
        fleet = LoadTable(seed=seed)
        for _ in range(3):
            fleet.learn(fleet.add(1000.0), 100.0)
        fleet.is_open[:] = 1.0
        return [fleet.choose(10, NOW_S) for _ in range(3000)]

    assert (np.bincount(drawn(5), minlength=3) > 900).all()
    assert drawn(5) == drawn(5) != drawn(6)


def test_round_robin_goes_on_after_the_last_one() -> None:
    fleet = LoadTable(PolicyConfig(name="round-robin"))
    for _ in range(4):
        fleet.learn(fleet.add(1000.0), 100.0)
    fleet.is_open[:] = (1, 1, 0, 1)
    assert [fleet.choose(1, NOW_S) for _ in range(5)] == [0, 1, 3, 0, 1]


def test_new_content_is_remembered_for_as_long_as_the_caches_hold_it() -> None:
    fleet = LoadTable()
    for capacity in (1000.0, 3000.0):
        fleet.learn(fleet.add(capacity), 100.0)
    lib.penstock_fleet_place(fleet.c, 0, 400.0, 500.0, NOW_S)
    lib.penstock_fleet_place(fleet.c, 1, 1000.0, 1000.0, NOW_S)
    assert fleet.filled.tolist() == [300.0, 1000.0]
    assert fleet.queued.tolist() == [400.0, 1000.0]
    assert fleet.held.tolist() == [500.0, 1000.0] and fleet.active.tolist() == [1, 1]

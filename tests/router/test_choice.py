"""The choice in C against the formulas in numpy, on fleets of every kind.
The index in C against a plain model of it: random lives, eviction, retired slots, threads; and the keys it holds."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

from penstock._csrc import ffi, lib
from penstock.cache.keys import block_keys, namespace_root
from penstock.router.config import PolicyName
from penstock.router.placement.index import Keys, KeySpace, RouteIndex, prompt_keys
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


MAX_SLOTS = 8192  # as in C


def chain(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**64, length, dtype=np.uint64)


def match(index: RouteIndex, keys: Keys) -> np.ndarray:
    """Return per slot how many leading keys it holds."""
    counts = np.empty(index.num_slots, dtype=np.int32)
    index.match_into(ffi.from_buffer("int32_t[]", counts), keys, len(keys))
    return counts


class Model:
    """The answers of an index that has room for everything."""

    def __init__(self) -> None:
        self.facts: dict[int, set[int]] = {}
        self.predictions: list[dict[int, set[int]]] = [{}, {}]
        self.at_ends: dict[int, bool] = {}  # slots whose last key counts for all before it

    def holds(self, slot: int, key: int) -> bool:
        return any(key in part.get(slot, ()) for part in (self.facts, *self.predictions))

    def count(self, slot: int, keys: list[int]) -> int:
        if self.at_ends[slot]:
            return max((i for i, key in enumerate(keys, 1) if self.holds(slot, key)), default=0)
        return next((i for i, key in enumerate(keys) if not self.holds(slot, key)), len(keys))


@pytest.mark.parametrize("seed", range(2))
def test_the_index_agrees_with_a_plain_model_through_a_random_life(seed: int) -> None:
    rng = random.Random(seed)
    index, model = RouteIndex(20_000, 20_000, seed=seed), Model()
    chains = [chain(100 * seed + i, rng.randint(1, 60)) for i in range(6)]
    lone = chain(100 * seed + 6, 5)
    slots: list[int] = []
    num_compared = num_reused = 0
    for step in range(1000):
        action = rng.random()
        if len(slots) < 66 or action < 0.02:  # in more than one group of 64
            at_ends = rng.random() < 0.5
            slots.append(index.add_slot(10_000, at_ends=at_ends))
            num_reused += model.at_ends.get(slots[-1], at_ends) != at_ends
            model.at_ends[slots[-1]] = at_ends
            index.store(slots[-1], lone[2:3])  # without the keys before it, it counts in slots of this kind alone
            assert match(index, lone)[slots[-1]] == (3 if at_ends else 0)
            index.remove(slots[-1], lone[2:3])
        elif action < 0.06 and len(slots) > 60:
            index.retire_slot(gone := slots.pop(rng.randrange(len(slots))))
            for part in (model.facts, *model.predictions):
                part.pop(gone, None)
        elif action < 0.5:
            slot, keys = rng.choice(slots), rng.choice(chains)
            keys = keys[: rng.randint(0, len(keys))]
            assert index.store(slot, keys) == 0
            model.facts.setdefault(slot, set()).update(keys.tolist())
        elif action < 0.65:  # the end of a chain goes first
            slot, keys = rng.choice(slots), rng.choice(chains)
            keys = keys[rng.randint(0, len(keys)) :]
            index.remove(slot, keys)
            model.facts.setdefault(slot, set()).difference_update(keys.tolist())
        elif action < 0.8:
            slot, keys = rng.choice(slots), rng.choice(chains)
            index.predict(slot, keys, len(keys))
            fresh = set(keys.tolist()) - model.facts.get(slot, set())
            model.predictions[0].setdefault(slot, set()).update(fresh)
        elif action < 0.85:
            index.age_predictions()
            model.predictions = [{}, model.predictions[0]]
        keys = rng.choice(chains)
        counts = match(index, keys)
        whole = keys.tolist()
        for slot in rng.choices(slots, k=6):
            count = model.count(slot, whole)
            if not any(model.holds(slot, key) for key in whole[count:]):  # as the index assumes
                num_compared += 1
                assert counts[slot] == count, (step, slot)
        if step % 100 == 0:
            index.check()
            assert all(index.num_held(slot) == len(model.facts.get(slot, ())) for slot in slots)
    assert num_compared > 2000 and num_reused > 2
    index.check()


def test_a_full_index_forgets_old_chains_and_from_their_ends() -> None:
    index = RouteIndex(100, seed=1)
    slot = index.add_slot(1000)
    old, new = chain(1, 60), chain(2, 60)
    index.store(slot, old)
    index.store(slot, new)
    assert match(index, new)[slot] == 60
    assert match(index, old)[slot] == 40
    assert index.stats()["facts"] == 100 and index.stats()["evictions_total"] == 20
    index.predict(slot, old[:40], 40)  # asked for again
    index.store(slot, chain(3, 50))
    assert match(index, old)[slot] == 40
    assert match(index, new)[slot] == 10
    index.check()


def test_predictions_fade_at_the_second_call_and_evict_no_fact() -> None:
    index = RouteIndex(1000, num_predictions=50, seed=1)
    slot = index.add_slot(1000)
    stored, predicted = chain(1, 100), chain(2, 50)
    index.store(slot, stored)
    index.predict(slot, predicted, len(predicted))
    for flood in range(3, 30):
        index.predict(slot, chain(flood, 50), 50)
    assert match(index, stored)[slot] == 100 and match(index, predicted)[slot] == 0
    index.predict(slot, predicted, len(predicted))
    index.age_predictions()
    assert match(index, predicted)[slot] == 50
    index.age_predictions()
    assert match(index, predicted)[slot] == 0
    assert index.stats()["predictions"] == 0
    index.check()


def test_one_call_sweeps_a_part_of_a_retired_slot_at_most() -> None:
    index = RouteIndex(50_000, seed=1)
    full, *_ = (index.add_slot(50_000) for _ in range(MAX_SLOTS))
    index.store(full, chain(1, 40_000))
    assert index.add_slot(1) == -1
    index.retire_slot(full)
    num_facts, num_calls = 40_000, 0
    while True:
        num_calls += 1
        if (slot := index.add_slot(10)) >= 0:
            assert slot == full and match(index, chain(1, 5))[slot] == 0
            break
        num_swept = num_facts - index.stats()["facts"]
        assert 0 < num_swept <= 10_000
        num_facts -= num_swept
        index.check()
    assert num_calls > 4
    index.check()


def test_threads_may_change_and_match_at_once() -> None:
    index = RouteIndex(2000, num_predictions=200, seed=1)
    slots = [index.add_slot(2000) for _ in range(4)]

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(400):
            keys = chain(rng.randrange(40), 60)
            predict = partial(index.predict, num_known=60)
            actions: list[Callable[[int, Keys], object]] = [index.store, index.remove, predict]
            action = rng.choice(actions)
            action(rng.choice(slots), keys)
            counts = match(index, keys)
            assert counts.min() >= 0 and counts.max() <= 60, counts
            if rng.random() < 0.02:
                index.age_predictions()

    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(work, range(4)))) == 4
    index.check()


def test_the_keys_are_the_first_8_bytes_of_the_engines() -> None:
    rng = np.random.default_rng(5)
    for _ in range(1000):
        space = KeySpace(b"fingerprint", int(rng.integers(1, 40)))
        tokens = rng.integers(0, 2**31, rng.integers(0, 5000 if rng.random() < 0.01 else 200), dtype="<i4").tobytes()
        root = space.root("salt", "adapter")
        assert root == namespace_root(model=b"fingerprint", salt="salt", adapter="adapter")
        expected = [int.from_bytes(key[:8], "little") for key in block_keys(tokens, space.block_size, root=root)]
        assert prompt_keys(tokens, space, root).tolist() == expected

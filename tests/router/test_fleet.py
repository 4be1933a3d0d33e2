"""Small fleets under simulated time: spreading, floods, broken event streams, restarts."""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from penstock.engine.http.kv_stream import Changes, Frame, Snapshot
from penstock.router.config import PolicyName
from penstock.router.placement.load import POLICIES, Charge, PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo
from tests.support.route_model import Arrival, Settings, Simulation, World, pooled_hit

SMALL = Settings(num_replicas=4, num_blocks=120)


def keys(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63, count, dtype=np.uint64)


def conversations(count: int = 40, turns: int = 6, gap_s: float = 0.4, seed: int = 0) -> list[Arrival]:
    """Chats of several turns, each a longer prompt than the last, mixed with one another; all begin with one block."""
    rng = random.Random(seed)
    turn_of = Counter[int]()
    arrivals = []
    for number in range(count * turns):
        chat = rng.choice([chat for chat in range(count) if turn_of[chat] < turns])
        turn_of[chat] += 1
        own = np.concatenate([keys(0, 1), keys(chat + 1, 3 * turns)])[: 3 * turn_of[chat] + 1]
        at_s = number * gap_s * rng.uniform(0.9, 1.1)
        arrivals.append(Arrival(at_s, 512 * len(own) + 100, 20, own, session=str(chat)))
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def play(
    arrivals: list[Arrival], policy: PolicyName = "predicted-ttft", settings: Settings = SMALL, **options: Any
) -> Simulation:
    simulation = Simulation(settings, PolicyConfig(name=policy, **options), seed=1)
    simulation.run(arrivals)
    assert len(simulation.outcomes) == len(arrivals)
    simulation.placement.check()
    loads = simulation.placement.view().values()
    assert all(load["active_requests"] == load["queued_tokens"] == 0 for load in loads), "all load is released"
    return simulation


def test_the_default_policy_beats_round_robin_and_nears_a_pooled_cache() -> None:
    arrivals = conversations(gap_s=0.1)
    ours, turns = play(arrivals).report(), play(arrivals, "round-robin").report()
    assert ours["hit"] >= 0.85 * pooled_hit(arrivals, 4 * 120)
    assert ours["ttft_p95_s"] <= 0.55 * turns["ttft_p95_s"]
    assert ours["hit"] > turns["hit"]


def test_an_idle_fleet_uses_all_of_its_caches() -> None:
    arrivals = conversations(count=60, gap_s=5.0)
    report = play(arrivals).report()
    assert report["hit"] >= 0.97 * pooled_hit(arrivals, 4 * 120)
    without = play(arrivals, wear=0.0).report()
    assert without["imbalance"] > 1.8 * report["imbalance"], "the first block alone would draw everybody to one replica"


def test_a_hot_prefix_is_spread_over_the_fleet() -> None:
    hot = keys(1, 20)
    arrivals = [
        Arrival(number * 0.02, 512 * 21, 50, np.concatenate([hot, keys(number + 2, 1)])) for number in range(800)
    ]
    simulation = play(arrivals, settings=Settings(num_replicas=4))
    counts = Counter(outcome.replica for outcome in simulation.outcomes[len(simulation.outcomes) // 8 :])
    assert len(counts) == 4 and max(counts.values()) <= 1.25 * len(arrivals) / 4


def test_one_tenants_flood_leaves_the_others_their_hits() -> None:
    others = conversations(count=10, turns=6, gap_s=1.0)
    end_s = others[-1].at_s
    flood = [Arrival(end_s * number / 300, 512 * 8, 1, keys(10_000 + number, 8)) for number in range(300)]
    settings = Settings(num_replicas=4, num_blocks=1000)
    both = play(sorted(others + flood, key=lambda arrival: arrival.at_s), settings=settings, max_facts=2**13)
    alone = play(others, settings=settings)
    hits, hits_alone = (sum(each.cached_tokens for each in simulation.outcomes) for simulation in (both, alone))
    assert hits >= 0.95 * hits_alone  # no prompt of the flood has a prefix of another
    assert both.placement.metrics()["index_facts"] <= 2**13


class Trouble:
    """Stands between the replicas and the placement: loses, repeats, holds back and forges frames."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self.placement = simulation.placement
        self.rng = random.Random(seed)
        self.held_back: list[tuple[str, Frame]] = []
        self.num_reconnects = 0
        simulation.say = self.say

    def say(self, name: str, frame: Frame) -> None:
        chance = self.rng.random()
        if chance < 0.1:  # lost
            return
        if chance < 0.2:  # late, behind others
            self.held_back.append((name, frame))
            return
        if chance < 0.25 and isinstance(frame, Changes):  # forged
            frame = Changes(frame.seq, "device", keys(self.rng.randrange(10**6), 200).tobytes(), b"")
        self.placement.apply_events(name, [frame] * self.rng.choice((1, 1, 2)))
        while self.held_back and self.rng.random() < 0.5:
            late, old = self.held_back.pop()
            self.placement.apply_events(late, [old])

    def reconnect(self, simulation: Simulation) -> None:
        """Get the snapshots that are needed, as the event feeds do."""
        for name, replica in simulation.replicas.items():
            if simulation.placement.needs_snapshot(name):
                self.num_reconnects += 1
                simulation.placement.apply_events(name, replica.snapshot())


@pytest.mark.parametrize("seed", range(2))
def test_lost_repeated_reordered_and_forged_events_cost_only_hits(seed: int) -> None:
    arrivals = conversations(gap_s=0.2)
    simulation = Simulation(SMALL, PolicyConfig(), seed=1)
    trouble = Trouble(simulation, seed)
    simulation.run(arrivals, every=trouble.reconnect)
    assert len(simulation.outcomes) == len(arrivals) and trouble.num_reconnects > 5
    simulation.placement.check()
    assert simulation.report()["hit"] >= 0.8 * play(arrivals).report()["hit"]
    for view in simulation.placement.view().values():
        assert view["cached_blocks"]["device"] <= 2 * SMALL.num_blocks + 1024


def test_without_any_events_the_guess_keeps_most_of_the_hits() -> None:
    arrivals = conversations(gap_s=0.2)
    simulation = play(arrivals, settings=SMALL._replace(has_events=False))
    assert simulation.placement.metrics()["approximate_replicas"] == 4
    assert simulation.report()["hit"] >= 0.8 * play(arrivals).report()["hit"]


def test_predictions_agree_with_the_hits_of_the_replicas() -> None:
    metrics = play(conversations(gap_s=0.4)).placement.metrics()
    assert metrics["compared_requests_total"] == 240
    assert metrics["cached_tokens_error_total"] <= 0.02 * metrics["compared_prompt_tokens_total"]
    assert metrics["actual_cached_tokens_total"] > 0


def test_the_speed_of_each_replica_is_learned() -> None:
    simulation = Simulation(SMALL, PolicyConfig(first_tokens_per_s=500.0), seed=1)
    slow = simulation.replicas["r3"]
    slow.settings = SMALL._replace(tokens_per_s=3_000.0)
    simulation.run(conversations(count=100, gap_s=0.2))
    speeds = {name: view["prefill_tokens_per_s"] for name, view in simulation.placement.view().items()}
    assert all(9_000 < speeds[name] < 15_000 for name in ("r0", "r1", "r2")) and 2_000 < speeds["r3"] < 4_000
    done = {name: replica.num_tokens_done for name, replica in simulation.replicas.items()}
    assert done["r3"] < 0.7 * min(done["r0"], done["r1"], done["r2"])


def test_a_session_stays_at_its_replica_unless_another_is_much_better() -> None:
    simulation = Simulation(SMALL, PolicyConfig(affinity_s=0.05), seed=1)
    first = simulation.placement.choose(None, num_tokens=10, session="chat")
    assert first is not None
    for _ in range(20):
        charge = simulation.placement.choose(None, num_tokens=10, session="chat")
        assert charge is not None and charge.replica == first.replica
        charge.release(True)
    for _ in range(4):
        simulation.placement.choose(None, num_tokens=1_000, exclude=frozenset(simulation.replicas) - {first.replica})
    moved = simulation.placement.choose(None, num_tokens=10, session="chat")
    assert moved is not None and moved.replica != first.replica
    simulation.placement.set_available(moved.replica, False)
    other = simulation.placement.choose(None, num_tokens=10, session="chat")
    assert other is not None and other.replica != moved.replica


@pytest.mark.parametrize("seed", range(2))
def test_every_invariant_holds_through_a_random_life_of_the_fleet(seed: int) -> None:
    rng = random.Random(seed)
    world = World()
    placement = Placement(PolicyConfig(name=rng.choice(POLICIES), max_facts=3000, max_sessions=5), world, seed)
    charges: dict[Charge, int] = {}  # with the tokens that each holds
    seqs, num_ok = Counter[str](), 0
    for step in range(1500):
        world.now_s += rng.choice((0.0, 0.01, 0.5, 3.0))
        names, action = list(placement.view()), rng.random()
        if len(names) < 2 or action < 0.02:
            block_size = rng.choice((16, 32))
            placement.add_replica(f"r{step}", ReplicaInfo(b"m", block_size, rng.choice((0, 50, 400))))
        elif action < 0.03:
            placement.remove_replica(rng.choice(names))
        elif action < 0.15:
            placement.set_available(rng.choice(names), rng.random() < 0.8)
        elif action < 0.35:
            name = rng.choice(names)
            seqs[name] += rng.choice((0, 1, 1, 1, 2))
            run = keys(rng.randrange(50), rng.randrange(60)).tobytes()
            frames = (
                Changes(seqs[name], rng.choice(("device", "host")), run, run[:80] if rng.random() < 0.3 else b""),
                Snapshot(seqs[name], "device", run, True, rng.random() < 0.9),
            )
            placement.apply_events(name, [frames[rng.random() < 0.2]])
        elif action < 0.65:
            tokens = np.random.default_rng(rng.randrange(30)).integers(0, 1000, rng.randrange(1, 900), dtype="<i4")
            prompt = placement.prepare(tokens, rng.choice((None, "salt")), None) if rng.random() < 0.9 else None
            session = rng.choice((None, str(rng.randrange(9))))
            exclude = frozenset(rng.sample(names, rng.randrange(2)))
            charge = placement.choose(prompt, num_tokens=len(tokens), session=session, exclude=exclude)
            if charge is not None:
                assert charge.replica in names and charge.replica not in exclude
                assert placement.view()[charge.replica]["available"]
                assert 0 <= charge.predicted_cached_tokens < max(len(tokens), 1)
                assert charge.predicted_ttft_s >= 0
                charges[charge] = len(tokens)
        elif charges:
            charge = rng.choice(list(charges))
            if not charge.is_answered and rng.random() < 0.5:
                charge.first_token(rng.choice((None, 0, charge.num_tokens)))
            elif rng.random() < 0.5:
                charge.tokens(count := rng.randrange(20))
                charges[charge] += count
            else:
                is_ok = rng.random() < 0.9
                charge.release(is_ok)
                charge.release(not is_ok)  # which counts for nothing
                num_ok += is_ok
                del charges[charge]
        if step % 50 == 0:
            placement.check()
            for name, view in placement.view().items():
                assert view["held_tokens"] == sum(held for each, held in charges.items() if each.replica == name)
    for charge in charges:
        charge.release(True)
    placement.check()
    for view in placement.view().values():
        assert view["active_requests"] == view["queued_tokens"] == view["held_tokens"] == 0
    metrics = placement.metrics()
    assert metrics["requests_ok_total"] == num_ok + len(charges) and metrics["sessions"] == 5
    assert metrics["decisions_total"] == metrics["requests_ok_total"] + metrics["requests_failed_total"] > 200

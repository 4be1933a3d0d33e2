"""Engines that share blocks: schedulers over oracles, whose output changes with any wrong byte, and real connections."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import pytest

from penstock.engine.messages import Submit
from penstock.executor.tiers.transfers import RankTransfers
from tests.support.flaky_store import FlakyStore
from tests.support.peer_rig import free_addresses, until
from tests.support.simulation import World, alone, assert_reached, random_request, some_worlds, submit

PROMPT = list(range(20))  # five blocks


@contextmanager
def worlds(*shapes: dict[str, Any]) -> Iterator[list[World]]:
    """Engines of which each loads from all others."""
    addresses = free_addresses(len(shapes))
    made: list[World] = []
    try:
        for number, shape in enumerate(shapes):
            peers = tuple(address for other, address in enumerate(addresses) if other != number)
            options = {"num_blocks": 40, "num_host_blocks": 60, "step_s": 1e-4, **shape}  # loads take real time
            shared = {"kv_peers": peers, "kv_peer_listen": addresses[number]}
            made.append(World(options=shared, **options))
        for world in made:
            until(partial(is_connected, world), "all are connected")
        yield made
    finally:
        for world in made:
            world.executor.close()


def transfers_of(world: World) -> RankTransfers:
    transfers = world.executor._transfers
    assert isinstance(transfers, RankTransfers)
    return transfers


def peers_of(world: World) -> list[Any]:
    return [store for name, store in transfers_of(world)._stores.items() if name.startswith("peer ")]


def is_connected(world: World) -> bool:
    return all(store.is_open for store in peers_of(world))


def name_of_peer(world: World) -> str:
    return next(str(name) for name in world.executor.info.stores if name.startswith("peer "))


def heard(world: World, count: int) -> None:
    until(lambda: sum(map(len, peers_of(world))) >= count, f"{count} blocks are announced")


def test_what_one_engine_has_computed_the_other_loads() -> None:
    with worlds({}, {}) as (a, b):
        assert a.cached("cold", PROMPT) == 0
        heard(b, 5)
        assert b.cached("warm", PROMPT) == 19, "also when it has been idle since before that"
        tiers = b.scheduler.stats().tiers
        assert tiers["peer"]["hit_tokens"] == 20 and tiers["peer"]["loaded_blocks"] == 5
        assert tiers["host"]["hit_tokens"] == 0
        assert b.cached("again", PROMPT) == 19
        server = transfers_of(a)._server
        assert server is not None and server.stats()["blocks"] == 5, "what was read once is here"


def test_blocks_on_a_peers_disk_are_read_like_those_in_its_memory() -> None:
    with worlds({"num_blocks": 17, "num_host_blocks": 8, "store": FlakyStore()}, {}) as (a, b):
        a.cached("cold", PROMPT)
        a.churn()
        wanted = {key for key in a.disk.data if not a.tiers.index.host.find(key)}
        until(lambda: all(any(peer.contains(key) for peer in peers_of(b)) for key in wanted), "all of it is announced")
        assert len(wanted) > 20 and b.cached("warm", PROMPT) == 19


def test_what_a_peer_has_lost_meanwhile_is_computed() -> None:
    with worlds({}, {}) as (a, b):
        a.cached("cold", PROMPT)
        heard(b, 5)
        served = transfers_of(a)._served
        third = list(a.scheduler.pool._index)[2]
        assert served is not None and served._host_of.pop(third) and b.cached("warm", PROMPT) == 8
        assert b.scheduler.stats().tiers["peer"]["failed_loads"] >= 1


def test_a_request_waits_for_blocks_that_a_peer_is_still_computing() -> None:
    with worlds({"max_num_batched_tokens": 8}, {}) as (a, b):
        b.submit(submit("waits", PROMPT, max_tokens=3, peer=name_of_peer(b), peer_wait_s=1e9))
        b.submit(submit("passes", [9, 8, 7], max_tokens=2))
        while not b.outputs["passes"] or b.last("passes").finish_reason is None:
            b.step()
        assert not b.outputs["waits"] and len(b.tiers.loading) == 1
        a.submit(submit("computes", PROMPT, max_tokens=1))
        while b.scheduler.has_work():
            a.step()
            b.step()
        assert b.num_cached("waits") == 19
        assert b.tokens("waits") == alone(submit("waits", PROMPT, max_tokens=3))[0]


def test_a_request_waits_no_longer_than_it_says_and_uses_what_has_come() -> None:
    with worlds({}, {"step_s": 1.0}) as (a, b):
        a.cached("half", PROMPT[:12])
        heard(b, 3)
        assert b.cached("waits", PROMPT, peer=name_of_peer(b), peer_wait_s=2000.0) == 12
        assert 2000 <= b.now_s < 2100
        assert b.cached("does not", [*PROMPT, 1, 2, 3, 4, 5], peer=name_of_peer(b), peer_wait_s=0.0) == 20


def test_a_prompt_that_the_host_cannot_hold_does_not_wait_for_its_end() -> None:
    with worlds({}, {"num_host_blocks": 8}) as (a, b):
        a.cached("cold", PROMPT)
        heard(b, 5)
        assert b.cached("large", PROMPT, peer=name_of_peer(b), peer_wait_s=1e9) == 16, "half of the slots may be held"


def test_nobody_waits_for_a_peer_that_is_gone() -> None:
    with worlds({}, {}) as (a, b):
        b.submit(submit("waits", PROMPT, max_tokens=3, peer=name_of_peer(b), peer_wait_s=1e9))
        for _ in range(5):
            b.step()
        assert len(b.tiers.loading) == 1
        a.executor.close()
        until(lambda: not peers_of(b)[0].is_open, "it is noticed")
        b.settle()
        assert b.num_cached("waits") == 0
        assert b.cached("later", PROMPT, peer=name_of_peer(b), peer_wait_s=1e9) == 19, "from its own blocks"


def test_after_a_reset_nothing_from_before_is_given_to_peers() -> None:
    with worlds({"store": FlakyStore()}, {}) as (a, b):
        a.cached("cold", PROMPT)
        heard(b, 5)
        assert a.scheduler.reset_prefix_cache()
        a.settle()
        until(lambda: len(peers_of(b)[0]) == 0, "it is all gone")
        assert b.cached("warm", PROMPT) == 0


def storm(seed: int, num_steps: int) -> dict[str, int]:
    """Two engines under pressure that read from each other, with disks that fail, aborts, resets and hints."""
    rng = random.Random(seed)
    shape: dict[str, Any] = {"vocab_size": 50, "max_model_len": 64}
    shapes = [
        dict(
            num_blocks=rng.choice([17, 30]),
            max_in_flight=rng.choice([1, 2, 3]),
            max_num_seqs=rng.choice([1, 3, 8]),
            max_num_batched_tokens=rng.choice([8, 64]),
            num_host_blocks=rng.choice([8, 16, 40, 200]),
            store=rng.choice([None, FlakyStore(seed=seed, delay=rng.choice([0, 3]), fails_load=rng.choice([0, 0.3]))]),
            **shape,
        )
        for _ in range(2)
    ]
    counts = {"finished": 0, "aborted": 0, "resets": 0}
    with worlds(*shapes) as made:
        messages: list[dict[str, Submit]] = [{}, {}]
        for step in range(10**9):
            if step >= num_steps and not any(world.scheduler.has_work() for world in made):
                break
            for world, mine, others in zip(made, messages, reversed(messages), strict=True):
                if step < num_steps and rng.random() < 0.3 and len(world.scheduler.waiting) < 20:
                    message = random_request(rng, len(mine), **shape)
                    if others and rng.random() < 0.8:  # as was asked over there
                        known = rng.choice(list(others.values()))
                        message = msgspec.structs.replace(known, request_id=message.request_id)
                    hint = rng.choice([(None, 0.0), (name_of_peer(world), rng.choice([0.002, 0.05]))])
                    message = msgspec.structs.replace(message, peer=hint[0], peer_wait_s=hint[1])
                    mine[message.request_id] = message
                    world.submit(message)
                if mine and rng.random() < 0.05:
                    world.abort(rng.choice(list(mine)[-20:]))
                if rng.random() < 0.02:
                    counts["resets"] += world.scheduler.reset_prefix_cache()
                world.step()
        for world, mine in zip(made, messages, strict=True):
            world.compare(mine, counts, f"seed {seed}")
            world.settle()
            tiers = world.tiers
            assert tiers.index.host.num_free == tiers.index.host.num_usable
            counts["from peers"] = counts.get("from peers", 0) + tiers.counts[f"hits_{name_of_peer(world)}"]
    return counts


@pytest.mark.timeout(900)  # a busy machine takes several times as long
@some_worlds(2, 6, thousands=1000)
def test_random_engines_that_share_blocks_keep_every_invariant_and_every_token(seeds: range) -> None:
    wanted = {"finished": 151, "aborted": 11, "from peers": 101}
    assert_reached((storm(seed, num_steps=150) for seed in seeds), wanted, len(seeds) / 6)

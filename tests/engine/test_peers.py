"""Engines that share blocks: schedulers over oracles, whose output changes with any wrong byte, and real connections."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import pytest

from penstock.executor.protocol import GroupInfo
from penstock.executor.tiers.transfers import RankTransfers
from tests.engine.test_groups import FULL, WINDOW
from tests.support.flaky_store import FlakyStore
from tests.support.peer_rig import free_addresses, until
from tests.support.simulation import CoreRig, World, alone, submit

W = TypeVar("W", bound=World)
PROMPT = list(range(20))  # five blocks


@contextmanager
def connected(kind: type[W], *shapes: dict[str, Any]) -> Iterator[list[W]]:
    """Yield engines of which each loads from all others."""
    addresses = free_addresses(len(shapes))
    engines: list[W] = []
    try:
        for number, shape in enumerate(shapes):
            peers = tuple(address for other, address in enumerate(addresses) if other != number)
            defaults = {"num_blocks": 40, "num_host_blocks": 60, "step_s": 1e-4}  # loads take real time
            options = {"kv_peers": peers, "kv_peer_listen": addresses[number], **shape.get("options", {})}
            engines.append(kind(**{**defaults, **shape, "options": options}))
        for engine in engines:
            until(partial(is_connected, engine), "all are connected")
        yield engines
    finally:
        for engine in engines:
            engine.executor.close()


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
    with connected(World, {}, {}) as (a, b):
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
    with connected(World, {"num_blocks": 17, "num_host_blocks": 8, "store": FlakyStore()}, {}) as (a, b):
        a.cached("cold", PROMPT)
        a.churn()
        wanted = {key for key in a.disk.data if not a.tiers.index.host.find(key)}
        until(lambda: all(any(peer.contains(key) for peer in peers_of(b)) for key in wanted), "all of it is announced")
        assert len(wanted) > 20 and b.cached("warm", PROMPT) == 19


def test_what_a_peer_has_lost_meanwhile_is_computed() -> None:
    with connected(World, {}, {}) as (a, b):
        a.cached("cold", PROMPT)
        heard(b, 5)
        served = transfers_of(a)._served
        third = list(a.scheduler.pool._index)[2]
        assert served is not None and served._host_of.pop(third) and b.cached("warm", PROMPT) == 8
        assert b.scheduler.stats().tiers["peer"]["failed_loads"] >= 1


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW, WINDOW)])
def test_a_request_waits_for_blocks_that_a_peer_is_still_computing(groups: tuple[GroupInfo, ...]) -> None:
    """It may hold 18 slots of the host. Of 40 tokens it needs 10, and at each time three of each window."""
    shape, prompt = {"groups": groups, "num_blocks": 60}, list(range(41))
    sizes = {"num_host_blocks": 100, "max_num_batched_tokens": 4}, {"num_host_blocks": 36}
    with connected(World, *({**shape, **size} for size in sizes)) as (a, b):

        def has_loaded() -> bool:
            b.step()
            return not b.tiers.index.loading

        b.submit(submit("waits", prompt, max_tokens=3, peer=name_of_peer(b), peer_wait_s=1e9))
        b.submit(submit("passes", [9, 8, 7], max_tokens=2))
        while not b.outputs["passes"] or b.last("passes").finish_reason is None:
            b.step()
        assert not b.outputs["waits"] and len(b.tiers.loading) == 1
        a.submit(submit("computes", prompt, max_tokens=1))
        while b.scheduler.has_work():
            a.step()
            heard(b, a.tiers.index.host.num_cached)
            b.step()
            until(has_loaded, "it is here")
        assert b.num_cached("waits") == 40
        assert b.tokens("waits") == alone(submit("waits", prompt, max_tokens=3), groups=groups)[0]


def test_a_request_waits_no_longer_than_it_says_and_uses_what_has_come() -> None:
    with connected(World, {}, {"step_s": 1.0}) as (a, b):
        a.cached("half", PROMPT[:12])
        heard(b, 3)
        assert b.cached("waits", PROMPT, peer=name_of_peer(b), peer_wait_s=2000.0) == 12
        assert 2000 <= b.now_s < 2100
        assert b.cached("does not", [*PROMPT, 1, 2, 3, 4, 5], peer=name_of_peer(b), peer_wait_s=0.0) == 20


def test_a_prompt_that_the_host_cannot_hold_does_not_wait_for_its_end() -> None:
    with connected(World, {}, {"num_host_blocks": 8}) as (a, b):
        a.cached("cold", PROMPT)
        heard(b, 5)
        assert b.cached("large", PROMPT, peer=name_of_peer(b), peer_wait_s=1e9) == 16, "half of the slots may be held"


def test_nobody_waits_for_a_peer_that_is_gone() -> None:
    with connected(World, {}, {}) as (a, b):
        b.submit(submit("waits", PROMPT, max_tokens=3, peer=name_of_peer(b), peer_wait_s=1e9))
        for _ in range(5):
            b.step()
        assert len(b.tiers.loading) == 1
        a.executor.close()
        until(lambda: not peers_of(b)[0].is_open, "it is noticed")
        b.settle()
        assert b.num_cached("waits") == 0
        assert b.cached("later", PROMPT, peer=name_of_peer(b), peer_wait_s=1e9) == 19, "from its own blocks"


def test_after_a_reset_nothing_from_before_is_given_to_or_taken_from_peers() -> None:
    with connected(CoreRig, {"num_blocks": 17, "num_host_blocks": 8, "store": FlakyStore()}, {}) as (a, b):
        a.cached("cold", PROMPT)
        before = [*a.disk.data]
        heard(b, 5)
        assert b.core.reset_prefix_cache() and b.cached("heard before the reset", PROMPT) == 0
        assert a.core.reset_prefix_cache() and b.core.reset_prefix_cache()
        until(lambda: len(peers_of(b)[0]) == 0, "it is all gone")
        assert b.cached("warm", PROMPT) == 0
        a.cached("again", PROMPT)
        a.churn()
        until(lambda: all(map(peers_of(b)[0].contains, before)), "what is on the disk again is announced again")

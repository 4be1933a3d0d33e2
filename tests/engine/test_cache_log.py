"""The core reports exactly the blocks that its pool holds."""

import random
from array import array
from itertools import takewhile

import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.core.engine_core import CacheLog
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.request import Request, RequestKv
from penstock.engine.core.usable import UsableKeys
from penstock.engine.messages import CacheUpdate, Submit
from penstock.executor.protocol import GroupInfo, ModelInfo
from tests.engine.test_groups import SHAPES
from tests.support.refusals import hardest
from tests.support.simulation import BLOCK_SIZE, World, random_request, submit


def apply(reported: set[bytes], updates: list[CacheUpdate], tier: str = "device") -> None:
    for each in updates:
        if each.tier != tier:
            continue
        stored, removed = ({run[at : at + 8] for at in range(0, len(run), 8)} for run in (each.stored, each.removed))
        assert not stored & removed
        if each.is_snapshot:
            reported.clear()
        reported -= removed
        reported |= stored


def promised(message: Submit, reported: set[bytes], info: ModelInfo) -> tuple[Request, int]:
    """Return the request, and how many blocks of its prompt a router takes to be cached.

    One more token is appended, so that all blocks can be hits."""
    root = namespace_root(model=info.fingerprint, adapter=message.adapter, salt=message.cache_salt)
    tokens = array("i", message.tokens + bytes(4))
    request = Request(message, 0, 0.0, tokens, 1, RequestKv(root, skips_cache=False))
    request.kv.keys = block_keys(memoryview(tokens), BLOCK_SIZE, root=root)
    is_cached = [key[:8] in reported for key in request.kv.keys]
    if info.hits_at_ends:
        return request, max((index + 1 for index, each in enumerate(is_cached) if each), default=0)
    return request, len(list(takewhile(bool, is_cached)))


@pytest.mark.parametrize("num_host_blocks", hardest([0, 200], 200))
@pytest.mark.parametrize("groups", hardest(SHAPES[2:], SHAPES[6]))
def test_reported_blocks_of_several_groups_can_be_hit(groups: tuple[GroupInfo, ...], num_host_blocks: int) -> None:
    """Whatever a router knows of a tier, a request finds at least as much in it and those above; with states alone, all."""
    num_promised = num_found = 0
    for seed in range(2):
        rng = random.Random(seed)
        least = sum(group.most_pages(64, 16, BLOCK_SIZE) for group in groups)
        world = World(num_blocks=least + 30, groups=groups, num_host_blocks=num_host_blocks)
        own = world.scheduler.kv
        pools, find, tier = {"device": world.scheduler.pool}, world.scheduler.pool.find, "device"
        if num_host_blocks:
            pools["host"], find, tier = world.tiers.index.host, world.tiers.page_of, "host"
        log = CacheLog({name: UsableKeys(pool, own) for name, pool in pools.items()}, own.keys)
        reported: set[bytes] = set()
        prompts = []
        for number in range(50):
            if number == 10:
                log.watch(True)
            message = random_request(rng, number, 50, 64)
            prompts.append(message)
            world.submit(message)
            for _ in range(rng.randint(0, 4)):
                world.step()
            if number < 10:
                continue
            apply(reported, log.updates(), tier)
            for message in prompts[-8:]:
                request, count = promised(message, reported, world.executor.info)
                found = own.keys.find(request, find).num_blocks
                assert count <= found
                num_promised += count
                num_found += found
        log.watch(False)
        assert not own.listeners and all(pool._changes is None for pool in pools.values())
        world.run()
        world.executor.close()
    has_both = groups[-1].pages and any(group.kind == "window" for group in groups)
    assert has_both or num_promised > (0.7 * num_found if world.executor.info.hits_at_ends else 0)


def test_contents_of_blocks_are_reported_no_later_than_their_keys() -> None:
    world = World()
    log = CacheLog({"device": world.scheduler.pool}, world.scheduler.kv.keys)
    log.watch(True, with_blocks=True)
    tokens = list(range(2 * BLOCK_SIZE + 1))
    for name in ("first", "again"):
        world.submit(submit(name, tokens, max_tokens=1, cache_salt="s"))
    assert [update.is_snapshot for update in log.updates()] == [True]
    world.run()
    (update,) = log.updates()
    assert [block.key for block in update.blocks[:2]] == [update.stored[:8], update.stored[8:]]
    first, second, *again = update.blocks
    assert (first.parent, first.salt, second.parent, second.salt, again) == (b"", "s", first.key, None, [first, second])
    assert first.tokens + second.tokens == array("i", tokens[: 2 * BLOCK_SIZE]).tobytes()
    world.submit(submit("cached", tokens, max_tokens=1, cache_salt="s"))
    world.run()
    assert log.updates() == [CacheUpdate("device", b"", b"", blocks=again)], "a hit leaves nothing behind"
    log.watch(False)
    assert world.scheduler.kv.keys.on_keys is None


def test_a_block_that_came_and_went_between_two_updates_is_not_reported() -> None:
    pool = BlockPool(2)
    log = CacheLog({"device": pool}, PageKeys((GroupInfo(),), 16, makes_keys=True))
    log.watch(True)
    log.updates()
    pool.register(pool.allocate(1)[0], b"a" * 32)
    pool.release([1])
    pool.allocate(1)
    assert log.updates() == []
    pool.register(1, b"b" * 32)
    assert log.updates() == [CacheUpdate("device", b"b" * 8, b"")]
    pool.release([1])
    pool.allocate(1)
    pool.register(1, b"b" * 32)
    assert log.updates() == [], "it is cached as before"

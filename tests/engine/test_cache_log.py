"""What the core says about its cache is what its pool holds."""

import random
from array import array
from itertools import takewhile

import numpy as np
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.core.engine_core import CacheLog, shortened
from penstock.engine.core.request import Request
from penstock.engine.core.usable import UsableKeys
from penstock.engine.messages import CacheUpdate
from penstock.executor.protocol import GroupInfo
from tests.engine.test_groups import SHAPES
from tests.support.simulation import BLOCK_SIZE, World, random_request, submit


def apply(known: set[bytes], updates: list[CacheUpdate]) -> None:
    for each in updates:
        assert each.tier == "device"
        stored, removed = ({run[at : at + 8] for at in range(0, len(run), 8)} for run in (each.stored, each.removed))
        assert not stored & removed
        if each.is_snapshot:
            known.clear()
        known -= removed
        known |= stored


def test_whoever_applies_the_news_knows_the_pool_after_every_step() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        world = World(num_blocks=40)
        log = CacheLog({"device": world.scheduler.pool})
        known: set[bytes] = set()
        for number in range(60):
            if number == 20:
                log.watch(True)
            world.submit(random_request(rng, number, 50, 64))
            for _ in range(rng.randint(0, 4)):
                world.step()
            if number == 40 and world.scheduler.reset_prefix_cache():
                assert world.scheduler.pool.num_cached == 0
            if number >= 20:
                apply(known, log.updates())
                assert known == {key[:8] for key in world.scheduler.pool.cached_keys()}
        world.run()
        apply(known, log.updates())
        assert known == {key[:8] for key in world.scheduler.pool.cached_keys()} != set()


@pytest.mark.parametrize("groups", SHAPES[2:])
def test_what_is_reported_of_several_groups_can_be_hit(groups: tuple[GroupInfo, ...]) -> None:
    """Whatever run of keys from the first block on a router knows, a request finds at least as much."""
    num_found = 0
    for seed in range(6):
        rng = random.Random(seed)
        least = sum(group.most_pages(64, 16, BLOCK_SIZE) for group in groups)
        world = World(num_blocks=least + 30, groups=groups)
        own = world.scheduler.groups
        assert own is not None
        log = CacheLog({"device": UsableKeys(world.scheduler.pool, own)})
        known: set[bytes] = set()
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
            apply(known, log.updates())
            for message in prompts[-8:]:
                root = namespace_root(
                    model=world.executor.info.fingerprint, adapter=message.adapter, salt=message.cache_salt
                )
                tokens = array("i", message.tokens + bytes(4))  # one more, so that all blocks may be found
                request = Request(message, 0, 0.0, tokens, 1, root, False)
                request.keys = block_keys(memoryview(tokens), BLOCK_SIZE, root=root)
                promised = len(list(takewhile(lambda key: key[:8] in known, request.keys)))  # noqa: B023
                assert promised <= own.find(request, world.scheduler.pool.find).num_blocks
                num_found += promised
        log.watch(False)
        assert own.registered is None and world.scheduler.pool.changes is None
    assert num_found > 0 or groups[-1].pages


def test_nothing_is_kept_while_nobody_watches() -> None:
    pool = BlockPool(8)
    log = CacheLog({"device": pool})
    for _ in range(2):
        blocks = pool.allocate(2)
        pool.register(blocks[0], b"k" * 32)
        assert pool.changes is None and log.updates() == []
        pool.release(blocks)
        log.watch(True)
        assert len(log.updates()) == 1
        log.watch(False)
        assert pool.forget()


def test_the_keys_are_those_of_the_requests_tokens() -> None:
    world = World()
    log = CacheLog({"device": world.scheduler.pool})
    log.watch(True)
    tokens = list(range(4 * BLOCK_SIZE))
    world.submit(submit("a", tokens, max_tokens=1, cache_salt="s"))
    world.run()
    root = namespace_root(model=world.executor.info.fingerprint, salt="s")
    assert log.updates()[0].stored == shortened(block_keys(np.array(tokens, "<i4"), BLOCK_SIZE, root=root))


def test_a_block_that_came_and_went_between_two_news_is_only_gone() -> None:
    pool = BlockPool(2)
    log = CacheLog({"device": pool})
    log.watch(True)
    log.updates()
    pool.register(pool.allocate(1)[0], b"a" * 32)
    pool.release([1])
    pool.allocate(1)
    assert log.updates() == [CacheUpdate("device", b"", b"a" * 8)]

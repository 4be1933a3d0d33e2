"""What the core says about its cache is what its pool holds."""

import random

import numpy as np

from penstock.cache.keys import block_keys, namespace_root
from penstock.cache.pool import BlockPool
from penstock.engine.core.engine_core import CacheLog, shortened
from penstock.engine.messages import CacheUpdate
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

"""The block pool: exact orders, and invariants after every step of a random walk."""

import random
from itertools import takewhile

import pytest

from penstock.cache.pool import BlockPool


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def lookup(pool: BlockPool, keys: list[bytes]) -> list[int]:
    """Return the blocks of the longest cached prefix of a chain."""
    return list(takewhile(bool, map(pool.find, keys)))


def test_allocating_more_than_is_free_is_our_own_bug() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError):
        pool.allocate(4)


def test_blocks_without_a_key_are_reused_first_and_the_latest_before_others() -> None:
    pool = BlockPool(6)
    blocks = pool.allocate(5)
    pool.register(1, key(1))
    pool.release(blocks)
    # 5, 4, 3, 2 were released in that order, each to the front; 1 is cached and goes last.
    assert pool.free_order() == [2, 3, 4, 5, 1]


def test_old_chains_are_evicted_before_new_ones_from_their_ends() -> None:
    pool = BlockPool(8)
    old, new = pool.allocate(3), pool.allocate(3)
    for block in old + new:
        pool.register(block, key(block))
    pool.release(old)
    pool.release(new)
    assert pool.free_order() == [7, 3, 2, 1, 6, 5, 4]
    assert pool.allocate(2) == [7, 3]
    assert lookup(pool, [key(1), key(2), key(3)]) == [1, 2]


def test_a_hit_makes_blocks_the_latest_to_be_evicted() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    for block in first + second:
        pool.register(block, key(block))
    pool.release(first)
    pool.release(second)
    hit = lookup(pool, [key(1), key(2), key(9)])
    assert hit == [1, 2] and pool.num_idle(hit) == 2
    pool.hold(hit)
    assert pool.free_order() == [4, 3]
    pool.release(hit)
    assert pool.free_order() == [4, 3, 2, 1]
    pool.check()


def test_identical_content_is_kept_once() -> None:
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    assert pool.register(one, key(7)) == one
    assert pool.register(two, key(7)) == one
    assert pool.refs(one) == 2 and pool.refs(two) == 1
    pool.release([two])
    assert pool.free_order() == [two, 3]
    pool.check()


def test_invariants_hold_over_a_random_walk() -> None:
    rng = random.Random(1)
    pool = BlockPool(40)
    held: list[list[int]] = []
    for _ in range(4000):
        if rng.random() < 0.5:
            chain = rng.randrange(6)  # six chains of content compete for the pool
            keys = [key(chain * 100 + i) for i in range(rng.randint(1, 8))]
            hit = lookup(pool, keys)
            if len(keys) - len(hit) + pool.num_idle(hit) <= pool.num_free:
                pool.hold(hit)
                blocks = hit + pool.allocate(len(keys) - len(hit))
                for index in range(len(hit), len(keys)):
                    known = pool.register(blocks[index], keys[index])
                    if known != blocks[index]:
                        pool.release([blocks[index]])
                        blocks[index] = known
                held.append(blocks)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
    for blocks in held:
        pool.release(blocks)
    assert pool.num_free == pool.num_usable

"""The block pool: exact orders. tests/engine checks its invariants after every step of random worlds."""

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

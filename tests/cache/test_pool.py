"""The block pool: exact orders; tests/engine checks its invariants after every step of random worlds. The index of the tiers by
itself, and the merging of what several ranks report."""

from itertools import takewhile

import pytest

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex
from penstock.executor.protocol import TransferResult
from penstock.executor.tiers.open_tiers import rank_fingerprint
from penstock.executor.tiers.transfers import ResultMerger


def key(number: int) -> bytes:
    return bytes([number]) * 32


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


def saved(device: BlockPool, index: TierIndex, *keys: int) -> int:
    """Fill new blocks with these keys; return how many of them the host takes."""
    for number, block in zip(keys, device.allocate(len(keys)), strict=True):
        device.register(block, key(number))
        index.offer(key(number))
    saves = index.take_saves(device, 100, 0)
    index.finish_saves(saves, device)
    index.check()
    return len(saves)


def test_a_full_host_evicts_the_least_recently_used_from_the_end_of_a_chain() -> None:
    device, index = BlockPool(20), TierIndex(3, [])
    saved(device, index, 1, 2, 3)
    index.touch([key(2), key(3)])
    assert saved(device, index, 4, 5) == 2
    assert [bool(index.host.find(key(n))) for n in range(1, 6)] == [False, True, False, True, True]


def test_a_free_block_is_saved_only_while_others_are_free() -> None:
    device, index = BlockPool(4), TierIndex(4, [])
    (block,) = device.allocate(1)
    device.register(block, key(1))
    index.offer(key(1))
    device.release([block])
    device.allocate(2)
    assert index.take_saves(device, 100, keep_free=1) == [] and len(index.offers) == 1
    assert len(index.take_saves(device, 100, keep_free=0)) == 1


def test_the_nearest_store_that_has_a_key_is_read() -> None:
    index = TierIndex(4, ["disk", "peer"])
    index.note({"disk": [key(1)], "peer": [key(1), key(2)]}, {})
    for number in (1, 2):
        index.start_load(key(number))
    assert [store for _, store, _, _ in index.take_loads()] == ["disk", "peer"]


def test_a_peer_says_itself_what_it_has_lost() -> None:
    index = TierIndex(4, ["disk", "peer"])
    index.note({"disk": [key(1)], "peer": [key(2)]}, {})
    for number in (1, 2):
        assert index.complete(index.start_load(key(number)) or 0, False) == 0
    assert (index.stored_keys["disk"], index.stored_keys["peer"]) == (set(), {key(2)})
    index.note({}, {"peer": [key(2)]})
    assert not index.stored_keys["peer"]


def test_a_ticket_ends_with_its_last_rank_and_is_good_if_all_are() -> None:
    merge = ResultMerger(3)
    first = merge.merge([TransferResult([(1, True), (2, True)]), TransferResult([(1, True)])])
    assert first.completions == []
    assert merge.merge([TransferResult([(2, False), (1, True)])]).completions == [(1, True)]
    assert merge.merge([TransferResult([(2, True)])]).completions == [(2, False)]


def test_a_key_is_in_a_store_while_every_rank_has_it() -> None:
    merge = ResultMerger(2)
    assert merge.merge([TransferResult(gained={"disk": [key(1)]})]).gained == {}
    assert merge.merge([TransferResult(gained={"disk": [key(1)]})]).gained == {"disk": [key(1)]}
    assert merge.merge([TransferResult(lost={"disk": [key(1)]})]).lost == {"disk": [key(1)]}
    assert merge.merge([TransferResult(lost={"disk": [key(1)]})]).lost == {}
    back = TransferResult(gained={"disk": [key(1)]})
    assert merge.merge([back, back, TransferResult(lost={"disk": [key(1)]})]) == TransferResult()


def test_whatever_changes_the_meaning_of_a_block_s_bytes_is_another_disk() -> None:
    base = (b"model", 16, 4096, 2, 0)
    others = [(b"other", 16, 4096, 2, 0), (b"model", 32, 4096, 2, 0), (b"model", 16, 8192, 2, 0)]
    others += [(b"model", 16, 4096, 4, 0), (b"model", 16, 4096, 2, 1)]
    assert len({rank_fingerprint(*each) for each in (base, *others)}) == 6
    assert rank_fingerprint(*base) == rank_fingerprint(*base)

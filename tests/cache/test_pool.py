"""Block keys against slow references written from the formulas, pinned values and wrong input; the block pool in exact orders
(tests/engine checks its invariants after every step of random worlds); the index of the tiers by itself, and the merging
of what several ranks report."""

import gc
import hashlib
import random
import struct
from array import array
from itertools import takewhile
from typing import Any

import pytest

from penstock._csrc import ffi, lib
from penstock.cache.keys import block_keys, namespace_root
from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex
from penstock.executor.protocol import TransferResult
from penstock.executor.tiers.open_tiers import rank_fingerprint
from penstock.executor.tiers.transfers import ResultMerger
from tests.support.refusals import cases

RNG = random.Random(20)


def slow_block_keys(tokens: list[int], block_size: int, root: bytes) -> list[bytes]:
    keys = []
    for end in range(block_size, len(tokens) + 1, block_size):
        root = hashlib.sha256(root + struct.pack(f"<{block_size}I", *tokens[end - block_size : end])).digest()
        keys.append(root)
    return keys


def random_ids(count: int) -> list[int]:
    return [RNG.choice((RNG.randrange(150_000), RNG.randrange(2**32))) for _ in range(count)]


@pytest.mark.parametrize("block_size", [1, 2, 7, 8, 9, 15, 16, 17, 21, 22, 23, 24, 25, 32, 33, 64, 128, 256])
def test_keys_equal_a_hashlib_loop_at_every_length_around_a_block_boundary(block_size: int) -> None:
    tokens, root = random_ids(4 * block_size + 1), RNG.randbytes(32)
    for num_blocks in range(5):
        for length in (num_blocks * block_size + delta for delta in (-1, 0, 1)):
            if length >= 0:
                prefix = tokens[:length]
                assert block_keys(prefix, block_size, root=root) == slow_block_keys(prefix, block_size, root)


@pytest.mark.parametrize("portable", [0, 1])
def test_the_sha_instructions_and_the_portable_code_give_what_hashlib_gives(portable: int) -> None:
    for block_size in range(1, 100):  # every way a message can end inside a 64-byte chunk
        tokens, root = random_ids(3 * block_size), RNG.randbytes(32)
        out = ffi.new("uint8_t[]", 96)
        lib.penstock_block_keys(root, struct.pack(f"<{len(tokens)}I", *tokens), 3, block_size, portable, out)
        assert bytes(ffi.buffer(out)) == b"".join(slow_block_keys(tokens, block_size, root))


def test_the_sha_instructions_are_used_where_the_cpu_has_them() -> None:
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read().split()
    except OSError:
        pytest.skip("no /proc/cpuinfo to ask")
    assert lib.penstock_has_sha_instructions() == int("sha_ni" in flags)


def test_every_form_of_tokens_gives_the_same_keys() -> None:
    ids = [RNG.randrange(2**31) for _ in range(100)]
    ints = array("i", ids)
    forms: list[Any] = [ids, tuple(ids), memoryview(ints), ints.tobytes(), memoryview(array("i", [0, *ids]))[1:]]
    for form in forms:
        assert block_keys(form, 16) == slow_block_keys(ids, 16, namespace_root())
    assert block_keys([], 16) == block_keys(b"", 16) == block_keys([1, 2, 3], 2**80) == []
    last = [0, 2**31 - 1, 2**31, 2**32 - 1]
    assert block_keys(last, 4) == slow_block_keys(last, 4, namespace_root())


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**32, 2**63, 2**70])
@pytest.mark.parametrize("position", [0, 5, 38])
def test_an_id_outside_u32_is_refused_with_its_value_and_position(bad: int, position: int) -> None:
    ids = random_ids(39)
    ids[position] = bad
    with pytest.raises(ValueError, match=rf"tokens\[{position}\]: {bad} is outside 0 … 4294967295"):
        block_keys(ids, 16)


def test_no_two_namespaces_share_a_root() -> None:
    models = [b"", b"\0", b"m", b"None", bytes(32)]
    names = [None, "", b"", "a", b"a", "None", b"\0", "1", "True", "aa", "\ud800", "a" * 256]
    roots = [namespace_root(model=m, adapter=a, salt=s) for m in models for a in names for s in names]
    assert len(set(roots)) == len(roots) == len(models) * len(names) ** 2


def test_a_root_is_the_digest_of_version_kinds_lengths_and_contents() -> None:
    sizes = [size.to_bytes(8, "little") for size in (5, 0, 2)]
    fields = b"\1" + sizes[0] + b"model" + b"\0" + sizes[1] + b"\2" + sizes[2] + "é".encode()
    assert namespace_root(model=b"model", salt="é") == hashlib.sha256(b"penstock block keys 1" + fields).digest()


TENANT = namespace_root(model=b"\1" * 32, adapter="sql", salt="tenant-1")


@pytest.mark.parametrize(("computed", "pinned"), cases(__file__, "pinned keys", **globals()))
def test_keys_are_those_of_every_earlier_release(computed: bytes, pinned: str) -> None:
    """Disks and peers hold keys of older processes. A change here needs a new version in the namespace."""
    assert computed.hex() == pinned


def test_the_garbage_collector_tracks_nothing_per_block() -> None:
    tokens = array("i", range(39_000))
    gc.collect()
    before = len(gc.get_objects())
    keys = block_keys(memoryview(tokens), 16)
    assert len(gc.get_objects()) - before < 10  # the list itself and a few of the test's own
    assert len(keys) == 2437 and not any(gc.is_tracked(key) for key in keys)
    assert all(type(key) is bytes and len(key) == 32 for key in keys)


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


def test_old_chains_are_evicted_before_new_ones_from_their_ends_unless_they_are_hit() -> None:
    pool = BlockPool(8)
    old, new = pool.allocate(3), pool.allocate(3)
    for block in old + new:
        pool.register(block, key(block))
    pool.release(old)
    pool.release(new)
    assert pool.free_order() == [7, 3, 2, 1, 6, 5, 4]
    assert pool.allocate(2) == [7, 3]
    hit = lookup(pool, [key(1), key(2), key(3)])
    assert hit == [1, 2] and pool.num_idle(hit) == 2
    pool.hold(hit)
    assert pool.free_order() == [6, 5, 4]
    pool.release(hit)
    assert pool.free_order() == [6, 5, 4, 2, 1]
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
    merge, nothing = ResultMerger(2), TransferResult()
    came, went = TransferResult(gained={"disk": [key(1)]}), TransferResult(lost={"disk": [key(1)]})
    assert [merge.merge([each]) for each in (came, came, went, went)] == [nothing, came, went, nothing]
    assert merge.merge([came, came, went]) == nothing


def test_whatever_changes_the_meaning_of_a_block_s_bytes_is_another_disk() -> None:
    base = (b"model", 16, 4096, 2, 0)
    others = [(b"other", 16, 4096, 2, 0), (b"model", 32, 4096, 2, 0), (b"model", 16, 8192, 2, 0)]
    others += [(b"model", 16, 4096, 4, 0), (b"model", 16, 4096, 2, 1)]
    assert len({rank_fingerprint(*each) for each in (base, *others)}) == 6
    assert rank_fingerprint(*base) == rank_fingerprint(*base)

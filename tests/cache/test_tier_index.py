"""The index of the tiers by itself, and the merging of what several ranks report."""

from collections.abc import Sequence
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.index import TierIndex
from penstock.executor.protocol import TransferResult
from penstock.executor.tiers.open_tiers import rank_fingerprint
from penstock.executor.tiers.transfers import ResultMerger


def key(number: int) -> bytes:
    return bytes([number]) * 32


class Counts(NamedTuple):
    """Leading blocks of a chain by the nearest tier that has them."""

    device: int
    host: int
    loading: int  # being read into the host
    stores: dict[str, int]


def match(index: TierIndex, keys: Sequence[bytes], device: BlockPool) -> Counts:
    num_device = num_host = num_loading = 0
    stores = dict.fromkeys(index.stores, 0)
    for key in keys:
        if device.find(key):
            num_device += 1
        elif index.host.find(key):
            num_host += 1
        elif index.ticket_of(key) is not None:
            num_loading += 1
        elif (store := index.store_of(key)) is not None:
            stores[store] += 1
        else:
            break
    return Counts(num_device, num_host, num_loading, stores)


def fill(device: BlockPool, index: TierIndex, numbers: list[int]) -> list[int]:
    blocks = device.allocate(len(numbers))
    for number, block in zip(numbers, blocks, strict=True):
        device.register(block, key(number))
        index.offer(key(number))
    return blocks


def save_all(device: BlockPool, index: TierIndex) -> int:
    saves = index.take_saves(device, 100, 0)
    index.finish_saves(saves, device)
    index.check()
    return len(saves)


def test_a_full_host_gives_up_what_was_used_longest_ago_and_the_end_of_a_chain_first() -> None:
    device, index = BlockPool(20), TierIndex(3, [])
    fill(device, index, [1, 2, 3])
    save_all(device, index)
    index.touch([key(1), key(2), key(3)])
    fill(device, index, [4])
    save_all(device, index)
    assert [bool(index.host.find(key(n))) for n in (1, 2, 3, 4)] == [True, True, False, True]
    assert index.counts["evictions"] == 1 and index.counts["saves"] == 4


def test_a_pinned_slot_is_never_evicted_and_a_full_host_drops_what_is_offered() -> None:
    device, index = BlockPool(20), TierIndex(2, [])
    fill(device, index, [1, 2])
    save_all(device, index)
    slots = [index.host.find(key(1)), index.host.find(key(2))]
    index.host.hold(slots)
    fill(device, index, [3])
    assert save_all_with(device, index, slots) == 0 and index.counts["drops_host_full"] == 1
    index.host.release(slots)
    fill(device, index, [4])
    assert save_all(device, index) == 1


def save_all_with(device: BlockPool, index: TierIndex, pins: list[int]) -> int:
    saves = index.take_saves(device, 100, 0)
    index.finish_saves(saves, device)
    index.check(pins)
    return len(saves)


def test_free_device_blocks_wait_with_their_save_until_there_are_others_to_hand_out() -> None:
    device, index = BlockPool(4), TierIndex(4, [])
    device.release(fill(device, index, [1]))
    device.allocate(2)
    assert index.take_saves(device, 100, keep_free=1) == [] and len(index.offers) == 1
    assert len(index.take_saves(device, 100, keep_free=0)) == 1


def test_a_slow_disk_pins_a_quarter_of_the_host_at_most() -> None:
    device, index = BlockPool(50), TierIndex(40, ["disk"])
    fill(device, index, list(range(1, 41)))
    save_all(device, index)
    assert len(index.take_writes()) == 10 and index.take_writes() == []
    index.complete(next(iter(index.writes)), True)
    assert len(index.take_writes()) == 1
    index.check()


def test_a_failed_read_frees_its_slot_and_is_not_believed_again() -> None:
    index = TierIndex(4, ["disk"])
    index.note({"disk": [key(1)]}, {})
    ticket = index.start_load(key(1))
    assert ticket is not None and index.start_load(key(1)) == ticket and len(index.take_reads()) == 1
    assert index.complete(ticket, False) == 0
    assert index.start_load(key(1)) is None and index.host.num_free == 4
    index.check()


def test_the_nearest_store_that_has_a_key_is_read() -> None:
    index = TierIndex(4, ["disk", "peer"])
    index.note({"disk": [key(1)], "peer": [key(1), key(2)]}, {})
    for number in (1, 2):
        index.start_load(key(number))
    assert [store for _, store, _, _ in index.take_reads()] == ["disk", "peer"]
    counts = match(index, [key(1), key(2), key(3)], BlockPool(4))
    assert counts.loading == 2


def test_a_ticket_is_over_when_every_rank_has_completed_it_and_good_when_all_are() -> None:
    merge = ResultMerger(3)
    first = merge.merge([TransferResult([(1, True), (2, True)]), TransferResult([(1, True)])])
    assert first.completions == []
    assert merge.merge([TransferResult([(2, False), (1, True)])]).completions == [(1, True)]
    assert merge.merge([TransferResult([(2, True)])]).completions == [(2, False)]


def test_a_key_is_in_a_store_while_every_rank_has_it() -> None:
    merge = ResultMerger(2)
    assert merge.merge([TransferResult(found={"disk": [key(1)]})]).found == {}
    assert merge.merge([TransferResult(found={"disk": [key(1)]})]).found == {"disk": [key(1)]}
    assert merge.merge([TransferResult(lost={"disk": [key(1)]})]).lost == {"disk": [key(1)]}
    assert merge.merge([TransferResult(lost={"disk": [key(1)]})]).lost == {}
    back = TransferResult(found={"disk": [key(1)]})
    assert merge.merge([back, back, TransferResult(lost={"disk": [key(1)]})]) == TransferResult()


def test_whatever_changes_the_meaning_of_a_block_s_bytes_is_another_disk() -> None:
    base = (b"model", 16, 4096, 2, 0)
    others = [(b"other", 16, 4096, 2, 0), (b"model", 32, 4096, 2, 0), (b"model", 16, 8192, 2, 0)]
    others += [(b"model", 16, 4096, 4, 0), (b"model", 16, 4096, 2, 1)]
    assert len({rank_fingerprint(*each) for each in (base, *others)}) == 6
    assert rank_fingerprint(*base) == rank_fingerprint(*base)

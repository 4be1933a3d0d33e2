"""The map of cached blocks: streams stall and come back, guesses, deeper tiers, other block sizes, limits."""

from typing import Any

import numpy as np
import pytest

from penstock.engine.http.kv_stream import Changes, Hello, Snapshot
from penstock.router.placement.placement import Placement, ReplicaInfo, _root
from tests.router.test_placement import INFO, cached, fleet, ids, live, short_keys
from tests.support.refusals import table


def knowledge(placement: Placement, name: str) -> str:
    return str(placement.view()[name]["knowledge"])


def test_placements_without_a_match_are_counted_by_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    placement, _ = fleet(1)
    live(placement, "r0", ids(1))
    text = placement.prepare(b"Hello, who are you?" * 20, has_ids=False)
    for prompt in (placement.prepare(ids(1)), placement.prepare(ids(2)), text, None, text):
        placement.choose(prompt, num_tokens=160, expects=False)
    metrics = placement.metrics()
    counts = [metrics[f"{each}decisions_total"] for each in ("", "no_match_", "no_ids_", "no_prompt_")]
    assert counts == [5, 1, 2, 1]
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "--tokenizer" in caplog.text


def test_the_placement_guesses_while_events_stall() -> None:
    placement, clock = fleet(1)
    live(placement, "r0")
    assert knowledge(placement, "r0") == "events" and placement.metrics()["approximate_replicas"] == 0
    clock.now_s += 20.0
    placement.choose(None, num_tokens=1)
    assert knowledge(placement, "r0") == "approximate" and placement.needs_snapshot("r0")
    assert (placement.metrics()["approximate_replicas"], placement.metrics()["event_stalls_total"]) == (1, 1)
    prompt = ids(1)
    placement.choose(placement.prepare(prompt), num_tokens=160)
    clock.now_s += 60.0
    placement.choose(None, num_tokens=1)
    assert cached(placement, prompt) == {"r0": 160}, "a guess does not fade in seconds"
    live(placement, "r0", ids(2))
    assert knowledge(placement, "r0") == "events" and cached(placement, prompt) == {"r0": 0}
    assert cached(placement, ids(2)) == {"r0": 160}
    placement.check()


def test_a_guess_forgets_at_about_the_pace_of_the_replica() -> None:
    placement, _ = fleet(0)
    placement.add_replica("r0", ReplicaInfo(b"model", 16, num_blocks=100))
    placement.set_available("r0", True)
    for seed in range(40):
        placement.choose(placement.prepare(ids(seed)), num_tokens=160)
    assert cached(placement, ids(39)) == {"r0": 160} and cached(placement, ids(0)) == {"r0": 0}
    assert 50 <= placement.view()["r0"]["cached_blocks"]["device"] <= 110
    placement.check()


def test_another_process_behind_the_same_address_starts_with_an_empty_cache() -> None:
    placement, _ = fleet(1)
    live(placement, "r0", ids(1))
    placement.apply_events("r0", [Hello("r0", "sha256", b"model", 16, 1000)])
    assert cached(placement, ids(1)) == {"r0": 160}, "the same process still has its blocks"
    placement.apply_events("r0", [Hello("another", "sha256", b"model", 16, 1000)])
    assert cached(placement, ids(1)) == {"r0": 0}


def test_a_snapshot_in_parts_replaces_the_blocks_before() -> None:
    placement, _ = fleet(1)
    live(placement, "r0", ids(1))
    keys = short_keys(ids(2))
    parts = [Snapshot(5, "device", keys[:40], True, False), Snapshot(5, "device", keys[40:], False, True)]
    placement.apply_events("r0", parts)
    assert cached(placement, ids(1)) == {"r0": 0} and cached(placement, ids(2)) == {"r0": 160}
    assert placement.view()["r0"]["events_seq"] == 5


def test_deeper_tiers_count_in_part_and_only_where_they_reach_further() -> None:
    placement, _ = fleet(3, host_credit=0.5, disk_credit=0.25)
    keys = short_keys(ids(1))
    for name in ("r0", "r1", "r2"):
        live(placement, name)
    placement.apply_events("r0", [Changes(1, "device", keys[:16], b""), Changes(2, "host", keys[:48], b"")])
    placement.apply_events("r1", [Changes(1, "device", keys[:48], b""), Changes(2, "host", keys[:32], b"")])
    placement.apply_events("r2", [Changes(1, "disk", keys, b""), Changes(2, "attic", keys, b"")])
    assert cached(placement, ids(1)) == {"r0": 32 + 32, "r1": 96, "r2": 40}
    placement.apply_events("r0", [Changes(3, "disk", keys[:56], b"")])
    assert cached(placement, ids(1))["r0"] == 32 + 32 + 4, "the disk counts only from where the host ends"
    assert placement.view()["r0"]["cached_blocks"] == {"device": 2, "host": 6, "disk": 7}
    placement.apply_events(
        "r0", [Changes(4, "host", b"", b"", cleared=True), Changes(5, "disk", b"", b"", cleared=True)]
    )
    assert cached(placement, ids(1))["r0"] == 32
    placement.check()


@pytest.mark.parametrize("is_slot_new", [False, True])
def test_events_that_came_after_a_prompt_was_prepared_count(is_slot_new: bool) -> None:
    placement, _ = fleet(2)
    if not is_slot_new:
        live(placement, "r1")
    prompt = placement.prepare(ids(1))
    live(placement, "r1", ids(1))
    charge = placement.choose(prompt, num_tokens=160)
    assert charge is not None and (charge.replica, charge.predicted_cached_tokens) == ("r1", 159)
    assert cached(placement, ids(1), "salt") == {"r0": 0, "r1": 0} == cached(placement, ids(1), None, "lora")


def test_each_block_size_and_fingerprint_is_matched_by_its_own_keys() -> None:
    placement, _ = fleet(1)
    placement.add_replica("big", ReplicaInfo(b"model", 32, 500))
    placement.add_replica("other", ReplicaInfo(b"other", 32, 500))
    for name in ("r0", "big", "other"):
        placement.set_available(name, True)
        placement.choose(placement.prepare(ids(1)), num_tokens=160, exclude=frozenset(placement._replicas) - {name})
    assert cached(placement, ids(1)) == {"r0": 160, "big": 160, "other": 160}
    assert cached(placement, ids(1)[: 4 * 100]) == {"r0": 96, "big": 96, "other": 96}
    placement.remove_replica("big")
    assert cached(placement, ids(1)) == {"r0": 160, "other": 160}
    placement.check()


def test_a_stream_may_name_as_many_keys_as_its_limit_and_others_keep_theirs() -> None:
    placement, _ = fleet(2, max_facts=5_000)
    for name in ("r0", "r1"):
        live(placement, name, ids(1))
    reserved = placement.metrics()["index_reserved_bytes"]
    forged = np.random.default_rng(2).integers(0, 2**64, 20_000, dtype=np.uint64).tobytes()
    placement.apply_events("r0", [Changes(1, "device", forged, b"")])
    limit = 2 * INFO.num_blocks + 1024
    assert placement.view()["r0"]["cached_blocks"]["device"] == limit
    assert placement.view()["r0"]["keys_refused"] == 20_000 + 10 - limit
    assert cached(placement, ids(1))["r1"] == 160 and placement.metrics()["index_reserved_bytes"] == reserved


def test_the_row_of_a_removed_replica_serves_the_next_one() -> None:
    placement, _ = fleet(2)
    charges = [placement.choose(placement.prepare(ids(seed)), num_tokens=160) for seed in range(6)]
    placement.remove_replica("r0")
    placement.add_replica("r9", INFO)
    placement.set_available("r9", True)
    assert cached(placement, ids(0))["r9"] == 0
    later = placement.choose(None, num_tokens=50, exclude=frozenset({"r1"}))
    assert later is not None and later.replica == "r9"
    for charge in charges:
        assert charge is not None
        charge.first_token(0)
        charge.tokens(5)
        charge.release(True)
    view = placement.view()
    assert view["r9"]["active_requests"] == 1 and view["r9"]["queued_tokens"] == 50
    assert view["r1"]["active_requests"] == view["r1"]["queued_tokens"] == 0
    later.release(True)
    placement.check()


def test_a_salt_is_not_cached() -> None:
    placement, before = Placement(), _root.cache_info().currsize
    placement.add_replica("r0", ReplicaInfo())
    for salt in ("s", "s" * 257):
        placement.prepare(bytes(4 * 64), salt, "an adapter of this test")
        assert _root.cache_info().currsize == before
    placement.prepare(bytes(4 * 64), None, "an adapter of this test")
    assert _root.cache_info().currsize == before + 1


@pytest.mark.parametrize(("info", "message"), table(__file__, "replicas"))
def test_an_impossible_replica_is_refused_with_its_field(info: dict[str, Any], message: str) -> None:
    placement, _ = fleet(0)
    with pytest.raises(ValueError, match=message):
        placement.add_replica("r0", ReplicaInfo(**info))
    placement.check()

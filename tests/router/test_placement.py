"""The placement: load, the learned costs, and the map of cached blocks: gaps and stalls in streams, guesses, deeper tiers,
other block sizes, limits, checkpoints of states."""

from typing import Any

import numpy as np
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Alive, Changes, Hello, Snapshot
from penstock.router.config import PolicyName
from penstock.router.placement.load import PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo, _root
from tests.support.refusals import table
from tests.support.route_model import World
from tests.support.router_fleet import predicted_tokens

INFO = ReplicaInfo(b"model", block_size=16, num_blocks=1000)


def fleet(count: int = 3, policy: PolicyName = "predicted-ttft", **options: Any) -> tuple[Placement, World]:
    clock = World()
    placement = Placement(PolicyConfig(**{"name": policy, "first_tokens_per_s": 1000.0, **options}), clock, seed=1)
    for number in range(count):
        placement.add_replica(f"r{number}", INFO)
        placement.set_available(f"r{number}", True)
    return placement, clock


def ids(seed: int, count: int = 160) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype="<i4").tobytes()


def short_keys(tokens: bytes, salt: str | None = None) -> bytes:
    root = namespace_root(model=b"model", salt=salt)
    return b"".join(key[:8] for key in block_keys(tokens, 16, root=root))


def live(placement: Placement, name: str, tokens: bytes = b"", seq: int = 0) -> None:
    """Begin the replica's event stream, with a snapshot that holds this prompt."""
    keys = short_keys(tokens)
    placement.apply_events(name, [Hello(name, "sha256", b"model", 16, 1000), Snapshot(seq, "device", keys, True, True)])


def cached(placement: Placement, tokens: bytes, salt: str | None = None, adapter: str | None = None) -> dict[str, int]:
    return predicted_tokens(placement, placement.prepare(tokens, salt, adapter))


def test_the_oldest_request_keeps_its_progress_when_another_ends() -> None:
    placement, clock = fleet(1)
    first, second, third = (placement.choose(None, num_tokens=num_tokens) for num_tokens in (1000, 100, 300))
    assert first is not None and second is not None and third is not None
    clock.now_s += 0.5
    second.release(False)
    assert placement.loads.backlog_of(0, clock.now_s) == 1300 - 500
    first.release()
    assert placement.loads.backlog_of(0, clock.now_s) == 300, "the turn of the third has only come now"
    assert placement.loads.backlog_of(0, clock.now_s + 0.25) == 300 - 250


def test_the_cost_of_an_answer_in_flight_is_learned_from_streams() -> None:
    """Steps of 50 ms, shared by two: an answer delays a first token by 25 ms, not by the 4 ms of the beginning."""
    placement, clock = fleet(2, wear=0.0)

    def stream(token_s: float, num_tokens: int = 9) -> None:
        one, other = (placement.choose(None, num_tokens=10, exclude=frozenset({"r1"})) for _ in range(2))
        assert one is not None and other is not None
        one.first_token(0)
        clock.now_s += token_s * (num_tokens - 1)
        one.streamed(num_tokens)
        one.release()
        other.release()

    early = placement.choose(None, num_tokens=10, exclude=frozenset({"r1"}))
    assert early is not None
    early.answered()  # its first token came later, at an unknown time
    early.streamed(9)
    early.release()
    for number in range(40):
        stream(5.0 if number % 10 == 9 else 0.05)  # now and then a client reads slowly
    delay = placement.loads.delay
    assert 0.02 < delay[0] < 0.035 and delay[1] == 0.004
    stream(1.0, num_tokens=4)  # too few to tell
    assert 0.02 < delay[0] < 0.035
    assert placement.view()["r0"]["delay_per_answer_s"] == round(delay[0], 6)


def test_after_a_gap_changes_still_count_until_a_snapshot_replaces_them() -> None:
    placement, _ = fleet(1)
    prompt = ids(1)
    assert placement.needs_snapshot("r0")
    live(placement, "r0", seq=7)
    assert not placement.needs_snapshot("r0")
    placement.apply_events("r0", [Changes(8, "device", short_keys(prompt), b""), Alive(8)])
    placement.apply_events("r0", [Changes(8, "device", b"", short_keys(prompt))])  # repeated
    assert not placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 160}
    placement.apply_events("r0", [Alive(9)])  # it is ahead: a change was lost
    assert placement.needs_snapshot("r0")
    live(placement, "r0", prompt, seq=8)
    placement.apply_events("r0", [Changes(10, "device", b"", short_keys(prompt)[-16:])])
    assert placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 128}
    assert placement.view()["r0"]["events_gaps"] == 2
    live(placement, "r0", seq=12)
    assert not placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 0}
    placement.check()


def knowledge(placement: Placement, name: str) -> str:
    return str(placement.view()[name]["knowledge"])


def test_placements_without_a_match_are_counted_by_reason(caplog: pytest.LogCaptureFixture) -> None:
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


def keys_at(tokens: bytes, *blocks: int) -> bytes:
    keys = short_keys(tokens)
    return b"".join(keys[8 * block : 8 * block + 8] for block in blocks)


def with_checkpoints(placement: Placement, name: str, keys: bytes = b"") -> None:
    hello = Hello(name, "sha256", b"model", 16, 1000, hits_at_ends=True)
    placement.apply_events(name, [hello, Snapshot(0, "device", keys, True, True)])


def test_a_checkpoint_counts_for_all_blocks_before_it() -> None:
    placement, _ = fleet(2)
    prompt = ids(1)  # ten blocks
    with_checkpoints(placement, "r0", keys_at(prompt, 3, 7))
    live(placement, "r1", prompt[: 4 * 6 * 16])
    assert cached(placement, prompt) == {"r0": 8 * 16, "r1": 6 * 16}
    assert cached(placement, prompt[: 4 * 8 * 16]) == {"r0": 4 * 16, "r1": 6 * 16}, "its last token is computed"
    assert cached(placement, prompt[: 4 * 7 * 16]) == {"r0": 4 * 16, "r1": 6 * 16}
    assert cached(placement, prompt[: 4 * 3 * 16]) == {"r0": 0, "r1": 3 * 16}
    placement.apply_events(
        "r0", [Changes(1, "host", keys_at(prompt, 8), b""), Changes(2, "device", b"", keys_at(prompt, 7))]
    )
    assert cached(placement, prompt)["r0"] == 4 * 16 + 0.8 * 5 * 16
    placement.check()


def test_a_request_that_was_just_sent_predicts_its_last_checkpoint_alone() -> None:
    placement, clock = fleet(1)
    with_checkpoints(placement, "r0")
    prompt = ids(1, 167)  # ten blocks and seven tokens
    assert placement.choose(placement.prepare(prompt), num_tokens=167)
    assert cached(placement, prompt) == {"r0": 160}
    assert cached(placement, prompt[: 4 * 100]) == {"r0": 0}, "there is no checkpoint"
    even = ids(2)  # the checkpoint lies before the last token's block
    assert placement.choose(placement.prepare(even), num_tokens=160)
    assert cached(placement, even) == {"r0": 144}
    short = ids(3, 16)
    assert placement.choose(placement.prepare(short), num_tokens=16)
    assert cached(placement, short) == {"r0": 0}
    for _ in range(6):
        clock.now_s += 1.0
        placement.apply_events("r0", [Alive(0)])
        placement.choose(None, num_tokens=1)
    assert cached(placement, prompt) == {"r0": 0}

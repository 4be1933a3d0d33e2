"""The placement: load, the learned costs, and gaps in the streams of cache events."""

from typing import Any

import numpy as np
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Alive, Changes, Hello, Snapshot
from penstock.router.config import PolicyName
from penstock.router.placement.load import PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo
from tests.support.router_fleet import predicted_tokens

INFO = ReplicaInfo(b"model", block_size=16, num_blocks=1000)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet(count: int = 3, policy: PolicyName = "predicted-ttft", **options: Any) -> tuple[Placement, Clock]:
    clock = Clock()
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


@pytest.mark.parametrize("ending", ["after the first token", "before the first token"])
def test_load_is_released_exactly_once(ending: str) -> None:
    placement, clock = fleet(1)
    charge = placement.choose(None, num_tokens=500)
    assert charge is not None and placement.loads.queued[0] == 500 and placement.loads.active[0] == 1
    clock.now_s += 0.5
    if ending == "after the first token":
        charge.first_token(0)
        charge.tokens(3)
        assert placement.loads.queued[0] == 0 and placement.loads.held[0] == 503
    charge.release(True)
    charge.release(False)
    assert placement.loads.queued[0] == placement.loads.active[0] == placement.loads.held[0] == 0
    assert (placement.totals.requests_ok_total, placement.totals.requests_failed_total) == (1, 0)
    placement.check()


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

    for number in range(40):
        stream(5.0 if number % 10 == 9 else 0.05)  # now and then a client reads slowly
    delay = placement.loads.delay
    assert 0.02 < delay[0] < 0.035 and delay[1] == 0.004
    stream(1.0, num_tokens=4)  # too few to tell
    assert 0.02 < delay[0] < 0.035
    assert placement.view()["r0"]["delay_per_answer_s"] == round(delay[0], 6)

    # 100 of 200 tokens there, and an answer: 0.1 s of prefill are more than 25 ms, 0.01 s are less
    half_cached = ids(1)
    live(placement, "r0", half_cached[:400])
    live(placement, "r1")
    assert placement.choose(None, num_tokens=1, exclude=frozenset({"r1"}))
    placement.loads.waiting[:] = placement.loads.queued[:] = 0.0
    for speed, expected in ((1_000.0, "r0"), (10_000.0, "r1")):
        placement.loads.speed[:] = speed
        charge = placement.choose(placement.prepare(half_cached), num_tokens=200, expects=False)
        assert charge is not None and charge.replica == expected
        charge.release(True)


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

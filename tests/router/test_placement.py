"""Where requests go: knowledge, policy, load."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Alive, Changes, Hello, Snapshot
from penstock.router.config import PolicyName
from penstock.router.placement.placement import Placement, ReplicaInfo
from penstock.router.placement.policy import PolicyConfig

INFO = ReplicaInfo(b"model", block_size=16, num_blocks=1000, prefill_tokens_per_s=1000.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet(count: int = 3, policy: PolicyName = "predicted-ttft", **options: Any) -> tuple[Placement, Clock]:
    clock = Clock()
    placement = Placement(PolicyConfig(name=policy, **options), clock, seed=1)
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
    """The replica's event stream stands and says that it holds this prompt."""
    keys = short_keys(tokens)
    placement.apply_events(name, [Hello(name, "sha256", b"model", 16, 1000), Snapshot(seq, "device", keys, True, True)])


def cached(placement: Placement, tokens: bytes, salt: str | None = None, adapter: str | None = None) -> dict[str, int]:
    """What the placement thinks each replica has of a prompt, without choosing for good."""
    placement._look_up(placement.prepare(tokens, salt, adapter))
    return {name: int(placement.loads.cached[replica.load.row]) for name, replica in placement._replicas.items()}


def test_a_request_goes_where_its_prefix_lies() -> None:
    placement, _ = fleet()
    prompt = ids(1)
    for name in ("r0", "r1", "r2"):
        live(placement, name, prompt if name == "r1" else b"")
    charge = placement.choose(placement.prepare(prompt), num_tokens=160)
    assert charge is not None and charge.replica == "r1" and charge.predicted_cached_tokens == 159
    placement.check()


def test_a_long_queue_outweighs_a_match() -> None:
    placement, _ = fleet(2)
    prompt = ids(1)
    live(placement, "r0", prompt)
    live(placement, "r1")
    for _ in range(2):
        assert placement.choose(None, num_tokens=300, exclude=frozenset({"r1"}))
    charge = placement.choose(placement.prepare(prompt), num_tokens=160)
    assert charge is not None and charge.replica == "r1"


def test_nobody_is_chosen_where_nobody_is_available() -> None:
    placement, _ = fleet(1)
    placement.set_available("r0", False)
    assert placement.choose(None, num_tokens=5) is None
    placement.set_available("r0", True)
    assert placement.choose(None, num_tokens=5, exclude=frozenset({"r0"})) is None
    assert placement.choose(None, num_tokens=5) is not None


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
    assert (placement.ledger.requests_ok_total, placement.ledger.requests_failed_total) == (1, 0)
    placement.check()


def test_a_gap_asks_for_a_snapshot_and_the_snapshot_mends_it() -> None:
    placement, _ = fleet(1)
    prompt = ids(1)
    assert placement.needs_snapshot("r0")
    live(placement, "r0", seq=7)
    assert not placement.needs_snapshot("r0")
    placement.apply_events("r0", [Changes(8, "device", short_keys(prompt), b""), Alive(8)])
    assert not placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 160}
    placement.apply_events("r0", [Changes(10, "device", b"", short_keys(prompt)[-16:])])
    assert placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 128}
    live(placement, "r0", seq=12)
    assert not placement.needs_snapshot("r0") and cached(placement, prompt) == {"r0": 0}
    placement.check()


def test_a_slot_that_came_while_a_prompt_was_prepared_does_not_matter() -> None:
    placement, _ = fleet(1)
    live(placement, "r0", ids(1))
    (space, match), *_ = placement.prepare(ids(1)).matches
    stale = replace(match, counts=match.counts[:0], version=placement.knowledge.index.version())
    prompt = replace(placement.prepare(ids(1)), matches=((space, stale),))
    charge = placement.choose(prompt, num_tokens=160)
    assert charge is not None and charge.predicted_cached_tokens > 0
    charge.release()

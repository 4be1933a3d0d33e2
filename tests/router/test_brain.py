"""Where requests go: knowledge, policy, load."""

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.http.kv_stream import Alive, Changes, Hello, Snapshot
from penstock.router.placement.brain import Brain, ReplicaInfo
from penstock.router.placement.policy import PolicyConfig

INFO = ReplicaInfo(b"model", block_size=16, num_blocks=1000, prefill_tokens_per_s=1000.0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def fleet(count: int = 3, policy: str = "predicted-ttft", **options) -> tuple[Brain, Clock]:
    clock = Clock()
    brain = Brain(PolicyConfig(name=policy, **options), clock, seed=1)
    for number in range(count):
        brain.add_replica(f"r{number}", INFO)
        brain.set_available(f"r{number}", True)
    return brain, clock


def ids(seed: int, count: int = 160) -> bytes:
    return np.random.default_rng(seed).integers(0, 50_000, count, dtype="<i4").tobytes()


def short_keys(tokens: bytes, salt: str | None = None) -> bytes:
    root = namespace_root(model=b"model", salt=salt)
    return b"".join(key[:8] for key in block_keys(tokens, 16, root=root))


def live(brain: Brain, name: str, tokens: bytes = b"", seq: int = 0) -> None:
    """The replica's event stream stands and says that it holds this prompt."""
    keys = short_keys(tokens)
    brain.apply_events(name, [Hello(name, "sha256", b"model", 16, 1000), Snapshot(seq, "device", keys, True, True)])


def cached(brain: Brain, tokens: bytes, salt: str | None = None, adapter: str | None = None) -> dict[str, int]:
    """What the brain thinks each replica has of a prompt, without choosing for good."""
    brain._look_up(brain.prepare(tokens, salt, adapter))
    return {name: int(brain.fleet.cached[replica.load.row]) for name, replica in brain._replicas.items()}


def test_a_request_goes_where_its_prefix_lies() -> None:
    brain, _ = fleet()
    prompt = ids(1)
    for name in ("r0", "r1", "r2"):
        live(brain, name, prompt if name == "r1" else b"")
    charge = brain.choose(brain.prepare(prompt), num_tokens=160)
    assert charge is not None and charge.replica == "r1" and charge.predicted_cached_tokens == 159
    brain.check()


def test_a_long_queue_outweighs_a_match() -> None:
    brain, _ = fleet(2)
    prompt = ids(1)
    live(brain, "r0", prompt)
    live(brain, "r1")
    for _ in range(2):
        assert brain.choose(None, num_tokens=300, exclude=frozenset({"r1"}))
    charge = brain.choose(brain.prepare(prompt), num_tokens=160)
    assert charge is not None and charge.replica == "r1"


def test_nobody_is_chosen_where_nobody_is_available() -> None:
    brain, _ = fleet(1)
    brain.set_available("r0", False)
    assert brain.choose(None, num_tokens=5) is None
    brain.set_available("r0", True)
    assert brain.choose(None, num_tokens=5, exclude=frozenset({"r0"})) is None
    assert brain.choose(None, num_tokens=5) is not None


@pytest.mark.parametrize("ending", ["after the first token", "before the first token"])
def test_load_is_released_exactly_once(ending: str) -> None:
    brain, clock = fleet(1)
    charge = brain.choose(None, num_tokens=500)
    assert charge is not None and brain.fleet.queued[0] == 500 and brain.fleet.active[0] == 1
    clock.now_s += 0.5
    if ending == "after the first token":
        charge.first_token(0)
        charge.tokens(3)
        assert brain.fleet.queued[0] == 0 and brain.fleet.held[0] == 503
    charge.release(True)
    charge.release(False)
    assert brain.fleet.queued[0] == brain.fleet.active[0] == brain.fleet.held[0] == 0
    assert (brain.ledger.num_ok, brain.ledger.num_failed) == (1, 0)
    brain.check()


def test_a_gap_asks_for_a_snapshot_and_the_snapshot_mends_it() -> None:
    brain, _ = fleet(1)
    prompt = ids(1)
    assert brain.needs_snapshot("r0")
    live(brain, "r0", seq=7)
    assert not brain.needs_snapshot("r0")
    brain.apply_events("r0", [Changes(8, "device", short_keys(prompt), b""), Alive(8)])
    assert not brain.needs_snapshot("r0") and cached(brain, prompt) == {"r0": 160}
    brain.apply_events("r0", [Changes(10, "device", b"", short_keys(prompt)[-16:])])
    assert brain.needs_snapshot("r0") and cached(brain, prompt) == {"r0": 128}
    live(brain, "r0", seq=12)
    assert not brain.needs_snapshot("r0") and cached(brain, prompt) == {"r0": 0}
    brain.check()


def test_a_slot_that_came_while_a_prompt_was_prepared_does_not_matter() -> None:
    brain, _ = fleet(1)
    live(brain, "r0", ids(1))
    (space, match), *_ = brain.prepare(ids(1)).matches
    stale = replace(match, counts=match.counts[:0], version=brain.knowledge.index.version())
    prompt = replace(brain.prepare(ids(1)), matches=((space, stale),))
    charge = brain.choose(prompt, num_tokens=160)
    assert charge is not None and charge.predicted_cached_tokens > 0
    charge.release()

"""The tiers under the real default model: what comes back from a peer is what would be computed."""

import random
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.core.tier_stats import Rates
from penstock.engine.core.tiers import Tiers
from tests.support.default_file import needs_model
from tests.support.peer_rig import free_addresses, until

pytestmark = [needs_model, pytest.mark.timeout(600)]

WORDS = ["rivers", "bridges", "bread", "moon", "ships", "chess", "winter", "violins", "maps", "bees", "glass", "trains"]


@pytest.fixture(autouse=True)
def loads_are_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the choice of loads independent of the machine's speed, which tests/engine/test_tiers.py checks."""
    monkeypatch.setattr(Rates, "is_load_faster", lambda *_: True)
    monkeypatch.setattr(Rates, "patience_s", lambda *_: 60.0)


def engine(**options: Any) -> LLM:
    """Open an engine whose device holds two or three prompts."""
    return LLM(device="cpu", max_model_len=256, kv_cache_bytes=20 * 737_280, **options)


def prompts(count: int) -> list[str]:
    rng = random.Random(5)
    return [f"Letter {number}. " + " ".join(rng.choices(WORDS, k=60)) + "." for number in range(count)]


def answers(llm: LLM, texts: list[str], max_tokens: int = 6) -> tuple[list[list[int]], list[int]]:
    """Return token ids, and how much of each prompt was cached."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results = []
    for text in texts:
        results += llm.generate(text, params, use_tqdm=False)
        llm._running().settle()  # what is being saved has no room for what is loaded
    return [result.outputs[0].token_ids for result in results], [result.num_cached_tokens for result in results]


def peers_agree(ranks: int, **options: Any) -> None:
    """Check that an engine reads blocks of another over real connections, and goes on from them."""
    (address,) = free_addresses(1, ranks)
    texts = prompts(3)
    shared: dict[str, Any] = {"kv_host_bytes": "64MiB", "tensor_parallel_size": ranks, **options}
    with engine(kv_peer_listen=address, **shared) as first, engine(kv_peers=[address], **shared) as second:
        cold, _ = answers(first, texts)
        first._running().settle()
        num_stored = first.get_metrics()["kv_host_stored_blocks"]
        until(lambda: num_announced(second) >= num_stored, "the blocks are announced")
        warm, hits = answers(second, texts)
        assert warm == cold and min(hits) >= 64
        assert second.get_metrics()["kv_peer_hit_tokens"] >= 0.9 * sum(hits)
        assert second.get_metrics()["kv_peer_failed_loads"] == 0


def num_announced(llm: LLM) -> int:
    """Return how many blocks the ranks have reported, which an empty step asks for."""
    core = llm._running()
    tiers = core.scheduler.tiers
    assert isinstance(tiers, Tiers)
    tiers.wake()
    core.step()
    return sum(len(keys) for keys in tiers.index.stored_keys.values())


@pytest.mark.slow
def test_tokens_from_a_peer_are_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    peers_agree(ranks=1)


@pytest.mark.slow
def test_every_rank_reads_from_the_same_rank_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    peers_agree(ranks=3)

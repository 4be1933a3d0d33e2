"""The tiers under the real default model: what comes back from the host or the disk is what would be computed."""

import random
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.core.tier_stats import Rates
from penstock.engine.core.tiered_kv import TieredKv
from tests.support.default_file import needs_model
from tests.support.peer_rig import free_addresses, until

pytestmark = [
    needs_model,
    pytest.mark.timeout(600),
]

WORDS = ["rivers", "bridges", "bread", "moon", "ships", "chess", "winter", "violins", "maps", "bees", "glass", "trains"]


@pytest.fixture(autouse=True)
def loads_are_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded depends on how fast the machine was a moment ago (tests/engine/test_tiers.py); what comes back may not."""
    monkeypatch.setattr(Rates, "is_load_faster", lambda *_: True)
    monkeypatch.setattr(Rates, "patience_s", lambda *_: 60.0)


def engine(**options: Any) -> LLM:
    """Its device holds two or three prompts."""
    return LLM(device="cpu", max_model_len=256, kv_cache_bytes=20 * 737_280, **options)


def prompts(count: int) -> list[str]:
    rng = random.Random(5)
    return [f"Letter {number}. " + " ".join(rng.choices(WORDS, k=60)) + "." for number in range(count)]


def answers(llm: LLM, texts: list[str], max_tokens: int = 6) -> tuple[list[list[int]], list[int]]:
    """Token ids, and how much of each prompt was found."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    results = []
    for text in texts:
        results += llm.generate(text, params, use_tqdm=False)
        llm._running().settle()  # what is being saved has no room for what is loaded
    return [result.outputs[0].token_ids for result in results], [result.num_cached_tokens for result in results]


def warm_equals_cold(tmp_path: Path, count: int) -> None:
    texts = prompts(count)
    options: dict[str, Any] = {"kv_host_bytes": "6MiB", "kv_disk_path": str(tmp_path), "kv_disk_bytes": "2GiB"}
    with engine() as llm:
        cold, found = answers(llm, texts)
        assert sum(found) < 16 * count  # no more than the few words that all begin with
    with engine(**options) as llm:
        first, _ = answers(llm, texts)
        second, found = answers(llm, texts)
        assert llm.get_metrics()["kv_disk_hit_tokens"] > 0
    with engine(**options) as llm:
        third, after_restart = answers(llm, texts)
    assert first == second == third == cold
    assert min(found) >= 64 and sum(after_restart) >= 0.99 * sum(found)


@pytest.mark.slow
def test_tokens_from_the_host_are_those_that_are_computed() -> None:
    texts = prompts(5)
    with engine(kv_host_bytes="64MiB") as llm:
        cold, _ = answers(llm, texts)
        warm, found = answers(llm, texts)
        assert 128 <= llm.get_metrics()["kv_host_hit_tokens"] <= sum(found) and min(found) >= 64
    assert warm == cold


@pytest.mark.slow
def test_tokens_from_the_disk_are_those_that_are_computed_also_after_a_restart(tmp_path: Path) -> None:
    warm_equals_cold(tmp_path, 6)


def peers_agree(ranks: int, **options: Any) -> None:
    """What one engine has computed, another over real connections reads and goes on from."""
    (address,) = free_addresses(1, ranks)
    texts = prompts(3)
    shared: dict[str, Any] = {"kv_host_bytes": "64MiB", "tensor_parallel_size": ranks, **options}
    with engine(kv_peer_listen=address, **shared) as first, engine(kv_peers=[address], **shared) as second:
        cold, _ = answers(first, texts)
        first._running().settle()
        wanted = first.get_metrics()["kv_host_stored_blocks"]
        until(lambda: heard(second) >= wanted, "the blocks are announced")
        warm, found = answers(second, texts)
        assert warm == cold and min(found) >= 64
        assert second.get_metrics()["kv_peer_hit_tokens"] >= 0.9 * sum(found)
        assert second.get_metrics()["kv_peer_failed_loads"] == 0


def heard(llm: LLM) -> int:
    """An empty step asks all ranks."""
    core = llm._running()
    tiers = core.scheduler.kv
    assert isinstance(tiers, TieredKv)
    tiers.wake()
    core.step()
    return sum(len(keys) for keys in tiers.index.stores.values())


@pytest.mark.slow
def test_tokens_from_a_peer_are_those_that_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    peers_agree(ranks=1)


@pytest.mark.slow
def test_every_rank_reads_from_the_same_rank_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    peers_agree(ranks=3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_prompts_say_the_same_cold_warm_and_after_a_restart(tmp_path: Path) -> None:
    warm_equals_cold(tmp_path, 200)

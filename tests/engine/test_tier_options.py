"""Host and disk tiers as the user asks for them: sizes, refusals, what is reported, and a restart."""

from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.engine.engine_options import engine_config
from penstock.engine.front.llm import LLM
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.metrics import METRICS, stats_families
from penstock.executor.protocol import ExecutorError
from tests.support.oracle import OracleExecutor
from tests.support.oracle_engine import oracle_llm
from tests.support.peer_rig import free_addresses, until

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)
PROMPTS = [[number, *range(40)] for number in range(8)]


@pytest.fixture
def disk(tmp_path: Path) -> str:
    (tmp_path / "disk").mkdir()
    return str(tmp_path / "disk")


def oracle(folder: Path, **options: Any) -> LLM:
    # Nine blocks of sixteen tokens: of eight prompts the device keeps the last two.
    return oracle_llm(folder, kv_cache_bytes=10 * 16 * 8, **options)


def cached(llm: LLM) -> list[int]:
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens for prompt in PROMPTS]


def tokens(llm: LLM) -> list[list[int]]:
    return [llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("size", ["1MiB", "1.1 MB", 2**20])
def test_sizes_are_numbers_or_texts(folder: Path, size: int | str) -> None:
    with oracle(folder, kv_host_bytes=size) as llm:
        assert cached(llm)[0] == 0 and cached(llm) == [32] * 8
        metrics = llm.get_metrics()
        assert metrics["kv_host_hit_tokens"] > 0
        assert 250 <= metrics["kv_host_capacity_blocks"] <= 270
        assert llm.info.memory["host tier"] >= 2**20


def test_less_than_two_blocks_and_paths_of_files_are_refused_by_name(folder: Path, disk: str) -> None:
    with pytest.raises(ExecutorError, match="kv_host_bytes: 5000 given; a block takes 4096 bytes"):
        oracle(folder, kv_host_bytes=5000)
    with pytest.raises(ExecutorError, match="kv_disk_bytes: 5000"):
        oracle(folder, kv_disk_path=disk, kv_disk_bytes=5000)
    with pytest.raises(ExecutorError, match="kv_disk_path: '.*config.json'"):
        oracle(folder, kv_disk_path=str(folder / "config.json"), kv_disk_bytes="1GiB")


def test_a_new_engine_finds_what_an_earlier_one_wrote_and_says_the_same(folder: Path, disk: str) -> None:
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB", "kv_host_bytes": "64KiB"}
    with oracle(folder, **options) as llm:
        cold = tokens(llm)
    with oracle(folder, **options) as llm:
        assert cached(llm) == [32] * 8
        assert tokens(llm) == cold
        assert llm.get_metrics()["kv_disk_hit_tokens"] > 0
        assert llm.info.memory["disk tier"] == 2**24


def test_a_disk_alone_passes_its_blocks_through_some_host_memory(folder: Path, disk: str) -> None:
    with oracle(folder, kv_disk_path=disk, kv_disk_bytes="16MiB") as llm:
        assert llm.info.num_host_blocks == 4096


def test_the_secret_of_peers_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    config = engine_config(str(folder), {"kv_peers": ["a:1", "b:2"], "kv_peer_listen": "0.0.0.0:9100"}).executor
    assert (config.kv_peers, config.kv_peer_listen) == (("a:1", "b:2"), "0.0.0.0:9100")
    assert "long enough" not in repr(config)


def test_a_port_that_is_taken_is_refused_by_name_and_memory_for_peers_is_shown(folder: Path) -> None:
    (address,) = free_addresses(1)
    with oracle(folder, kv_peer_listen=address) as llm:
        assert llm.info.memory["for peers"] == 128 * 2**20 and llm.info.num_host_blocks > 1000
        with pytest.raises(ExecutorError, match=f"kv_peer_listen: '{address}', port .* for rank 0: Address already"):
            oracle(folder, kv_peer_listen=address)


def test_an_engine_that_cannot_start_leaves_its_disk_to_the_next(folder: Path, disk: str) -> None:
    (address,) = free_addresses(1)
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB"}
    with oracle(folder, kv_peer_listen=address), pytest.raises(ExecutorError, match="Address already"):
        oracle(folder, kv_peer_listen=address, **options)
    with oracle(folder, **options) as llm:
        assert llm.info.stores == ("disk",)


def test_metrics_of_all_peers_stand_under_one_tier_and_all_are_in_the_table(folder: Path, disk: str) -> None:
    first, second = free_addresses(2)
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB", "kv_peer_listen": second, "kv_peers": [first]}
    with oracle(folder, kv_peer_listen=first) as llm, oracle(folder, **options) as other:
        tokens(llm)
        llm._running().settle()
        executor = cast(OracleExecutor, other._running().executor)
        assert executor._transfers is not None
        stores = executor._transfers._stores
        until(lambda: len(cast(Sized, stores[f"peer {first}"])) == 16, "all is announced")
        assert cached(other) == [32] * 8
        until(
            lambda: bool(other.generate([1], GREEDY, use_tqdm=False) and other.get_metrics()["kv_peer_hits"]), "figures"
        )
        metrics = other.get_metrics()
        assert metrics["kv_peer_hit_tokens"] == metrics["kv_peer_hits"] * 16 == 256
        assert metrics["kv_peer_is_open"] == 1 and metrics["kv_peer_served_blocks"] == 0
        stats = other._running().stats()
        families = {family.name: family for family in stats_families(stats, "m")}
        values = {sample.labels["tier"]: sample.value for sample in families["penstock:kv_tier_is_open"].samples}
        assert values == {"disk": 1, "peer": 1}
        figures = {figure for tier in stats.tiers.values() for figure in tier}
        assert {figure for figure in METRICS.tiers if not figure.endswith("_")} <= figures

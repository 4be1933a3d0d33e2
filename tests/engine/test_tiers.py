"""Host and disk tiers over the oracle executor, whose output changes with any wrong KV byte: whether to load or to compute
again, by the measured rates; sizes, refusals, what is reported, and a restart."""

from pathlib import Path
from typing import Any, cast

import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.core.tier_stats import MIN_PATIENCE_S, UNKNOWN_PATIENCE_S, Rate, Rates
from penstock.engine.engine_options import engine_config
from penstock.engine.front.llm import LLM
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.metrics import METRICS, stats_families
from penstock.executor.protocol import ExecutorError, Step
from penstock.executor.tiers import transfers
from tests.support.flaky_store import FlakyStore
from tests.support.oracle_engine import oracle_llm
from tests.support.peer_rig import free_addresses, until
from tests.support.programs import printed
from tests.support.refusals import table
from tests.support.simulation import BLOCK_SIZE, World, submit

PROMPT = list(range(20))  # five blocks


def with_the_prompt_on_the_disk(store: FlakyStore | None = None, blocks_per_s: float | None = None) -> World:
    """Return a world that has run the prompt, and then others, until device and host have lost it. It has loaded so many
    blocks per second from its disk, and computes one token per second."""
    world = World(num_blocks=17, num_host_blocks=20, store=store or FlakyStore())
    assert world.cached("cold", PROMPT) == 0
    world.churn()
    world.tiers.rates.loads["disk"].per_s, world.tiers.rates.prefill.per_s = blocks_per_s, 1.0
    return world


def test_blocks_evicted_from_the_host_come_back_from_the_disk() -> None:
    world = with_the_prompt_on_the_disk()
    keys = block_keys(PROMPT, BLOCK_SIZE, root=namespace_root(model=world.executor.info.fingerprint))
    assert len(keys) == 5 and not any(map(world.tiers.index.host.find, keys))
    assert world.cached("warm", PROMPT) == 19
    tiers = world.scheduler.stats().tiers
    assert tiers["disk"]["hit_tokens"] == 20 and tiers["host"]["hit_tokens"] == 0
    assert tiers["disk"]["hits"] == 5, "the store's own figures are those after its last load"


def test_records_that_a_scan_has_found_while_the_engine_was_idle_are_used() -> None:
    found = with_the_prompt_on_the_disk().disk.data
    world = World(num_blocks=17, num_host_blocks=20, store=FlakyStore(scan_left=1))
    world.cached("first", [1, 2, 3])
    for key, value in found.items():
        world.disk.insert(key, value)
    assert world.cached("warm", PROMPT) == 19


def test_a_request_that_waits_for_its_reads_keeps_nobody_else_waiting() -> None:
    """Not even one whose two blocks are on the disk as well: behind the first five, they would come after 14 seconds."""
    world = with_the_prompt_on_the_disk(blocks_per_s=0.5)
    world.disk.is_stalled = True
    world.submit(submit("waits", PROMPT, max_tokens=2))
    world.submit(submit("passes", [30] * 9, max_tokens=2))
    world.step()
    world.step()
    assert len(world.tiers.loading) == 1
    assert world.last("passes").finish_reason == "length" and not world.outputs["waits"]
    assert world.scheduler.stats().num_waiting == 1


def test_a_read_that_comes_too_late_is_computed_and_serves_the_next_request() -> None:
    world = with_the_prompt_on_the_disk()
    world.disk.is_stalled = True
    world.submit(submit("late", PROMPT, max_tokens=2))
    world.run()
    assert world.num_cached("late") == 0
    assert len(world.tiers.index.loading) == 5, "a slot stays with the store as long as it may write to it"
    world.disk.is_stalled = False
    world.settle()
    assert not world.tiers.index.loading


def test_what_lies_before_a_failed_read_is_used_and_the_rest_is_computed() -> None:
    world = with_the_prompt_on_the_disk()
    third = list(world.disk.data)[2]
    del world.disk.data[third]
    assert world.cached("warm", PROMPT) == 2 * BLOCK_SIZE
    assert world.tiers.index.counts["failed_loads_disk"] == 1
    world.churn()
    assert world.cached("again", PROMPT) == 19, "the block that was computed again is on the disk again"


def test_requests_that_want_the_same_blocks_share_one_read() -> None:
    world = World(num_blocks=60, num_host_blocks=60, store=FlakyStore())
    world.cached("cold", PROMPT)
    world.churn(30)
    world.disk.is_stalled = True
    for name in "abc":
        world.submit(submit(name, PROMPT, max_tokens=2))
    world.step()
    assert len(world.tiers.loading) == 3 and len(world.tiers.index.loading) == 5
    world.disk.is_stalled = False
    world.settle()
    assert [world.num_cached(name) for name in "abc"] == [19, 19, 19]


def test_a_request_starts_after_its_last_bounded_restore() -> None:
    world = World(num_blocks=17, num_host_blocks=100, max_in_flight=1)
    world.cached("cold", PROMPT)
    world.churn()
    world.tiers._restores_per_step = 2
    world.submit(submit("warm", PROMPT, max_tokens=2))
    seen: list[Step] = []
    while not seen or not seen[-1].rows:
        seen.append(world.run_step())
    assert [len(step.transfers.restores) if step.transfers else 0 for step in seen] == [2, 2, 1, 0]
    assert [(row.start, row.count) for row in seen[-1].rows] == [(19, 1)]


def test_a_reset_forgets_every_tier_and_is_refused_while_a_store_is_at_work() -> None:
    world = World(num_blocks=17, num_host_blocks=100, store=FlakyStore())
    world.cached("cold", PROMPT)
    world.disk.is_stalled = True
    world.submit(submit("more", [9] * 20, max_tokens=1))
    world.run()
    world.step()
    assert not world.scheduler.reset_prefix_cache()
    world.disk.is_stalled = False
    world.settle()
    assert world.scheduler.reset_prefix_cache()
    assert world.cached("again", PROMPT) == 0


def test_where_computing_is_faster_than_the_disk_nothing_is_waited_for() -> None:
    world = with_the_prompt_on_the_disk(blocks_per_s=0.1)
    world.disk.is_stalled = True
    world.submit(submit("slow", PROMPT, max_tokens=2))
    world.run(limit=5)
    assert not world.num_cached("slow")
    world.disk.is_stalled = False
    world.tiers.rates.loads["disk"].per_s = 1e6
    world.churn()
    assert world.cached("fast", PROMPT) == 19


def test_a_store_that_was_slow_is_measured_again_without_a_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STATS_EVERY_S", 0.0)
    world = with_the_prompt_on_the_disk(FlakyStore(delay=2, seed=1), blocks_per_s=0.1)
    tiers = world.tiers
    before = tiers.rates.loads["disk"].seconds(1)
    assert world.cached("slow", PROMPT) == 0
    assert tiers.index.counts["loads_disk"] > 0 and tiers.rates.loads["disk"].seconds(1) < before


def test_large_samples_weigh_more_than_small_ones() -> None:
    small, large = Rate(100), Rate(100)
    for rate, amount in ((small, 1), (large, 100)):
        rate.add(100, 1.0)
        rate.add(amount, amount / 50)
    assert small.per_s is not None and 98 < small.per_s < 100 and large.per_s == 75


def test_a_load_is_tried_at_first_and_must_then_be_faster_with_all_that_is_queued_before_it() -> None:
    """Patience ends when computing would be done."""
    unknown, rates = Rates(2**20, 16, ["disk"]), Rates(2**20, 16, ["disk"])
    assert unknown.is_load_faster({"disk": 1000}, 1, 0)
    assert unknown.patience_s({"disk": 10}, 10) == UNKNOWN_PATIENCE_S
    rates.loads["disk"].add(1000, 1.0)
    rates.copies.add(1e9, 1.0)
    rates.prefill.add(16 * 100, 1.0)
    assert rates.is_load_faster({"disk": 50}, num_gained=10, num_host=0)
    assert not rates.is_load_faster({"disk": 150}, num_gained=10, num_host=0)
    assert rates.patience_s({"disk": 10}, 1000) == pytest.approx(0.03)
    assert rates.patience_s({"disk": 1000}, 10) == pytest.approx(0.1)
    assert rates.patience_s({"disk": 1}, 1) == MIN_PATIENCE_S


def test_stores_work_side_by_side_and_each_has_its_own_rate() -> None:
    rates = Rates(2**20, 16, ["disk", "peer a:1"])
    rates.prefill.add(16 * 100, 1.0)
    rates.loads["disk"].add(1000, 1.0)
    assert rates.is_load_faster({"disk": 10, "peer a:1": 10_000}, 11, 0), "the peer has yet to be tried"
    rates.loads["peer a:1"].add(50, 1.0)
    assert rates.is_load_faster({"disk": 90}, 10, 0) and not rates.is_load_faster({"disk": 1, "peer a:1": 10}, 10, 0)
    assert rates.patience_s({"disk": 90, "peer a:1": 1}, 1000) == pytest.approx(0.27)


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
    for options, message in table(__file__, "sizes and paths of tiers", disk=disk, config=str(folder / "config.json")):
        with pytest.raises(ExecutorError, match=message):
            oracle(folder, **options)


def test_a_new_engine_finds_what_an_earlier_one_wrote_and_says_the_same(folder: Path, disk: str) -> None:
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB", "kv_host_bytes": "64KiB"}
    script = (
        f"from tests.engine.test_tiers import *; llm = oracle(Path({str(folder)!r}), **{options}); print(tokens(llm))"
    )
    cold = printed(script)
    assert list(Path(disk).rglob("index")), "a script that ends without a shutdown closes its tiers"
    with oracle(folder, **options) as llm:
        assert cached(llm) == [32] * 8
        assert str(tokens(llm)) == cold
        assert llm.get_metrics()["kv_disk_hit_tokens"] > 0
        assert llm.info.memory["disk tier"] == 2**24


def test_the_secret_of_peers_is_not_shown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KV_PEER_SECRET", "a secret that is long enough")
    config = engine_config(str(folder), {"kv_peers": ["a:1", "b:2"], "kv_peer_listen": "0.0.0.0:9100"}).executor
    assert (config.kv_peers, config.kv_peer_listen) == (("a:1", "b:2"), "0.0.0.0:9100")
    assert "long enough" not in repr(config)


def test_a_port_that_is_taken_is_refused_by_name_and_the_disk_is_left_free(folder: Path, disk: str) -> None:
    (address,) = free_addresses(1)
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB"}
    with oracle(folder, kv_peer_listen=address) as llm:
        assert llm.info.memory["for peers"] == 128 * 2**20 and llm.info.num_host_blocks > 1000
        with pytest.raises(ExecutorError, match=f"kv_peer_listen: '{address}', port .* for rank 0: Address already"):
            oracle(folder, kv_peer_listen=address, **options)
    with oracle(folder, **options) as llm:
        assert llm.info.stores == ("disk",)
        assert llm.info.num_host_blocks == 4096, "a disk alone passes its blocks through some host memory"


def test_metrics_of_all_peers_stand_under_one_tier_and_all_are_in_the_table(folder: Path, disk: str) -> None:
    first, second = free_addresses(2)
    options = {"kv_disk_path": disk, "kv_disk_bytes": "16MiB", "kv_peer_listen": second, "kv_peers": [first]}
    with oracle(folder, kv_peer_listen=first) as llm, oracle(folder, **options) as other:
        tokens(llm)
        llm._running().settle()
        stores = cast(Any, other._running().executor)._transfers._stores
        until(lambda: len(stores[f"peer {first}"]) == 16, "all is announced")
        assert cached(other) == [32] * 8
        until(lambda: cached(other) != [] and other.get_metrics()["kv_peer_hits"] == 16, "all hits are reported")
        metrics = other.get_metrics()
        assert [metrics[f"kv_peer_{name}"] for name in ("hit_tokens", "is_open", "served_blocks")] == [256, 1, 0]
        stats = other._running().stats()
        families = {family.name: family for family in stats_families(stats, "m")}
        values = {sample.labels["tier"]: sample.value for sample in families["penstock:kv_tier_is_open"].samples}
        assert values == {"disk": 1, "peer": 1}
        figures = {figure for tier in stats.tiers.values() for figure in tier}
        assert {figure for figure in METRICS.tiers if not figure.endswith("_")} <= figures

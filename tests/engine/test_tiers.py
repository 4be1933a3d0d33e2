"""The scheduler with host and disk tiers over the oracle executor, whose output changes with any wrong KV byte; whether to
load or to compute again, by the measured rates."""

import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.engine.core.tier_stats import MIN_PATIENCE_S, UNKNOWN_PATIENCE_S, Rate, Rates
from penstock.executor.protocol import Step
from penstock.executor.tiers import transfers
from tests.support.flaky_store import FlakyStore
from tests.support.simulation import BLOCK_SIZE, World, submit

PROMPT = list(range(20))  # five blocks


def with_the_prompt_on_the_disk(store: FlakyStore | None = None) -> World:
    """Return a world that has run the prompt, and then others, until device and host have lost it."""
    world = World(num_blocks=17, num_host_blocks=20, store=store or FlakyStore())
    assert world.cached("cold", PROMPT) == 0
    world.churn()
    return world


def test_blocks_evicted_from_the_host_come_back_from_the_disk() -> None:
    world = with_the_prompt_on_the_disk()
    root = namespace_root(model=world.executor.info.fingerprint)
    keys = block_keys(PROMPT, BLOCK_SIZE, root=root)
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
    world = with_the_prompt_on_the_disk()
    world.disk.is_stalled = True
    world.submit(submit("waits", PROMPT, max_tokens=2))
    world.submit(submit("passes", [1, 2, 3], max_tokens=2))
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
    index = world.tiers.index
    third = list(world.disk.data)[2]
    del world.disk.data[third]
    assert world.cached("warm", PROMPT) == 2 * BLOCK_SIZE
    assert index.counts["failed_loads_disk"] == 1
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
    world = with_the_prompt_on_the_disk()
    rates = world.tiers.rates
    rates.loads["disk"].add(1, 10.0)
    rates.prefill.add(1000, 1.0)
    world.disk.is_stalled = True
    world.submit(submit("slow", PROMPT, max_tokens=2))
    world.run(limit=5)
    assert not world.num_cached("slow")
    world.disk.is_stalled = False
    rates.loads["disk"].per_s = 1e6
    world.churn()
    assert world.cached("fast", PROMPT) == 19


def test_a_store_that_was_slow_is_measured_again_without_a_request_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "STATS_EVERY_S", 0.0)
    world = with_the_prompt_on_the_disk(FlakyStore(delay=2, seed=1))
    tiers = world.tiers
    tiers.rates.loads["disk"].add(1, 10.0)
    tiers.rates.prefill.add(1000, 1.0)
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

"""Load or compute again: what the measured rates say."""

import pytest

from penstock.engine.core.tier_stats import MIN_PATIENCE_S, UNKNOWN_PATIENCE_S, Rate, Rates


def measured(blocks_per_s: float, tokens_per_s: float, copies_per_s: float = 1e9) -> Rates:
    rates = Rates(block_bytes=2**20, block_size=16, stores=["disk"])
    rates.reads["disk"].add(blocks_per_s, 1.0)
    rates.copies.add(copies_per_s, 1.0)
    rates.prefill.add(tokens_per_s, 1.0)
    return rates


def test_large_samples_weigh_more_than_small_ones() -> None:
    small, large = Rate(100), Rate(100)
    for rate, amount in ((small, 1), (large, 100)):
        rate.add(100, 1.0)
        rate.add(amount, amount / 50)
    assert small.per_s is not None and 98 < small.per_s < 100 and large.per_s == 75


def test_nothing_known_means_that_loading_is_tried_and_waited_for() -> None:
    rates = Rates(2**20, 16, ["disk"])
    assert rates.is_load_faster({"disk": 1000}, 1, 0)
    assert rates.patience_s({"disk": 10}, 10) == UNKNOWN_PATIENCE_S


def test_a_load_must_be_faster_with_all_that_is_queued_before_it() -> None:
    rates = measured(blocks_per_s=1000, tokens_per_s=16 * 100)
    assert rates.is_load_faster({"disk": 50}, num_gained=10, num_host=0)
    assert not rates.is_load_faster({"disk": 150}, num_gained=10, num_host=0)


def test_patience_ends_when_computing_would_be_done() -> None:
    rates = measured(blocks_per_s=1000, tokens_per_s=16 * 100)
    assert rates.patience_s({"disk": 10}, 1000) == pytest.approx(0.03)
    assert rates.patience_s({"disk": 1000}, 10) == pytest.approx(0.1)
    assert rates.patience_s({"disk": 1}, 1) == MIN_PATIENCE_S


def test_stores_work_side_by_side_and_each_has_its_own_rate() -> None:
    rates = Rates(2**20, 16, ["disk", "peer a:1"])
    rates.prefill.add(16 * 100, 1.0)
    rates.reads["disk"].add(1000, 1.0)
    assert rates.is_load_faster({"disk": 10, "peer a:1": 10_000}, 11, 0), "the peer has yet to be tried"
    rates.reads["peer a:1"].add(50, 1.0)
    assert rates.is_load_faster({"disk": 90}, 10, 0) and not rates.is_load_faster({"disk": 1, "peer a:1": 10}, 10, 0)
    assert rates.patience_s({"disk": 90, "peer a:1": 1}, 1000) == pytest.approx(0.27)

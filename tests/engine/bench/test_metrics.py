"""The statistics of a serving benchmark, against numpy and against counting by hand."""

import random

import numpy as np
import pytest

from penstock.engine.commands.bench.summary import Outcome, details, goodput, spread, summarize

TOTALS = """
    duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
    output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
"""


def outcomes(count: int, seed: int = 0) -> list[Outcome]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        gaps = [rng.expovariate(50) for _ in range(rng.randint(0, 40))]
        ttft = rng.expovariate(10)
        start = rng.uniform(0, 5)
        made.append(Outcome(rng.randint(1, 100), len(gaps) + 1, start, ttft, ttft + sum(gaps), gaps))
    return made


def test_nothing_measured_is_zero_and_not_an_error() -> None:
    assert set(spread("itl", [], [99]).values()) == {0.0}


def test_time_per_token_leaves_out_the_first() -> None:
    assert Outcome(1, 5, 0.0, ttft_s=1.0, latency_s=3.0).tpot_s == 0.5
    assert Outcome(1, 1, 0.0, ttft_s=1.0, latency_s=1.0).tpot_s == 0.0


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    good = Outcome(1, 11, 0.0, ttft_s=0.1, latency_s=0.3)  # 20 ms per token
    late = Outcome(1, 11, 0.0, ttft_s=0.9, latency_s=1.1)
    slow = Outcome(1, 11, 0.0, ttft_s=0.1, latency_s=1.1)  # 100 ms per token
    every = [good, good, late, slow]
    assert goodput(every, {"ttft": 500}, 2.0) == 1.5
    assert goodput(every, {"ttft": 500, "tpot": 50}, 2.0) == 1.0
    assert goodput(every, {"e2el": 300}, 2.0) == 1.0, "a limit that is just met is met"
    assert goodput(every, {"ttft": 1}, 2.0) == 0.0


def test_totals_count_completed_requests_only() -> None:
    done = outcomes(20)
    failed = [Outcome(1000, 0, 0.0, 0.0, 0.0, error="HTTP 429")] * 3
    result = summarize([*done, *failed], 4.0, ["ttft", "e2el"], [99], {"e2el": 1e9})
    assert result["completed"] == 20 and result["failed"] == 3
    assert result["total_input_tokens"] == sum(o.prompt_len for o in done)
    assert result["total_output_tokens"] == sum(o.output_len for o in done)
    assert result["request_throughput"] == result["request_goodput"] == 5.0
    assert result["output_throughput"] == result["total_output_tokens"] / 4
    assert result["total_token_throughput"] == (result["total_input_tokens"] + result["total_output_tokens"]) / 4
    assert result["mean_e2el_ms"] == pytest.approx(1000 * np.mean([o.latency_s for o in done]))


def test_the_result_has_the_keys_that_scripts_read() -> None:
    result = summarize(outcomes(5), 1.0, ["ttft", "tpot", "itl"], [50, 99])
    assert set(result) >= {*TOTALS.split()}
    for name in ("ttft", "tpot", "itl"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99")} <= set(result)
    assert not any("e2el" in key for key in result), "only what was asked for"
    assert result["request_goodput"] is None
    lists = details(outcomes(5))
    assert set(lists) >= {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
    assert {len(values) for values in lists.values()} == {5}


def test_time_per_token_is_not_diluted_by_requests_with_one_token() -> None:
    many = Outcome(1, 11, 0.0, ttft_s=0.0, latency_s=1.0)
    one = Outcome(1, 1, 0.0, ttft_s=0.5, latency_s=0.5)
    assert summarize([many, one, one], 1.0, ["tpot"], [99])["mean_tpot_ms"] == pytest.approx(100)


def test_the_peaks_are_those_of_counting_every_moment() -> None:
    done = outcomes(30, seed=3)
    result = summarize(done, 10.0, [], [])
    moments = [o.start_s for o in done]
    running = [sum(o.start_s <= m < o.start_s + o.latency_s for o in done) for m in moments]
    assert result["max_concurrent_requests"] == max(running)
    begin = min(o.start_s for o in done)
    arrivals = [o.start_s + o.ttft_s - begin + sum(o.itls_s[:i]) for o in done for i in range(o.output_len)]
    assert result["max_output_tokens_per_s"] == pytest.approx(np.bincount(np.array(arrivals, np.int64)).max())

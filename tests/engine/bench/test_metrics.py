"""The statistics of a serving benchmark, against numpy and against counting by hand."""

import random

import numpy as np
import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import details, summarize

TOTALS = """
    duration completed failed total_input_tokens total_output_tokens request_throughput output_throughput
    total_token_throughput
"""


def outcomes(count: int, seed: int = 0) -> list[Outcome]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        gaps = [rng.expovariate(50) for _ in range(rng.randint(0, 40))]
        ttft = rng.expovariate(10)
        start = rng.uniform(0, 5)
        made.append(Outcome(rng.randint(1, 100), start, len(gaps) + 1, ttft, ttft + sum(gaps), gaps))
    return made


def test_totals_count_completed_requests_only() -> None:
    done = outcomes(20)
    failed = [Outcome(1000, 0.0, error="HTTP 429")] * 3
    result = summarize([*done, *failed], 4.0)
    assert result["completed"] == 20 and result["failed"] == 3
    assert result["total_input_tokens"] == sum(o.prompt_len for o in done)
    assert result["total_output_tokens"] == sum(o.output_len for o in done)
    assert result["request_throughput"] == 5.0
    assert result["output_throughput"] == result["total_output_tokens"] / 4
    assert result["total_token_throughput"] == (result["total_input_tokens"] + result["total_output_tokens"]) / 4
    seconds = [o.latency_s for o in done]
    assert result["mean_e2el_ms"] == pytest.approx(1000 * np.mean(seconds))
    assert result["std_e2el_ms"] == pytest.approx(1000 * np.std(seconds))
    assert result["p99_e2el_ms"] == pytest.approx(1000 * np.percentile(seconds, 99))


def test_the_result_has_the_keys_that_scripts_read() -> None:
    result = summarize(outcomes(5), 1.0)
    assert set(result) >= {*TOTALS.split()}
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")} <= set(result)
    lists = details(outcomes(5))
    assert set(lists) >= {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
    assert {len(values) for values in lists.values()} == {5}


def test_time_per_token_is_not_diluted_by_requests_with_one_token() -> None:
    many = Outcome(1, 0.0, 11, ttft_s=0.0, latency_s=1.0)
    one = Outcome(1, 0.0, 1, ttft_s=0.5, latency_s=0.5)
    assert summarize([many, one, one], 1.0)["mean_tpot_ms"] == pytest.approx(100)

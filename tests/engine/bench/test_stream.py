"""The figures of one streamed completion, and of many: against numpy and by hand."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import Goal, ReportOptions, details, spread, summarize
from tests.support.refusals import cases


def reply_to(*events: Any) -> Outcome:
    """Return the outcome of a stream whose events arrive one second apart; a string is sent as it is."""
    outcome = Outcome(5, 10.0)
    for index, event in enumerate(events):
        payload = event if isinstance(event, str) else json.dumps(event)
        outcome.take(200, f"data: {payload}\n\n".encode(), 11.0 + index)
    outcome.finish(200)
    return outcome


def text(piece: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


ROLE, END = delta(role="assistant", content=""), delta("stop")
COUNTS = {"prompt_tokens": 7, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}}
USAGE = {"choices": [], "usage": COUNTS}
WITHOUT_CACHE = {"choices": [], "usage": COUNTS | {"prompt_tokens_details": None}}
NAMES: dict[str, Any] = {"pytest": pytest, "text": text, "delta": delta, "ROLE": ROLE, "END": END}
NAMES |= {"USAGE": USAGE, "WITHOUT_CACHE": WITHOUT_CACHE}


@pytest.mark.parametrize(("events", "answer", "times_s", "counts"), cases(__file__, "answers", **NAMES))
def test_an_answer_is_timed_from_its_first_token_to_its_last(
    events: list[Any], answer: str, times_s: tuple[float, list[float], float], counts: tuple[int, int, int]
) -> None:
    outcome = reply_to(*events, "[DONE]")
    assert (outcome.error, outcome.text) == ("", answer)
    assert (outcome.ttft_s, outcome.itls_s, outcome.latency_s) == times_s
    assert (outcome.prompt_len, outcome.output_len, outcome.num_cached) == counts


@pytest.mark.parametrize(("events", "error"), cases(__file__, "ends of streams", **NAMES))
def test_a_stream_with_an_error_or_without_its_end_is_a_failure(events: list[Any], error: str) -> None:
    assert reply_to(*events).error.partition(" (")[0] == error


def outcomes(count: int) -> list[Outcome]:
    rng = random.Random(0)
    results = []
    for _ in range(count):
        gaps = [rng.expovariate(50) for _ in range(rng.randint(0, 40))]
        ttft = rng.expovariate(10)
        latency = ttft + sum(gaps)
        results.append(Outcome(rng.randint(1, 100), rng.uniform(0, 5), len(gaps) + 1, ttft, latency, gaps))
    return results


def test_totals_count_completed_requests_only() -> None:
    done = outcomes(20)
    failed = [Outcome(1000, 0.0, error="HTTP 429")] * 3
    result = summarize([*done, *failed], 4.0)
    assert result["completed"] == 20 and result["failed"] == 3
    assert result["total_input_tokens"] == sum(o.prompt_len for o in done)
    assert result["total_output_tokens"] == sum(o.output_len for o in done)
    assert (result["duration"], result["request_throughput"]) == (4.0, 5.0)
    assert result["output_throughput"] == result["total_output_tokens"] / 4
    assert result["total_token_throughput"] == (result["total_input_tokens"] + result["total_output_tokens"]) / 4
    assert result["median_e2el_ms"] == pytest.approx(1000 * np.median([o.latency_s for o in done]))
    assert result["median_itl_ms"] == pytest.approx(1000 * np.median([gap for o in done for gap in o.itls_s]))
    assert result["median_ttft_ms"] == pytest.approx(1000 * np.median([o.ttft_s for o in done]))
    assert {len(values) for values in details(done).values()} == {20}
    assert summarize(failed, 4.0)["mean_ttft_ms"] == 0.0


@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 9.0, 2.0]])
def test_the_spread_of_values_is_that_of_numpy(values: list[float]) -> None:
    percents = [0, 12.5, 50, 99.9, 100]
    expected = {f"p{percent}_x_ms": float(np.percentile(values, percent)) for percent in percents}
    expected["mean_x_ms"], expected["std_x_ms"] = float(np.mean(values)), float(np.std(values))
    expected["median_x_ms"] = float(np.median(values))
    assert spread("x", [value / 1000 for value in values], percents) == pytest.approx(expected)


def test_goodput_counts_completed_requests_within_every_limit() -> None:
    fast = Outcome(1, 0.0, 11, ttft_s=0.1, latency_s=0.3)
    late, slow, failed = (replace(fast, **change) for change in ({"ttft_s": 0.2}, {"latency_s": 9.0}, {"error": "no"}))
    goals = (Goal("ttft", 100.0), Goal("tpot", 500.0), Goal("e2el", 300.0))
    measured = [fast, late, slow, failed]
    assert summarize(measured, 2.0, ReportOptions(goodput=goals))["request_goodput"] == 0.5
    assert summarize(measured, 2.0, ReportOptions(goodput=goals[1:2]))["request_goodput"] == 1.0
    assert summarize(measured, 2.0)["request_goodput"] is None


def test_time_per_token_is_not_diluted_by_requests_with_one_token() -> None:
    many = Outcome(1, 0.0, 11, ttft_s=0.0, latency_s=1.0)
    one = Outcome(1, 0.0, 1, ttft_s=0.5, latency_s=0.5)
    assert summarize([many, one, one], 1.0)["mean_tpot_ms"] == pytest.approx(100)

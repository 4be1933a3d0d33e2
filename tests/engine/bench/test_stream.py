"""Reading streamed completions: events wherever the bytes are cut, and what counts as a token; and the figures, against numpy and by hand."""

import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import Goal, ReportOptions, details, percentile, summarize
from penstock.prove.http_client import Events

STREAM = b': ping\n\ndata: {"a": "\xc3\xa9"}\n\ndata:{"b": 2}\n\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": "\xc3\xa9"}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["LF", "CRLF"])
def test_events_are_whole_wherever_the_stream_is_cut(stream: bytes) -> None:
    assert Events().feed(stream) == PAYLOADS
    for cut in range(len(stream)):
        events = Events()
        assert events.feed(stream[:cut]) + events.feed(stream[cut:]) == PAYLOADS, cut
    events = Events()
    assert [payload for byte in stream for payload in events.feed(bytes([byte]))] == PAYLOADS


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


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}}


@pytest.mark.parametrize(
    ("events", "ttft_s", "itls_s", "latency_s"),
    [
        ([text("a"), text("b"), text("c", "length"), USAGE], 1.0, [1.0, 1.0], 3.0),
        (
            # A chat's role and its bare end are no tokens.
            [delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta("stop"), USAGE],
            *(2.0, [1.0], 4.0),
        ),
        ([text(""), text("é"), text("", "length"), USAGE], 1.0, [1.0], 3.0),  # the first is half a character
    ],
)
def test_an_answer_is_timed_from_its_first_token_to_its_last(
    events: list[Any], ttft_s: float, itls_s: list[float], latency_s: float
) -> None:
    outcome = reply_to(*events, "[DONE]")
    assert outcome.error == "" and (outcome.ttft_s, outcome.itls_s, outcome.latency_s) == (ttft_s, itls_s, latency_s)
    assert (outcome.prompt_len, outcome.output_len) == (7, 4), "the server's counts, not the number of pieces"
    choices = [choice for event in events for choice in event["choices"]]
    assert outcome.text == "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "") for choice in choices
    )


@pytest.mark.parametrize("field", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]}])
def test_reasoning_and_tool_calls_are_tokens_too(field: dict[str, Any]) -> None:
    outcome = reply_to(delta(role="assistant"), delta(**field), delta("stop", content="x"), "[DONE]")
    assert (outcome.ttft_s, outcome.output_len) == (2.0, 2)


@pytest.mark.parametrize(("details", "num_cached"), [(None, 0), ({"cached_tokens": 8}, 8)])
def test_cached_tokens_are_counted_where_the_server_reports_them(details: Any, num_cached: int) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": details}
    assert reply_to(text("a", "stop"), {"choices": [], "usage": usage}, "[DONE]").num_cached == num_cached


@pytest.mark.parametrize("error", [{"message": "out of memory", "code": 500}, "out of memory"])
def test_an_error_in_the_middle_of_a_stream_is_a_failure_with_the_servers_message(error: Any) -> None:
    assert reply_to(text("a"), {"error": error}, "[DONE]").error == "out of memory"
    assert reply_to(text("a", "stop"), {"error": None}, "[DONE]").error == ""


@pytest.mark.parametrize("events", [[], [text("a")], [text("a", "stop"), USAGE], ["[DONE]"]])
def test_a_stream_that_ends_early_is_a_failure(events: list[Any]) -> None:
    assert reply_to(*events).error == "the stream ended early"


def test_an_event_that_is_no_completion_is_a_failure() -> None:
    assert "cannot be read" in reply_to("{'choices'", "[DONE]").error


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


def test_goodput_counts_completed_requests_within_every_limit() -> None:
    fast = Outcome(1, 0.0, 11, ttft_s=0.1, latency_s=0.3)
    late, slow, failed = (replace(fast, **change) for change in ({"ttft_s": 0.2}, {"latency_s": 9.0}, {"error": "no"}))
    goals = (Goal("ttft", 100.0), Goal("tpot", 500.0), Goal("e2el", 300.0))
    measured = [fast, late, slow, failed]
    assert summarize(measured, 2.0, ReportOptions(goodput=goals))["request_goodput"] == 0.5
    assert summarize(measured, 2.0, ReportOptions(goodput=goals[1:2]))["request_goodput"] == 1.0
    assert summarize(measured, 2.0)["request_goodput"] is None


@pytest.mark.parametrize("percent", [0, 12.5, 50, 99.9, 100])
def test_percentiles_are_those_of_numpy(percent: float) -> None:
    for values in ([3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 9.0, 2.0]):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_the_result_has_the_keys_that_scripts_read() -> None:
    result = summarize(outcomes(5), 1.0)
    assert result["duration"] == 1.0
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p99")} <= set(result)
    lists = details(outcomes(5))
    assert set(lists) >= {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
    assert {len(values) for values in lists.values()} == {5}


def test_time_per_token_is_not_diluted_by_requests_with_one_token_or_none() -> None:
    assert summarize([Outcome(1, 0.0, error="HTTP 429")], 1.0)["mean_ttft_ms"] == 0.0
    many = Outcome(1, 0.0, 11, ttft_s=0.0, latency_s=1.0)
    one = Outcome(1, 0.0, 1, ttft_s=0.5, latency_s=0.5)
    assert summarize([many, one, one], 1.0)["mean_tpot_ms"] == pytest.approx(100)

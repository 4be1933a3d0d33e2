"""The load generator: its HTTP client against a real socket; the figures of streamed completions against numpy and by hand."""

import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import Goal, ReportOptions, details, spread, summarize
from penstock.prove.http_client import Client, Events, Target
from tests.support.bench_endpoint import completion, endpoint
from tests.support.refusals import cases
from tests.support.router_stub import Answer, Seen, Stub

STREAM = b': ping\n\ndata: {"a": "\xc3\xa9"}\n\ndata:{"b": 2}\n\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": "\xc3\xa9"}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["LF", "CRLF"])
def test_events_are_whole_wherever_the_stream_is_cut(stream: bytes) -> None:
    for cut in range(len(stream)):
        events = Events()
        assert events.feed(stream[:cut]) + events.feed(stream[cut:]) == PAYLOADS, cut
    events = Events()
    assert [payload for byte in stream for payload in events.feed(bytes([byte]))] == PAYLOADS


@contextlib.asynccontextmanager
async def connected(answer: Answer) -> AsyncIterator[tuple[Client, Stub]]:
    with endpoint(answer) as server:
        client = Client(Target.of(server.url))
        yield client, server
        client.close()


def sending(data: bytes, close: bool = False) -> Answer:
    def answer(seen: Seen, sock: socket.socket) -> bytes | None:
        sock.sendall(data)
        return None if close else b""

    return answer


async def complete(client: Client) -> Outcome:
    outcome = Outcome(1, 0.0)
    request = client.target.request("POST", "/v1/completions", b'{"max_tokens": 3}', {})
    outcome.finish(await client.exchange(request, outcome.take))
    return outcome


async def test_an_answer_cut_anywhere_in_two_is_read_whole() -> None:
    data = completion(num_tokens=2)
    cuts = iter(range(1, len(data)))

    def halves(seen: Seen, sock: socket.socket) -> bytes:
        cut = next(cuts)
        sock.sendall(data[:cut])
        time.sleep(0.0005)
        return data[cut:]

    async with connected(halves) as (client, server):
        for _ in range(len(data) - 1):
            assert (await complete(client)).text == " t0 t1"
        assert server.num_opened == 1


async def test_a_reused_connection_that_ends_without_an_answer_is_tried_once_more() -> None:
    answers = iter([sending(completion(1)), sending(b"", close=True), sending(completion(1))])
    half = sending(completion(3)[:200], close=True)
    async with connected(lambda *request: next(answers, half)(*request)) as (client, server):
        for num_requests in (1, 3):
            assert (await complete(client)).error == "" and len(server.seen) == num_requests
        with pytest.raises(ConnectionError, match="in the middle of the answer"):
            await complete(client)
        assert len(server.seen) == 4


@pytest.mark.parametrize(("data", "closes", "message"), cases(__file__, "no answers", HALF=completion(3)[:200]))
async def test_an_incomplete_or_foreign_answer_is_an_error(data: bytes, closes: bool, message: str) -> None:
    async with connected(sending(data, closes)) as (client, _):
        with pytest.raises(ConnectionError, match=message):
            await complete(client)


@pytest.mark.parametrize(("length", "closes"), [(b"", True), (b"Content-Length: 2\r\n", False)])
async def test_no_second_request_follows_on_a_connection_that_the_server_closes(length: bytes, closes: bool) -> None:
    """Without a length, the answer ends with its connection."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n"
    async with connected(sending(head + b"ok", closes)) as (client, server):
        for num_opened in (1, 2):
            assert await client.fetch("GET", "/x") == (200, b"ok") and server.num_opened == num_opened


def test_a_base_url_gives_host_port_and_prefix() -> None:
    assert Target.of("http://example:81/up/")[:3] == ("example", 81, "/up")
    assert Target.of("http://example")[1] == 80
    assert Target.of("https://example")[1] == 443 and Target.of("https://example").tls is not None
    request = Target.of("http://[::1]:81/up").request("GET", "/v1/models", b"", {})
    assert b"GET /up/v1/models HTTP/1.1\r\nHost: [::1]:81\r\n" in request
    for url in ("localhost:8000", "ftp://x", "http://", ""):
        with pytest.raises(ValueError, match="is not a URL"):
            Target.of(url)


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

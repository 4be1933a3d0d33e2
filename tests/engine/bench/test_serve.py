"""`penstock bench serve` from its options to its table and its file.
The load generator: its HTTP client against a real socket; the figures of streamed completions against numpy and by hand."""

import argparse
import contextlib
import json
import random
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.cli import main
from penstock.engine.commands.bench import serving
from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import Goal, ReportOptions, details, spread, summarize
from penstock.prove.http_client import Client, Events, Target
from tests.support.bench_endpoint import completion, endpoint, speak_openai
from tests.support.refusals import cases
from tests.support.router_stub import Answer, Seen, Stub, whole

TIMES = ("TTFT", "TPOT", "ITL", "E2EL")


def measured(*options: str, answer: Answer = speak_openai) -> tuple[dict[str, Any], Stub]:
    lengths = () if "--dataset-name" in options else ("--random-input-len", "8", "--random-output-len", "3")
    with endpoint(answer) as server, tempfile.NamedTemporaryFile() as file:
        address = ("--base-url", server.url, "--output-json", file.name)
        assert main(["bench", "serve", *address, "--num-prompts", "6", *lengths, *options]) == 0
        return json.loads(file.read()), server


def bodies(server: Stub) -> list[dict[str, Any]]:
    return [json.loads(request.body) for request in server.seen if is_post(request)]


def is_post(request: Seen) -> bool:
    return request.line.startswith(b"POST")


def labels(printed: str) -> set[str]:
    return {line[:40].strip() for line in printed.splitlines()}


def test_completions_are_sent_as_token_ids_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    result, server = measured("--extra-body", '{"temperature": 0, "top_k": 5}')
    assert [request.line.split()[1] for request in server.seen] == [b"/v1/models"] + 6 * [b"/v1/completions"]
    assert all(request.header(b"authorization") == [b"Bearer secret"] for request in server.seen)
    for body in bodies(server):
        assert len(body.pop("prompt")) == 8
        usual = {"model": "a/model", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
        assert body == usual | {"max_tokens": 3, "temperature": 0, "top_k": 5}
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 18)


def test_chats_are_sent_as_words_and_extra_fields_override_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    words = ("--backend", "openai-chat", "--no-ignore-eos", "--model", "m")
    result, server = measured(*words, "--extra-body", '{"model": "another"}')
    # A server is not asked for a model whose name is on the command line.
    assert [request.line.split()[1] for request in server.seen] == 6 * [b"/v1/chat/completions"]
    assert all(request.header(b"authorization") == [b"Bearer secret"] for request in server.seen)
    body = bodies(server)[0]
    (message,) = body.pop("messages")
    assert message["role"] == "user" and len(message["content"].split()) == 8
    usual = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == usual | {"model": "another", "max_completion_tokens": 3}
    assert result["completed"] == 6


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    """The client has one connection for each request in flight."""
    for options, num_together in ((("--max-concurrency", "2"), 2), ((), 6)):
        together = threading.Barrier(num_together)

        def answer(request: Seen, sock: socket.socket, together: threading.Barrier = together) -> bytes:
            if is_post(request):
                together.wait(60)
            return speak_openai(request, sock)

        result, server = measured(*options, answer=answer)
        assert result["completed"] == 6 and server.num_opened == num_together


def test_failures_are_counted_explained_and_kept_out_of_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = iter(range(100))

    def one_in_three(request: Seen, sock: socket.socket) -> bytes | None:
        case = next(numbers) % 3 if is_post(request) else 0
        if case == 1:
            return whole(b"the queue is full", b"429 Too Many Requests")
        if case == 2:
            sock.sendall(completion(3)[:150])
            return None
        return speak_openai(request, sock)

    result, _ = measured(answer=one_in_three)
    assert (result["completed"], result["failed"]) == (2, 4)
    printed = capsys.readouterr().err
    assert "2 failed: HTTP 429: the queue is full" in printed
    assert "2 failed: the connection was closed in the middle" in printed
    assert sum(bool(error) for error in result["errors"]) == 4


def test_the_table_and_the_saved_result_are_those_of_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "results"
    with endpoint() as server:
        words = ["bench", "serve", "--base-url", server.url, "--num-prompts", "6", "--random-output-len", "3"]
        words += ["--save-result", "--result-dir", str(folder), "--max-concurrency", "3"]
        assert main([*words, "--request-rate", "500"]) == 0
        printed = capsys.readouterr().out
        (path,) = folder.iterdir()
        saved = json.loads(path.read_text())
        assert path.name == f"openai-500.0qps-concurrency3-model-{saved['date']}.json"
        assert saved["model_id"] == "a/model" and saved["completed"] == 6 and saved["request_goodput"] is None
        kinds = ("mean", "median", "std", "p99")
        assert {f"{kind}_{name.lower()}_ms" for kind in kinds for name in TIMES} <= set(saved) and "ttfts" not in saved
        assert main([*words, "--save-detailed", "--result-filename", "mine.json"]) == 0
        lists = {name: rows for name, rows in json.loads((folder / "mine.json").read_text()).items() if name[-1] == "s"}
        assert {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"} <= set(lists)
        assert len(lists["ttfts"]) == 6
        path.unlink()
        assert main(words) == 0
    assert any(path.name.startswith("openai-infqps-concurrency3-model-") for path in folder.iterdir())
    lines = printed.splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============" and lines[-1] == "=" * 50
    assert {*cases(__file__, "lines of the table")} <= {*lines}
    assert {*cases(__file__, "labels of the table")} <= labels(printed)
    assert {f"{kind} {name} (ms):" for kind in ("Mean", "Median", "P99") for name in TIMES} <= labels(printed)


def test_the_names_of_vllm_choose_path_and_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "vllm", "--endpoint", "/proxy/v1/completions", "--percentile-metrics", "ttft,e2el"]
    words += ["--metric-percentiles", "25,99.9", "--goodput", "e2el:60000"]
    result, server = measured(*words)
    assert {request.line.split()[1] for request in server.seen} == {b"/v1/models", b"/proxy/v1/completions"}
    assert result["backend"] == "vllm" and result["completed"] == 6
    assert result["request_goodput"] == result["request_throughput"]
    assert [key for key in result if key.endswith("_ttft_ms")] == [
        *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p25_ttft_ms", "p99.9_ttft_ms")
    ]
    assert not any("tpot" in key or "_itl_" in key for key in result)
    shown = labels(capsys.readouterr().out)
    assert {"Request goodput (req/s):", "P25 TTFT (ms):", "P99.9 E2EL (ms):"} <= shown
    assert not any("TPOT" in label or "P99 " in label for label in shown)


def test_the_default_server_listens_at_port_8000_of_this_machine() -> None:
    args = argparse.Namespace(base_url=None, host=None, port=None)
    assert serving.target_of(args) == Target("127.0.0.1", 8000)


def test_a_server_that_refuses_the_key_is_reported_with_its_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with endpoint(lambda *_: whole(b"the key is not accepted", b"401 Unauthorized")) as server:
        assert main(["bench", "serve", "--base-url", server.url]) == 2
    assert "lists none; give --model (401: the key is not accepted" in capsys.readouterr().err


def test_a_trace_has_its_own_times_and_takes_no_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"input_length": 9, "output_length": 3, "hash_ids": [4]}
    path.write_text("".join(json.dumps({"timestamp": at, **entry}) + "\n" for at in (0, 40, 80, 90, 95, 100)))
    options = ("--dataset-name", "timed_trace", "--dataset-path", str(path))
    result, server = measured(*options)
    assert result["completed"] == 6 and {len(body["prompt"]) for body in bodies(server)} == {9}
    assert 1000 * result["duration"] + result["max_send_delay_ms"] >= 100  # the first may be sent late
    words = ["bench", "serve", "--base-url", server.url, "--model", "m", *options, "--num-prompts", "6"]
    assert main([*words, "--request-rate", "5"]) == 2
    assert "request_rate: given; a trace has its own arrival times" in capsys.readouterr().err


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


@pytest.mark.parametrize(("events", "answer", "times_s", "counts"), cases(__file__, "answers", **globals()))
def test_an_answer_is_timed_from_its_first_token_to_its_last(
    events: list[Any], answer: str, times_s: tuple[float, list[float], float], counts: tuple[int, int, int]
) -> None:
    outcome = reply_to(*events, "[DONE]")
    assert (outcome.error, outcome.text) == ("", answer)
    assert (outcome.ttft_s, outcome.itls_s, outcome.latency_s) == times_s
    assert (outcome.prompt_len, outcome.output_len, outcome.num_cached) == counts


@pytest.mark.parametrize(("events", "error"), cases(__file__, "ends of streams", **globals()))
def test_a_stream_with_an_error_or_without_its_end_is_a_failure(events: list[Any], error: str) -> None:
    assert reply_to(*events).error.partition(" (")[0] == error


def test_totals_count_completed_requests_only() -> None:
    rng, done = random.Random(0), list[Outcome]()
    for _ in range(20):
        gaps = [rng.expovariate(50) for _ in range(rng.randint(0, 40))]
        ttft = rng.expovariate(10)
        done.append(Outcome(rng.randint(1, 100), 0.0, len(gaps) + 1, ttft, ttft + sum(gaps), gaps))
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

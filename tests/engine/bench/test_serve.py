"""`penstock bench serve` from its options to its table and its file."""

import argparse
import json
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.engine.commands.bench import serving
from penstock.prove.http_client import Target
from tests.support.bench_endpoint import completion, endpoint, speak_openai
from tests.support.refusals import cases
from tests.support.router_stub import Answer, Seen, Stub, whole

NAMES = ("TTFT", "TPOT", "ITL", "E2EL")


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
        assert {f"{kind}_{name.lower()}_ms" for kind in kinds for name in NAMES} <= set(saved) and "ttfts" not in saved
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
    assert {"Failed requests:", "Benchmark duration (s):", "Total input tokens:"} <= labels(printed)
    rates = ("Request throughput (req/s):", "Output token throughput (tok/s):", "Total token throughput (tok/s):")
    assert {*rates} <= labels(printed)
    assert {f"{kind} {name} (ms):" for kind in ("Mean", "Median", "P99") for name in NAMES} <= labels(printed)


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

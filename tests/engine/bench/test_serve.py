"""`penstock bench serve` from its options to its table and its file."""

import argparse
import asyncio
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.commands import bench
from penstock.engine.commands.bench import serving
from penstock.engine.commands.bench.report import serving_table
from penstock.engine.config import ConfigError
from penstock.engine.engine_options import chosen
from tests.support.bench_endpoint import completion, endpoint, speak_openai
from tests.support.refusals import table
from tests.support.router_stub import Answer, Seen, whole


def parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    args = parser.parse_args(["serve", *options])
    for kind in bench.BENCHMARKS["serve"][1]:
        chosen(args, kind)
    return args


def measured(*options: str, answer: Answer = speak_openai) -> tuple[dict[str, Any], list[Seen]]:
    with endpoint(answer) as server:
        lengths = () if "--dataset-name" in options else ("--random-input-len", "8", "--random-output-len", "3")
        small = ("--num-prompts", "6", *lengths)
        result = asyncio.run(serving.measure(parse("--base-url", server.url, *small, *options)))
        return result, server.seen


def bodies(asked: list[Seen]) -> list[dict[str, Any]]:
    return [json.loads(each.body) for each in asked if is_post(each)]


def is_post(asked: Seen) -> bool:
    return asked.line.startswith(b"POST")


def test_completions_are_sent_as_token_ids_and_counted() -> None:
    result, asked = measured("--extra-body", '{"temperature": 0, "top_k": 5}')
    assert [each.line.split()[1] for each in asked] == [b"/v1/models"] + 6 * [b"/v1/completions"]
    for body in bodies(asked):
        assert body["model"] == "a/model" and len(body["prompt"]) == 8 and body["max_tokens"] == 3
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert body["ignore_eos"] is True and body["temperature"] == 0 and body["top_k"] == 5
        assert "top_p" not in body
    assert (result["completed"], result["failed"]) == (6, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 18)


def test_chats_are_sent_as_words_to_the_chat_endpoint() -> None:
    result, asked = measured("--backend", "openai-chat", "--no-ignore-eos")
    assert asked[-1].line.split()[1] == b"/v1/chat/completions"
    body = bodies(asked)[0]
    (message,) = body["messages"]
    assert message["role"] == "user" and len(message["content"].split()) == 8
    assert body["max_completion_tokens"] == 3 and "ignore_eos" not in body and "prompt" not in body
    assert result["completed"] == 6


@pytest.mark.parametrize("variable", ["PENSTOCK_API_KEY", "OPENAI_API_KEY"])
def test_extra_fields_and_the_key_go_with_every_request(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_API_KEY", raising=False)
    monkeypatch.setenv(variable, "secret")
    _, asked = measured("--extra-body", '{"max_tokens": 1, "min_p": 0.5}', "--model", "m")
    assert all(body["max_tokens"] == 1 and body["min_p"] == 0.5 and body["model"] == "m" for body in bodies(asked))
    assert all(each.header(b"authorization") == [b"Bearer secret"] for each in asked)
    assert all(map(is_post, asked)), "a given model is not asked for"


def test_no_more_requests_are_in_flight_than_allowed() -> None:
    running: list[Seen] = []
    numbers: list[int] = []
    pair, everyone = threading.Barrier(2), threading.Barrier(6)

    def slow(asked: Seen, sock: socket.socket) -> bytes:
        if is_post(asked):
            running.append(asked)
            numbers.append(len(running))
            pair.wait(60)
            time.sleep(0.02)  # for a third request, if one is sent
            running.remove(asked)
        return speak_openai(asked, sock)

    def when_all_are_here(asked: Seen, sock: socket.socket) -> bytes:
        if is_post(asked):
            everyone.wait(60)
        return speak_openai(asked, sock)

    measured("--max-concurrency", "2", answer=slow)
    assert max(numbers) == 2
    assert measured(answer=when_all_are_here)[0]["completed"] == 6


def test_failures_are_counted_explained_and_kept_out_of_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = iter(range(100))

    def one_in_three(asked: Seen, sock: socket.socket) -> bytes | None:
        case = next(numbers) % 3 if is_post(asked) else 0
        if case == 1:
            return whole(b"the queue is full", b"429 Too Many Requests")
        if case == 2:
            sock.sendall(completion(3)[:150])
            return None
        return speak_openai(asked, sock)

    result, _ = measured(answer=one_in_three)
    assert (result["completed"], result["failed"]) == (2, 4)
    said = capsys.readouterr().err
    assert (
        "2 failed: HTTP 429: the queue is full" in said and "2 failed: the connection was closed in the middle" in said
    )
    assert sum(bool(error) for error in result["errors"]) == 4


def test_the_table_has_the_lines_that_scripts_look_for() -> None:
    result, _ = measured("--max-concurrency", "3", "--request-rate", "500")
    lines = serving_table(result).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "Successful requests:                     6         " in lines
    assert "Maximum request concurrency:             3         " in lines
    assert "Request rate configured (RPS):           500.00    " in lines
    assert "Total generated tokens:                  18        " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    labels = [line[:40].strip() for line in lines]
    for label in (
        "Failed requests:",
        "Benchmark duration (s):",
        "Total input tokens:",
        "Request throughput (req/s):",
        "Output token throughput (tok/s):",
        "Total token throughput (tok/s):",
    ):
        assert label in labels
    for name in ("TTFT", "TPOT", "ITL", "E2EL"):
        assert {f"{kind} {name} (ms):" for kind in ("Mean", "Median", "P99")} <= set(labels)


def test_the_names_of_vllm_choose_server_path_and_metrics() -> None:
    options = ("--backend", "vllm", "--endpoint", "/proxy/v1/completions")
    with endpoint(speak_openai) as server:
        host, port = server.url.removeprefix("http://").split(":")
        address = ("--host", host, "--port", port, "--num-prompts", "4", "--random-input-len", "8")
        chosen_metrics = (
            "--percentile-metrics",
            "ttft,e2el",
            "--metric-percentiles",
            "25,99.9",
            "--goodput",
            "e2el:60000",
        )
        result = asyncio.run(serving.measure(parse(*options, *address, *chosen_metrics)))
        assert {each.line.split()[1] for each in server.seen} == {b"/v1/models", b"/proxy/v1/completions"}
    assert result["backend"] == "vllm" and result["completed"] == 4
    assert result["request_goodput"] == result["request_throughput"]
    assert [key for key in result if key.endswith("_ttft_ms")] == [
        *("mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p25_ttft_ms", "p99.9_ttft_ms")
    ]
    assert not any("tpot" in key or "_itl_" in key for key in result)
    labels = [line[:40].strip() for line in serving_table(result).splitlines()]
    assert {"Request goodput (req/s):", "P25 TTFT (ms):", "P99.9 E2EL (ms):"} <= set(labels)
    assert not any("TPOT" in label or "P99 " in label for label in labels)


@pytest.mark.parametrize("url", ["http://[::1]:9000", "http://127.0.0.1:8000"])
def test_host_and_port_are_another_way_to_write_the_url(url: str) -> None:
    options = ("--host", "::1", "--port", "9000") if "::1" in url else ()
    assert serving.target_of(parse(*options)) == serving.target_of(parse("--base-url", url))


def test_a_saved_result_has_the_name_of_vllm_and_lists_only_when_detailed(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    with endpoint(speak_openai) as server:
        words = ["--base-url", server.url, "--num-prompts", "2", "--save-result", "--result-dir", str(folder)]
        assert serving.load_server(parse(*words, "--request-rate", "500", "--max-concurrency", "2")) == 0
        (path,) = folder.iterdir()
        saved = json.loads(path.read_text())
        assert path.name == f"openai-500.0qps-concurrency2-model-{saved['date']}.json"
        assert saved["model_id"] == "a/model" and saved["completed"] == 2 and "ttfts" not in saved
        assert saved["request_goodput"] is None and "p99_itl_ms" in saved
        path.unlink()
        serving.load_server(parse(*words, "--save-detailed", "--result-filename", "mine.json"))
        assert len(json.loads((folder / "mine.json").read_text())["ttfts"]) == 2
        serving.load_server(parse(*words))
    assert any(path.name.startswith("openai-infqps-model-") for path in folder.iterdir())


def test_fields_that_are_no_json_object_are_named_by_their_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--extra-body", "[1]")
    assert "--extra-body: '[1]' given; a JSON object is expected" in capsys.readouterr().err


def test_a_missing_server_is_reported_and_not_traced() -> None:
    with pytest.raises(ConfigError, match="no server answers at 127.0.0.1:1 "):
        asyncio.run(serving.measure(parse("--base-url", "http://127.0.0.1:1")))


def test_a_server_that_refuses_the_key_is_reported_with_its_answer() -> None:
    with pytest.raises(ConfigError, match="lists none; give --model .401: the key is not accepted"):
        measured(answer=lambda *_: whole(b"the key is not accepted", b"401 Unauthorized"))


def test_a_trace_is_replayed_at_its_own_times_and_no_rate_may_be_given_beside(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entry = {"input_length": 9, "output_length": 3, "hash_ids": [4]}
    path.write_text("".join(json.dumps({"timestamp": at, **entry}) + "\n" for at in (0, 40, 80, 90, 95, 100)))
    options = ("--dataset-name", "timed_trace", "--dataset-path", str(path))
    result, asked = measured(*options)
    assert result["completed"] == 6 and {len(body["prompt"]) for body in bodies(asked)} == {9}
    assert result["duration"] >= 0.1
    with pytest.raises(ConfigError, match="request_rate: given; a trace has its own arrival times"):
        measured(*options, "--request-rate", "5")


@pytest.mark.parametrize(("options", "words"), table(__file__, "serve options"))
def test_an_option_that_cannot_be_used_is_named_before_a_server_is_asked(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(serving.measure(parse("--base-url", "http://127.0.0.1:1", *options)))

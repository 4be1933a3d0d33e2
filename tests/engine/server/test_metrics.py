"""The metrics at /metrics have vLLM's names, true numbers, and no label that a client can grow."""

import math
import random
import string
import time
from array import array
from typing import Any, cast

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.front.answer import Answer, Choice
from penstock.engine.front.client import AsyncEngine
from penstock.engine.messages import Output, Outputs, Stats, Submit
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.metrics import ServerMetrics
from penstock.engine.text.template import ChatTemplate
from penstock.executor.protocol import ExpertUpdate, Sampling
from tests.support.chat_samples import QWEN3
from tests.support.fake_engine import FakeEngine
from tests.support.refusals import cases
from tests.support.running_server import Running, running, started, until
from tests.support.three_apis import APIS

server = started(scope="function")


def samples(server: Running) -> dict[str, float]:
    """Return the samples: `name{label=value,…}` → value."""
    values = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
            values[f"{sample.name}{{{labels}}}"] = sample.value
    return values


def assert_samples(server: Running, section: str) -> None:
    expected, seen = dict(cases(__file__, section)), samples(server)
    assert {name: seen.get(name, math.nan) for name in expected} == pytest.approx(expected)


def test_gauges_and_counters_are_the_engine_s(server: Running) -> None:
    server.engine.stats = Stats(**dict(cases(__file__, "figures of an engine")))
    server.call(lambda: server.engine.on_step(Outputs([], Stats(), step_tokens=40)))
    assert_samples(server, "samples of these figures")


def test_tiers_and_experts_are_labelled_and_absent_without_any(server: Running) -> None:
    assert not [name for name in samples(server) if "kv_tier" in name or "expert" in name]
    tiers: dict[str, dict[str, float]] = {
        "host": {"hit_tokens": 32, "used_blocks": 5},
        "disk": {"hit_tokens": 16, "bytes_per_s": 1e9},
    }
    server.engine.stats = Stats(num_blocks=64, tiers=tiers)
    assert_samples(server, "samples of tiers")
    loads: dict[str, Any] = {
        "rank_load": array("f", [0.25, 0.75]).tobytes(),
        "expert_load": array("f", [0.5, 0.25, 0.25]).tobytes(),
    }
    server.engine.stats = Stats(experts=ExpertUpdate(balance=0.5, num_moved=3, **loads))
    assert_samples(server, "samples of experts")


def test_requests_are_measured_once_whole_or_streamed(server: Running) -> None:
    """The queue's time has vLLM's buckets, and smaller ones that show an empty queue."""
    server.complete("abc", max_tokens=5)
    server.complete("abc", max_tokens=5, stream=True)
    server.complete("abcd", stop="cd", max_tokens=5)
    until(lambda: samples(server)["vllm:request_prompt_tokens_count{}"] == 3)  # the client may be faster
    assert_samples(server, "samples of three requests")
    until(lambda: samples(server)["penstock:http_requests_total{route=/v1/completions,status=200}"] == 3)


def test_times_are_those_of_arrival_however_late_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    metrics = ServerMetrics("m", cast(AsyncEngine, FakeEngine()), {})
    submit = Submit("r.0", array("i", [1]).tobytes(), Sampling(), 9)
    answer = Answer([submit], [Choice(0, SamplingParams(), None)], lambda _: None)
    reads: list[tuple[float, list[tuple[float, Output]]]] = [
        (50.0, [(1.0, Output("r.0", [1], queued_s=0.25))]),
        (60.0, [(3.0, Output("r.0", [2])), (5.0, Output("r.0", [3]))]),
        (70.0, [(8.0, Output("r.0", [4], "length"))]),
    ]
    for read_s, outputs in reads:
        for arrives_s, output in outputs:
            now_s = arrives_s
            answer.take(0, output)
        now_s = read_s
        metrics.see(answer, answer.updates())
    metrics.end(answer)
    names = ("first_token", "next_token", "whole", "queued", "prefill", "decode", "per_token", "longest")
    totals = [metrics.histograms[name].total for name in names]
    assert totals == [1.0, 4 / 2 + 3, 8.0, 0.25, 0.75, 7.0, 7 / 3, 4]


def test_requests_that_the_connection_refuses_are_counted_too() -> None:
    with running(max_body_bytes=2000) as server:
        assert server.complete("x" * 5000).status_code == 413
        with server.connect() as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            sock.recv(1000)
        seen = samples(server)
        assert seen["penstock:http_refused_total{status=413}"] == 1
        assert seen["penstock:http_refused_total{status=400}"] == 1


def test_clients_cannot_grow_the_labels(server: Running) -> None:
    choose = random.Random(3)

    def noise() -> str:
        return "".join(choose.choices(string.ascii_letters + "/._-", k=choose.randint(1, 30)))

    paths = ["/health", "/metrics", "/version", "/v1/models", "/nope", "/v1/models/x", "/v1/completions"]
    with httpx.Client(base_url=server.url) as client:
        for method in ("GET", "PUT", "OPTIONS", "PATCH"):
            for path in paths:
                client.request(method, path)
        client.post("/v1/completions", json={"model": "x"})
        before = len(client.get("/metrics").content)
        for _ in range(100):
            method = choose.choice(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
            client.request(method, f"/{noise()}", headers={"x-request-id": noise()})
            client.get(f"/v1/models/{noise()}")
            client.post("/v1/completions", json={"model": noise(), "prompt": "x", noise(): 1})
        assert len(client.get("/metrics").content) - before < 1024


@pytest.mark.parametrize("name", APIS)
def test_a_request_whose_optional_tools_no_grammar_holds_counts_once(name: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "pattern": "("}}}
    with running(template=ChatTemplate(QWEN3)) as server:
        server.engine.reply = "Hello."
        answer = APIS[name].ask(server, tools=[APIS[name].tool("weather", schema)])
        assert answer.status_code == 200, answer.text
        until(lambda: server.app.service.num_open_requests == 0)
        seen = samples(server)
        ends = {key: number for key, number in seen.items() if key.startswith("vllm:request_success_total") and number}
        assert ends == {"vllm:request_success_total{finished_reason=stop}": 1}
        assert seen["vllm:e2e_request_latency_seconds_count{}"] == seen["vllm:request_prompt_tokens_count{}"] == 1
        assert seen["vllm:request_prompt_tokens_sum{}"] == APIS[name].whole(answer.json()).usage[0]

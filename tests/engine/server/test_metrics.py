"""The metrics at /metrics have vLLM's names, true numbers, and no label that a client can grow."""

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


def test_gauges_and_counters_are_the_engine_s(server: Running) -> None:
    server.engine.stats = Stats(
        num_running=3,
        num_waiting=4,
        num_blocks=64,
        num_used_blocks=16,
        num_cached_blocks=20,
        num_steps=4,
        step_s=0.5,
        prefix_queries=100,
        prefix_hits=25,
        num_preemptions=2,
        prompt_tokens=77,
        generation_tokens=88,
        num_drafts=3,
        draft_tokens=12,
        accepted_tokens=9,
        accepted_at=[6, 3],
    )
    server.call(lambda: server.engine.on_step(Outputs([], Stats(), step_tokens=40)))
    seen = samples(server)
    assert seen["vllm:num_requests_running{}"] == 3
    assert seen["vllm:num_requests_waiting{}"] == 4
    assert seen["vllm:kv_cache_usage_perc{}"] == 0.25
    assert seen["vllm:cache_config_info{block_bytes=1048576,block_size=16,num_gpu_blocks=64}"] == 1
    assert seen["vllm:prefix_cache_hits_total{}"] / seen["vllm:prefix_cache_queries_total{}"] == 0.25
    assert seen["vllm:num_preemptions_total{}"] == 2
    assert (seen["vllm:prompt_tokens_total{}"], seen["vllm:generation_tokens_total{}"]) == (77, 88)
    assert seen["vllm:iteration_tokens_total_sum{}"] == 40
    states = {state: seen[f"penstock:kv_device_blocks{{state={state}}}"] for state in ("all", "held", "cached")}
    assert states == {"all": 64, "held": 16, "cached": 20}
    assert (seen["penstock:step_seconds_sum{}"], seen["penstock:step_seconds_count{}"]) == (0.5, 4)
    drafts = [seen[f"vllm:spec_decode_num_{name}_total{{}}"] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert drafts == [3, 12, 9]
    by_place = [seen[f"vllm:spec_decode_num_accepted_tokens_per_pos_total{{position={place}}}"] for place in range(2)]
    assert by_place == [6, 3]


def test_tiers_and_experts_are_labelled_and_absent_without_any(server: Running) -> None:
    assert not [name for name in samples(server) if "kv_tier" in name or "expert" in name]
    tiers: dict[str, dict[str, float]] = {
        "host": {"hit_tokens": 32, "used_blocks": 5},
        "disk": {"hit_tokens": 16, "bytes_per_s": 1e9},
    }
    server.engine.stats = Stats(num_blocks=64, tiers=tiers)
    seen = samples(server)
    assert seen["penstock:kv_tier_hit_tokens_total{tier=host}"] == 32
    assert seen["penstock:kv_tier_hit_tokens_total{tier=disk}"] == 16
    assert seen["penstock:kv_tier_used_blocks{tier=host}"] == 5
    assert seen["penstock:kv_tier_bytes_per_s{tier=disk}"] == 1e9
    loads: dict[str, Any] = {
        "rank_load": array("f", [0.25, 0.75]).tobytes(),
        "expert_load": array("f", [0.5, 0.25, 0.25]).tobytes(),
    }
    server.engine.stats = Stats(experts=ExpertUpdate(balance=0.5, num_moved=3, **loads))
    seen = samples(server)
    assert seen["penstock:expert_balance{}"] == 0.5 and seen["penstock:expert_moved_total{}"] == 3
    assert [seen[f"penstock:expert_rank_load{{rank={rank}}}"] for rank in range(2)] == [0.25, 0.75]
    assert [seen[f"penstock:expert_load{{expert={expert}}}"] for expert in range(3)] == [0.5, 0.25, 0.25]


def test_requests_are_measured_once_whole_or_streamed(server: Running) -> None:
    server.complete("abc", max_tokens=5)
    server.complete("abc", max_tokens=5, stream=True)
    server.complete("abcd", stop="cd", max_tokens=5)
    until(lambda: samples(server)["vllm:request_prompt_tokens_count{}"] == 3)  # the client may be faster
    seen = samples(server)
    assert seen["vllm:request_prompt_tokens_sum{}"] == 10
    assert seen["vllm:request_generation_tokens_sum{}"] == 5 + 5 + 4
    assert seen["vllm:time_to_first_token_seconds_count{}"] == 3
    assert seen["vllm:e2e_request_latency_seconds_count{}"] == 3
    assert seen["vllm:request_queue_time_seconds_sum{}"] == pytest.approx(0.003)
    assert seen["vllm:request_queue_time_seconds_bucket{le=0.005}"] == 3, "an empty queue is shown"
    assert seen["vllm:request_queue_time_seconds_bucket{le=0.3}"] == 3, "vLLM's bounds are there too"
    assert seen["vllm:request_max_num_generation_tokens_sum{}"] == 5 + 5 + 4
    assert seen["vllm:request_prefill_time_seconds_count{}"] == 3
    assert seen["vllm:request_success_total{finished_reason=length}"] == 2
    assert seen["vllm:request_success_total{finished_reason=stop}"] == 1
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

"""The metrics at /metrics have vLLM's names, true numbers, and no label that a client can grow. Routes and metrics that inference
gateways read: each row names the specification that asks for it."""

import contextlib
import math
import random
import string
import time
from array import array
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest
import yaml  # type: ignore[import-untyped]
import zmq
from prometheus_client.parser import text_string_to_metric_families

from penstock.engine.front.answer import Answer, Choice
from penstock.engine.front.client import AsyncEngine
from penstock.engine.messages import Output, Outputs, Stats, Submit
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.kv_publisher import KvPublisher
from penstock.engine.server.metrics import ServerMetrics
from penstock.engine.server.server_config import KvEventsConfig
from penstock.engine.text.template import ChatTemplate
from penstock.executor.protocol import AdapterInfo, ExpertUpdate, Sampling
from tests.support import endpoint_picker
from tests.support.chat_samples import QWEN3
from tests.support.endpoint_picker import Picker, Unfit
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.oracle_engine import oracle_engine
from tests.support.refusals import cases, table
from tests.support.running_server import MODEL, Running, running, started, until
from tests.support.three_apis import APIS, SCHEMA

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
    for read_s, outputs in cases(__file__, "outputs that are read late", Output=Output):
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


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = {"CHAT": CHAT, "COMPLETIONS": COMPLETIONS, "TOOL": APIS["chat"].tool("weather", SCHEMA)}
NEEDED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}


def test_the_gauges_of_the_protocol_have_its_names_and_labels() -> None:
    with running(FakeEngine(info=msgspec.structs.replace(INFO, max_loras=4))) as server:
        server.app.service.adapters.served |= {name: AdapterInfo(f"key of {name}", 8, 1) for name in ("a", "b", "c")}
        used = Stats(adapters=[["key of a", "key of b", "key of one that is unloaded"], ["key of b"]])
        before_s = time.time()
        for stats in (used, Stats()):  # not every step has them
            server.call(partial(server.engine.on_step, Outputs([], stats)))
        families = {each.name: each for each in text_string_to_metric_families(server.http.get("/metrics").text)}
    for specification, name, labels in cases(__file__, "gauges that gateways read"):
        (sample,) = families[name].samples
        assert (families[name].type, sample.labels) == ("gauge", labels), specification
    assert before_s <= sample.value <= time.time(), "the gauge of the adapters is the time of their last change"


@pytest.mark.parametrize(("specification", "name", "value"), cases(__file__, "fields of rendered requests"))
def test_a_rendered_request_has_the_field(server: Running, specification: str, name: str, value: Any) -> None:
    body = {"prompt": "hi", "stream": True, "stream_options": {"include_usage": True}, "cache_salt": "s", "priority": 3}
    (found,) = server.post(f"{COMPLETIONS}/render", body).json()
    assert found[name] == value, specification


@pytest.mark.parametrize(("path", "fields"), cases(__file__, "requests to render", **NAMES))
def test_a_request_is_rendered_as_it_is_submitted(server: Running, path: str, fields: dict[str, Any]) -> None:
    before, body = len(server.engine.submitted), NEEDED[path] | fields
    assert server.post(path, body).status_code == 200
    submitted = server.engine.submitted[before:]
    answer = server.post(f"{path}/render", body).json()
    assert len(server.engine.submitted) == before + len(submitted), "rendering does not run the model"
    found = [answer] if path == CHAT else answer
    for each, (ids, params, _) in zip(found, submitted, strict=True):
        room = INFO.max_model_len - len(ids)
        length = room if params.max_tokens is None else min(params.max_tokens, room)
        assert each["token_ids"] == ids
        assert each["sampling_params"] == msgspec.to_builtins(params, str_keys=True) | {"max_tokens": length}
    if fields.keys() <= {"tools", "tool_choice"}:
        assert found[0]["token_ids"] == server.post("/tokenize", body).json()["tokens"]


@pytest.mark.parametrize("path", NEEDED)
def test_rendering_refuses_what_the_route_itself_refuses(server: Running, path: str) -> None:
    for field, value in [*table(__file__, "fields"), ("model", "other"), ("prompt", 5), ("messages", [])]:
        body = NEEDED[path] | {field.partition(".")[0]: value}
        itself, rendered = server.post(path, body), server.post(f"{path}/render", body)
        if rendered.status_code == 200:
            assert field.split(".")[0] in ("response_format", "structured_outputs"), "only a grammar is not compiled"
        else:
            assert (rendered.status_code, rendered.json()) == (itself.status_code, itself.json()), field


MANIFEST = Path(__file__).parents[3] / "deploy/kubernetes/llm-d.yaml"
PICKER = next(each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == "ConfigMap")
CONFIG = yaml.safe_load(PICKER["data"]["penstock.yaml"].replace("smollm2", MODEL))


@contextlib.contextmanager
def replica() -> Iterator[tuple[Running, endpoint_picker.Server]]:
    """Yield a real server with the block size of the manifest, which publishes its cache events; and the picker's view of it."""
    with running(oracle_engine(max_model_len=4000, block_size=64)) as server, contextlib.ExitStack() as stack:
        address, free = f"127.0.0.1:{server.port}", "tcp://127.0.0.1:*"
        config = KvEventsConfig(True, endpoint=free, replay_endpoint=free, topic=f"kv@{address}@{MODEL}")
        publisher = KvPublisher(server.app.service.info, config)
        server.call(publisher.start)
        stack.callback(server.call, publisher.close)
        server.call(partial(server.app.kv_events.publish_to, publisher.publish))
        stack.callback(server.call, partial(server.app.kv_events.publish_to, None))
        ends = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in (publisher._socket, publisher._replay)]
        yield server, stack.enter_context(contextlib.closing(endpoint_picker.Server(address, *ends)))


def only_at(number: int) -> dict[str, dict[str, Any]]:
    """Return requests with a long beginning that only one of two replicas has computed before."""
    text = f"Only number {number} has this. " * 20
    return {COMPLETIONS: {"prompt": text}, CHAT: {"messages": [{"role": "user", "content": text}]}}


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[list[tuple[Running, endpoint_picker.Server]]]:
    with replica() as first, replica() as second:
        for number, (server, _) in enumerate((first, second)):
            for path, body in only_at(number).items():
                assert server.post(path, body | {"max_tokens": 1}).status_code == 200
        yield [first, second]


@pytest.mark.parametrize("path", NEEDED)
@pytest.mark.parametrize("number", [0, 1])
def test_a_picker_sends_a_request_to_the_replica_that_has_its_beginning(
    two_replicas: list[tuple[Running, endpoint_picker.Server]], number: int, path: str
) -> None:
    picker = Picker(CONFIG, [view for _, view in two_replicas])
    server, view = two_replicas[number]
    until(lambda: picker.pick(path, only_at(number)[path]) == view.address)
    assert server.http.post("/reset_prefix_cache").status_code == 200
    until(lambda: picker.pick(path, NEEDED[path]) != "" and not view.keys)
    for body in only_at(number).values():
        assert server.post(COMPLETIONS if "prompt" in body else CHAT, body | {"max_tokens": 1}).status_code == 200
    until(lambda: picker.pick(path, only_at(number)[path]) == view.address)


@pytest.mark.parametrize("name", cases(__file__, "names that a picker needs"))
def test_a_picker_refuses_a_server_that_lacks_a_name(
    two_replicas: list[tuple[Running, endpoint_picker.Server]], name: str
) -> None:
    views = [view for _, view in two_replicas]
    for view in views:
        view.number, view.keys = 0, {}
    other = name[0].encode() + b"X" * (len(name) - 1)
    picker = Picker(CONFIG, views, lambda data: data.replace(name.encode(), other))
    with pytest.raises(Unfit, match=name):
        for path in NEEDED:
            picker.pick(path, NEEDED[path])

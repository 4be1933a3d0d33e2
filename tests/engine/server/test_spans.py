"""The spans of a server's requests, as a collector and the SDK's own exporter get them. A collector that fails delays no request."""

import contextlib
import re
import time
from collections.abc import Iterator

import pytest

from penstock.engine.http import telemetry, tracing
from penstock.engine.http.telemetry import Telemetry, check, traces_url
from tests.support.collector import PARENT, TRACE, Collector, traced
from tests.support.collector import collector as collector
from tests.support.fake_engine import FakeEngine
from tests.support.programs import printed
from tests.support.refusals import cases, table
from tests.support.running_server import MODEL, Running, running, until

TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


@contextlib.contextmanager
def tracing_to(collector: Collector, engine: FakeEngine | None = None) -> Iterator[Running]:
    """Run a server whose spans have all been sent at the end."""
    with running(engine, telemetry=traced(collector)) as server:
        yield server
        server.app.service.spans.close()


def test_a_request_is_a_span_with_queue_prefill_and_decode_in_this_order(collector: Collector) -> None:
    before_ns = time.time_ns()
    with tracing_to(collector, FakeEngine(delay_s=0.005)) as server:
        headers = {"traceparent": TRACEPARENT, "tracestate": "a=b,c=d", "x-request-id": "mine"}
        messages = [{"role": "user", "content": "a text of some forty characters, that is cached"}]
        fields = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "frequency_penalty": 0.25, "stream": True}
        body = {"model": MODEL, "messages": messages, **fields}
        answer = server.post("/v1/chat/completions", body, headers=headers)
        request = collector.one(f"chat {MODEL}")
    assert request.service == "penstock" and request.kind == 2 and not request.is_failed
    assert (request.trace_id, request.parent_id, request.state) == (TRACE, PARENT, "a=b,c=d")
    phases = [collector.one(name) for name in ("queue", "prefill", "decode")]
    for phase in phases:
        assert (phase.trace_id, phase.parent_id, phase.kind) == (TRACE, request.span_id, 1)
    phase_times = [time for phase in phases for time in (phase.begun_ns, phase.ended_ns)]
    times = [request.begun_ns, *phase_times, request.ended_ns]
    assert times == sorted(times) and before_ns <= times[0] and times[-1] <= time.time_ns()
    assert [phase.begun_ns for phase in phases[1:]] == [phase.ended_ns for phase in phases[:-1]]
    assert 0.9e6 < phases[0].ended_ns - phases[0].begun_ns < 1.1e6  # what the fake engine says
    ids = re.search(r'"id":"(chatcmpl-[0-9a-f]+)"', answer.text)
    assert ids is not None
    first_s = request.attributes.pop("gen_ai.response.time_to_first_chunk")
    assert first_s == pytest.approx((phases[1].ended_ns - request.begun_ns) / 1e9, abs=1e-6)
    num_prompt = request.attributes["gen_ai.usage.input_tokens"]
    assert num_prompt > 40
    assert request.attributes == dict(cases(__file__, "attributes of the span of a chat", MODEL=MODEL)) | {
        "gen_ai.response.id": ids[1],
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.cache_read.input_tokens": num_prompt // 16 * 16,
    }
    assert phases[1].attributes["gen_ai.usage.input_tokens"] == num_prompt
    assert phases[2].attributes == {"gen_ai.usage.output_tokens": 5}


def test_no_text_of_a_request_is_in_a_span(collector: Collector) -> None:
    with tracing_to(collector) as server:
        server.complete("canary-prompt", stop=["canary-stop"], user="canary-user", cache_salt="canary-salt")
        server.chat(messages=[{"role": "user", "content": "canary"}], max_tokens=20)
        server.complete("x", canary=1)
        server.http.post("/v1/completions?canary", content=b"canary", headers={"content-type": "application/json"})
        collector.named(f"chat {MODEL}")
    assert len(collector.spans) >= 2 * 4 and "canary" not in str(collector.spans)


def test_several_prompts_have_their_own_spans_and_an_embedding_has_no_decode(collector: Collector) -> None:
    with tracing_to(collector) as server:
        server.complete(["one", "two"], n=2, max_tokens=3)
        server.post("/v1/embeddings", {"model": MODEL, "input": ["abc"] * 20})
        request = collector.one(f"text_completion {MODEL}")
        embedded = collector.one(f"embeddings {MODEL}")
    assert request.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4
    assert request.attributes["gen_ai.request.choice.count"] == 2 and request.attributes["penstock.prompts"] == 2
    decodes = collector.named("decode")
    assert [span.attributes["penstock.prompt.index"] for span in decodes] == [0, 1]
    assert {span.parent_id for span in decodes} == {request.span_id}
    assert "gen_ai.usage.output_tokens" not in embedded.attributes
    within = [span for span in collector.spans if span.parent_id == embedded.span_id]
    assert sorted(span.name for span in within) == ["prefill"] * 16 + ["queue"] * 16  # of twenty


def test_failed_requests_are_marked_and_refused_ones_are_not(collector: Collector) -> None:
    engine = FakeEngine()
    with tracing_to(collector, engine) as server:
        engine.fail_next = "a kernel failed"
        assert server.complete().status_code == 500
        engine.fail_next = None
        assert server.complete("x", temperature=9).status_code == 400
        assert server.post("/v1/nothing", {}).status_code == 404
        failed, refused = collector.named(f"text_completion {MODEL}", 2)
        unknown = collector.one("POST unmatched")
    assert failed.is_failed and failed.attributes["error.type"] == "500"
    assert not refused.is_failed and refused.attributes["error.type"] == "400"
    assert unknown.attributes["http.response.status_code"] == 404


def test_a_client_that_leaves_ends_its_span(collector: Collector) -> None:
    with tracing_to(collector, FakeEngine(delay_s=0.01)) as server:
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        request = collector.one(f"text_completion {MODEL}")
    assert request.attributes["http.response.status_code"] == 499
    assert request.attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert collector.one("decode").ended_ns <= request.ended_ns


def test_probes_and_pages_are_not_traced(collector: Collector) -> None:
    with tracing_to(collector) as server:
        for path in ("/health", "/ready", "/metrics", "/v1/models", "/"):
            server.http.get(path, headers={"traceparent": TRACEPARENT})
        server.complete(max_tokens=1)
        collector.one(f"text_completion {MODEL}")
    assert {span.name for span in collector.spans} == {f"text_completion {MODEL}", "queue", "prefill", "decode"}


def test_the_sdks_environment_variables_are_obeyed(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20token,x-tenant=7")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with tracing_to(collector) as server:
        server.complete(max_tokens=1)
        for flag in ("00", "01"):
            headers = {"traceparent": TRACEPARENT[:-2] + flag}
            server.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}, headers=headers)
        request = collector.one(f"text_completion {MODEL}")
    assert request.trace_id == TRACE and len(collector.spans) == 4
    assert request.service == "chat-eu"
    assert collector.headers[0]["authorization"] == "Bearer token" and collector.headers[0]["x-tenant"] == "7"


@pytest.mark.parametrize(("headers", "joins"), table(__file__, "traceparents", **globals()))
def test_a_valid_traceparent_is_joined_and_another_begins_a_trace(headers: list[str], joins: bool) -> None:
    spans = tracing.Tracing(Telemetry(otlp_traces_endpoint="http://127.0.0.1:9"), "penstock")
    trace = spans.begin([(b"traceparent", header.encode()) for header in headers], "POST", 0.0)
    spans.close()
    assert (trace.trace_id == TRACE) is joins


def test_a_failed_or_hung_collector_delays_no_request(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "CLOSE_S", 0.05)
    collector.status = 500
    with tracing_to(collector) as server:
        assert server.complete(max_tokens=1).status_code == 200
        until(lambda: collector.num_requests == 1)
        collector.may_answer.clear()
        assert server.complete(max_tokens=1).status_code == 200
        until(lambda: collector.num_requests == 2)
        assert server.complete(max_tokens=1).status_code == 200
    assert collector.spans == []


@pytest.mark.parametrize(("options", "message"), table(__file__, "collectors", Telemetry=Telemetry))
def test_an_invalid_collector_is_refused_by_name(options: Telemetry, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check(options, {})


def test_the_path_of_a_collector_may_be_left_out() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/otlp/?a=b") == "https://c/otlp?a=b"


def test_without_the_sdk_the_flag_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Telemetry(otlp_traces_endpoint="http://127.0.0.1:4318")
    check(options, {})
    monkeypatch.setattr(telemetry, "SDK_PACKAGES", ("opentelemetry.sdk", "no_such_package.http"))
    with pytest.raises(ValueError, match=re.escape("run `pip install penstock[otel]`")):
        check(options, {})


def test_without_tracing_no_module_of_it_is_loaded() -> None:
    code = (
        "import sys, penstock.engine.server.lifetime, penstock.router.serve;"
        "print([name for name in sys.modules if 'opentelemetry' in name or name.endswith(('.spans', '.tracing'))])"
    )
    assert printed(code) == "[]"

"""A trace through router and engine: attempts under the request, replicas' spans under the attempts."""

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.collector import PARENT, TRACE, Collector, SpanSeen, collecting, traced
from tests.support.raw_http import connect, status
from tests.support.refusals import table
from tests.support.router_fleet import mock_replicas, running_router, stub_fleet
from tests.support.router_stub import Seen, hang_up, ok, stub, whole
from tests.support.running_server import until


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def headers(flag: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "tracestate": "a=b"}


def test_a_request_is_one_trace_through_router_and_engine(collector: Collector) -> None:
    begun_ns = time.time_ns()
    with (
        mock_replicas(1, prefill_tps=20000, inter_token_s=0.005, otlp_traces_endpoint=collector.url) as (replica,),
        running_router(replica.url, telemetry=traced(collector)) as router,
    ):
        body = {"messages": [{"role": "user", "content": "hello " * 50}], "max_tokens": 4, "stream": True}
        assert router.http.post("/v1/chat/completions", json=body, headers=headers()).status_code == 200
        root = collector.one("POST /v1/chat/completions")
        attempt = collector.one("attempt")
        engine = collector.one("chat mock")
        phases = [collector.one(name) for name in ("queue", "prefill", "decode")]
    assert (root.trace_id, root.parent_id, root.state, root.kind) == (TRACE, PARENT, "a=b", 2)
    assert (attempt.parent_id, attempt.kind) == (root.span_id, 3)
    assert (engine.parent_id, engine.state, engine.kind) == (attempt.span_id, "a=b", 2)
    assert {phase.parent_id for phase in phases} == {engine.span_id}
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert (root.service, engine.service) == ("penstock-router", "penstock")
    # The clocks of two processes are set alike to within a millisecond.
    slack_ns = 1_000_000
    order = [begun_ns, root.begun_ns, attempt.begun_ns, engine.begun_ns + slack_ns]
    assert order == sorted(order)
    ends = [phases[2].ended_ns, attempt.ended_ns + slack_ns, root.ended_ns + slack_ns]  # the engine then cleans up
    assert ends == sorted(ends)
    assert root.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.request.model": "mock",
        "penstock.router.policy": "predicted-ttft",
        "penstock.router.attempts": 1,
    }
    assert attempt.attributes["server.address"] == "127.0.0.1" and attempt.attributes["server.port"] == replica.port
    assert attempt.attributes["penstock.router.outcome"] == "answered"
    assert phases[1].ended_ns - phases[1].begun_ns > 5e6  # 300 tokens and more, at 20,000 a second


def context(root: SpanSeen, attempt: SpanSeen, is_joined: bool) -> bytes:
    """The `traceparent` of an attempt; a trace that begins here also says that its id is random."""
    return f"00-{root.trace_id}-{attempt.span_id}-{'01' if is_joined else '03'}".encode()


@pytest.mark.parametrize(("given", "passes", "is_joined"), table(__file__, "contexts", TRACE=TRACE, PARENT=PARENT))
def test_a_replica_gets_one_context_which_names_the_attempt(
    collector: Collector, given: list[str], passes: str | None, is_joined: bool
) -> None:
    """Of requests that are read quickly, and of those that only the parser reads."""
    with (
        stub() as replica,
        running_router(replica.url, telemetry=traced(collector)) as router,
    ):
        body = b'{"prompt":"abc"}'
        lines = [*given, "content-type: application/json", f"content-length: {len(body)}", "x-traceparent: kept"]
        for others in ([], ["keep-alive: 5"]):
            head = ["POST /v1/completions HTTP/1.1", "host: localhost", *lines, *others, "", ""]
            with connect(router.port) as sock:
                sock.sendall("\r\n".join(head).encode() + body)
                assert status(sock.recv(4096)) == 200
        roots = {span.span_id: span for span in collector.named("POST /v1/completions", 2)}
        pairs = [(attempt, roots.pop(str(attempt.parent_id))) for attempt in collector.named("attempt", 2)]
    assert {seen.header(b"traceparent")[0] for seen in replica.seen} == {
        context(root, attempt, is_joined) for attempt, root in pairs
    }
    for seen in replica.seen:
        assert len(seen.header(b"traceparent")) == 1
        assert seen.header(b"tracestate") == ([] if passes is None else [passes.encode()])
        assert seen.header(b"x-traceparent") == [b"kept"]
    assert all((root.trace_id == TRACE) == is_joined and attempt.trace_id == root.trace_id for attempt, root in pairs)


def test_a_prompt_that_is_computed_elsewhere_has_a_span_of_its_own(collector: Collector) -> None:
    def once_asked(seen: Seen, sock: socket.socket) -> bytes:
        until(lambda: bool(prefill.seen))  # the first byte of an answer ends what the prefill replica is asked
        return whole()

    with (
        stub() as prefill,
        stub(once_asked) as decode,
        running_router(
            decode.url,
            f"{prefill.url},prefill=10.0.0.5:9100",
            prefill_threshold=16,
            tokenizes=True,
            telemetry=traced(collector),
        ) as router,
    ):
        assert router.complete("a prompt of some length " * 20).status_code == 200
        root, attempt, leg = (collector.one(name) for name in ("POST /v1/completions", "attempt", "prefill"))
    assert attempt.parent_id == leg.parent_id == root.span_id
    for replica, span in ((decode, attempt), (prefill, leg)):
        assert replica.seen[0].header(b"traceparent") == [context(root, span, False)]


def test_another_attempt_is_another_span_under_the_same_request(collector: Collector) -> None:
    with stub_fleet(hang_up, ok, telemetry=traced(collector), policy="round-robin") as (router, _):
        for _ in range(2):
            assert router.complete().status_code == 200
        roots = collector.named("POST /v1/completions", 2)
        attempts = collector.named("attempt", 3)
    retried = next(root for root in roots if root.attributes["penstock.router.attempts"] > 1)
    first, *_, second = sorted(of(attempts, retried), key=lambda span: span.begun_ns)
    assert first.is_failed and first.attributes["error.type"] == "lost"
    assert not second.is_failed and second.attributes["http.response.status_code"] == 200
    assert not retried.is_failed


def test_an_attempt_without_an_answer_has_no_status_of_an_earlier_one(collector: Collector) -> None:
    answers = iter([whole(b"{}", b"503 Service Unavailable"), None])  # busy, and then one hangs up
    replicas = 2 * [lambda seen, sock: next(answers)]
    with stub_fleet(*replicas, telemetry=traced(collector), policy="round-robin") as (router, _):
        assert router.complete().status_code == 503
        attempts = sorted(collector.named("attempt", 2), key=lambda span: span.begun_ns)
    assert [span.attributes["penstock.router.outcome"] for span in attempts] == ["busy", "lost"]
    assert "http.response.status_code" not in attempts[1].attributes
    assert attempts[1].attributes["error.type"] == "lost"


def of(spans: list[SpanSeen], parent: SpanSeen) -> list[SpanSeen]:
    return [span for span in spans if span.parent_id == parent.span_id]


def test_what_is_refused_and_who_leaves_is_seen(collector: Collector) -> None:
    with (
        mock_replicas(1, inter_token_s=0.02) as (replica,),
        running_router(replica.url, telemetry=traced(collector)) as router,
    ):
        assert router.complete(temperature=9).status_code == 400
        refused = collector.one("POST /v1/completions")
        body: dict[str, Any] = {"prompt": "abc", "max_tokens": 500, "stream": True}
        with router.http.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        left = collector.named("POST /v1/completions", 2)[1]
        attempts = collector.named("attempt", 2)
    assert refused.attributes["error.type"] == "400" and not refused.is_failed
    assert left.attributes["http.response.status_code"] == 499
    assert attempts[1].attributes["penstock.router.outcome"] == "gone" and not attempts[1].is_failed


@pytest.mark.parametrize("has_sampler", [True, False])
def test_who_is_not_recorded_here_is_not_recorded_further_on(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, has_sampler: bool
) -> None:
    if has_sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with (
        mock_replicas(1, otlp_traces_endpoint=collector.url) as (replica,),
        running_router(replica.url, telemetry=traced(collector)) as router,
    ):
        given = {} if has_sampler else headers("00")
        body = {"prompt": "abc", "max_tokens": 1}
        assert router.http.post("/v1/completions", json=body, headers=given).status_code == 200
        assert router.http.post("/v1/completions", json=body, headers=headers()).status_code == 200
        collector.one("text_completion mock")
    assert {span.trace_id for span in collector.spans} == {TRACE}
    assert len(collector.named("attempt")) == 1


def test_a_router_that_does_not_trace_passes_the_context_on(collector: Collector) -> None:
    with (
        mock_replicas(1, otlp_traces_endpoint=collector.url) as (replica,),
        running_router(replica.url) as router,
    ):
        body = {"prompt": "abc", "max_tokens": 1}
        assert router.http.post("/v1/completions", json=body, headers=headers()).status_code == 200
        assert collector.one("text_completion mock").parent_id == PARENT

"""A trace through router and engine: attempts under the request, replicas' spans under the attempts."""

import socket
import time

import pytest

from tests.support.collector import PARENT, TRACE, Collector, SpanSeen, traced
from tests.support.collector import collector as collector
from tests.support.raw_http import clients, exchange, post, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import mock_replicas, running_router, stub_fleet
from tests.support.router_stub import EVENT, STREAM, Hold, Seen, first_fails, hang_up, in_turn, ok, stub, whole
from tests.support.running_server import until


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
    assert begun_ns <= root.begun_ns <= attempt.begun_ns < attempt.ended_ns <= root.ended_ns
    assert root.attributes == dict(cases(__file__, "attributes of the span of a chat"))
    assert attempt.attributes["server.address"] == "127.0.0.1" and attempt.attributes["server.port"] == replica.port
    assert attempt.attributes["penstock.router.outcome"] == "answered"


def context(root: SpanSeen, attempt: SpanSeen, is_joined: bool) -> bytes:
    """Return the `traceparent` of an attempt; a trace that begins in the router also says that its id is random."""
    return f"00-{root.trace_id}-{attempt.span_id}-{'01' if is_joined else '03'}".encode()


@pytest.mark.parametrize(("lines", "state", "is_joined"), table(__file__, "contexts", TRACE=TRACE, PARENT=PARENT))
def test_contexts_name_the_attempt(collector: Collector, lines: list[str], state: str | None, is_joined: bool) -> None:
    headers = [line.encode() for line in (*lines, "x-traceparent: kept")]
    with stub() as replica, running_router(replica.url, telemetry=traced(collector)) as router:
        for others in ([], [b"keep-alive: 5"]):  # which only the parser reads
            assert status(exchange(router.port, post(b'{"prompt":"abc"}', *headers, *others))) == 200
        roots = {span.span_id: span for span in collector.named("POST /v1/completions", 2)}
        pairs = [(attempt, roots.pop(str(attempt.parent_id))) for attempt in collector.named("attempt", 2)]
    assert {seen.header(b"traceparent")[0] for seen in replica.seen} == {
        context(root, attempt, is_joined) for attempt, root in pairs
    }
    for seen in replica.seen:
        assert len(seen.header(b"traceparent")) == 1
        assert seen.header(b"tracestate") == ([] if state is None else [state.encode()])
        assert seen.header(b"x-traceparent") == [b"kept"]
    assert all((root.trace_id == TRACE) == is_joined and attempt.trace_id == root.trace_id for attempt, root in pairs)


def test_a_prompt_that_is_computed_elsewhere_has_a_span_of_its_own(collector: Collector) -> None:
    def answer(seen: Seen, sock: socket.socket) -> bytes:
        until(lambda: bool(prefill.seen))  # the first byte of an answer ends what the prefill replica is asked
        return whole()

    with (
        stub() as prefill,
        stub(answer) as decode,
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


def test_each_attempt_is_a_span_under_the_request_with_its_own_outcome(collector: Collector) -> None:
    busy = whole(b"{}", b"503 Service Unavailable")
    script = first_fails(lambda seen, sock: busy, hang_up, ok)
    with stub_fleet(script, script, script, telemetry=traced(collector), policy="round-robin") as (router, _):
        assert router.complete().status_code == 200
        root = collector.one("POST /v1/completions")
        attempts = sorted(collector.named("attempt", 3), key=lambda span: span.begun_ns)
    assert {span.parent_id for span in attempts} == {root.span_id} and not root.is_failed
    assert root.attributes["penstock.router.attempts"] == 3
    seen = [
        (span.attributes["penstock.router.outcome"], span.attributes.get("http.response.status_code"), span.is_failed)
        for span in attempts
    ]
    assert seen == [("busy", 503, True), ("lost", None, True), ("answered", 200, False)]
    assert attempts[1].attributes["error.type"] == "lost"


def test_a_refused_request_and_a_client_that_leaves_are_recorded(collector: Collector) -> None:
    refused, streams = whole(b"{}", b"400 Bad Request"), Hold(first=STREAM + EVENT)
    with (
        stub(in_turn(lambda seen, sock: refused, streams)) as replica,
        running_router(replica.url, telemetry=traced(collector)) as router,
    ):
        assert router.complete().status_code == 400
        first = collector.one("POST /v1/completions")
        with clients(router.port, post()) as (sock,):
            assert b"data: a" in sock.recv(4096)
        left = collector.named("POST /v1/completions", 2)[1]
        attempts = collector.named("attempt", 2)
    assert first.attributes["error.type"] == "400" and not first.is_failed
    assert left.attributes["http.response.status_code"] == 499
    assert attempts[1].attributes["penstock.router.outcome"] == "gone" and not attempts[1].is_failed


@pytest.mark.parametrize("has_sampler", [True, False])
def test_a_request_that_is_not_recorded_is_not_recorded_by_the_replica(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, has_sampler: bool
) -> None:
    if has_sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with stub() as replica, running_router(replica.url, telemetry=traced(collector)) as router:
        for fields in ({} if has_sampler else headers("00"), headers()):
            router.http.post("/v1/completions", json={"prompt": "abc"}, headers=fields)
        attempt = collector.one("attempt")
    assert {span.trace_id for span in collector.spans} == {TRACE}
    contexts = [seen.header(b"traceparent")[0] for seen in replica.seen]
    assert contexts[0][-2:] in (b"00", b"02") and contexts[1] == f"00-{TRACE}-{attempt.span_id}-01".encode()


def test_a_router_that_does_not_trace_passes_the_context_on() -> None:
    with stub() as replica, running_router(replica.url) as router:
        router.http.post("/v1/completions", json={"prompt": "abc"}, headers=headers())
    assert replica.seen[0].header(b"traceparent") == [headers()["traceparent"].encode()]
    assert replica.seen[0].header(b"tracestate") == [b"a=b"]

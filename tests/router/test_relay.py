"""Requests through the router to a replica and back."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.router.routes import PROXIED
from tests.support.raw_http import connect, exchange, post, status
from tests.support.refusals import table
from tests.support.router_fleet import MockReplica, RunningRouter, mock_fleet, mock_replicas, running_router, until
from tests.support.router_stub import EVENT, STREAM, Seen, Stub, endless, stub, whole


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[MockReplica]]:
    with mock_replicas(2) as started:
        yield started


@pytest.fixture(scope="module")
def router(replicas: list[MockReplica]) -> Iterator[RunningRouter]:
    with running_router(*(each.url for each in replicas)) as started:
        yield started


@pytest.fixture(scope="module")
def relay(backend: Stub) -> Iterator[RunningRouter]:
    """Return a router in front of the stub."""
    with running_router(backend.url) as started:
        yield started


def test_a_stream_arrives_event_by_event(router: RunningRouter) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == router.complete("abc", max_tokens=20).json()["choices"][0]["text"]


def test_many_requests_share_few_connections(relay: RunningRouter, backend: Stub) -> None:
    before = backend.num_opened
    for _ in range(20):
        assert relay.complete().status_code == 200
    assert backend.num_opened - before < 20  # probes open some too


def test_a_replicas_speed_is_learned_from_streams_that_begin_with_a_token(relay: RunningRouter, backend: Stub) -> None:
    def speed_after(answer: bytes, path: bytes = b"/v1/completions") -> float:
        backend.answer = lambda seen, sock: answer
        field = b"input" if path == b"/v1/responses" else b"prompt"
        request = post(b'{"%s":"%d%s"}' % (field, len(backend.seen), b" long" * 2000))
        exchange(relay.port, request.replace(b"/v1/completions", path))
        (view,) = relay.http.get("/replicas").json()["replicas"]
        return float(view["placement"]["prefill_tokens_per_s"])

    stream = STREAM + EVENT + b"0\r\n\r\n"
    before = speed_after(whole())
    assert speed_after(whole()) == speed_after(stream.replace(b"200 OK", b"400 Bad")) == before
    assert speed_after(stream, b"/v1/responses") == before  # other engines send response.created before the prefill
    assert speed_after(stream) != before


def test_a_chunked_body_reaches_the_replica_with_its_length(relay: RunningRouter, backend: Stub) -> None:
    body = b'{"prompt":"abc"}'
    pieces = b"5\r\n" + body[:5] + b"\r\n%x;note=1\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\ntrailer: x\r\n\r\n"
    answer = exchange(relay.port, post(pieces, b"transfer-encoding: chunked"))
    assert status(answer) == 200
    seen = backend.seen[-1]
    assert (seen.body, seen.header(b"content-length")) == (body, [b"%d" % len(body)])
    assert seen.header(b"transfer-encoding") == seen.header(b"trailer") == []


def test_pipelined_requests_are_answered_in_order(relay: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: whole(seen.body)
    bodies = [b'{"prompt":"%d"}' % index for index in range(50)]
    answer = exchange(relay.port, b"".join(post(body, close=body == bodies[-1]) for body in bodies))
    assert [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == bodies


def test_a_client_of_http_1_0_gets_an_answer_without_chunks(router: RunningRouter) -> None:
    body = b'{"prompt":"abc","max_tokens":3,"stream":true}'
    request = post(body, close=False).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, events = exchange(router.port, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: ") and events.endswith(b"data: [DONE]\n\n")


def test_the_headers_of_a_connection_and_private_ones_end_at_the_router(relay: RunningRouter, backend: Stub) -> None:
    replicas = (b"connection: x-inner", b"x-inner: 1", b"x-outer: 2", b"x-penstock-cached-tokens: 7")
    backend.answer = lambda seen, sock: whole(b"{}", b"200 OK", *replicas)
    headers = (b"Connection: X-Mine, close", b"x-mine: 1", b"te: trailers", b"upgrade-insecure-requests: 1")
    request = post(b'{"prompt":"abc"}', *headers, b"x-penstock-forged: 1", close=False)
    answer = exchange(relay.port, request.replace(b"host: localhost", b"host: other.localhost"))
    assert backend.seen[-1].header(b"host") == [backend.url.removeprefix("http://").encode()]
    names = {name for name, _ in backend.seen[-1].headers}
    assert not names & {b"connection", b"x-mine", b"te", b"x-penstock-forged"}
    assert b"upgrade-insecure-requests" in names
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"x-outer: 2" in head and b"x-inner" not in head and b"x-penstock" not in head


@pytest.mark.parametrize("body", [b'{ "error":{"message":"no","odd":1} }', b'{"detail":"why"}', b"x" * 300_000])
def test_an_engines_error_passes_byte_by_byte(relay: RunningRouter, backend: Stub, body: bytes) -> None:
    backend.answer = lambda seen, sock: whole(body, b"422 Oh", b"content-type: application/problem+json")
    answer = relay.complete()
    assert (answer.status_code, answer.content) == (422, body)
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_answer_without_a_length_ends_with_the_connection(relay: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nabc")
    answer = exchange(relay.port, post(close=False))
    assert answer.endswith(b"\r\n\r\nabc") and b"connection: close" in answer


def test_bytes_behind_the_end_of_an_answer_reach_no_client(relay: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: whole(b"first") + whole(b"for another client")
    answer = exchange(relay.port, post())
    assert b"another client" not in answer


def test_the_engine_aborts_the_request_of_a_client_that_leaves() -> None:
    with mock_fleet(1, inter_token_s=0.02) as (router, (slow,)):
        body = b'{"prompt":"abc","max_tokens":5000,"stream":true,"ignore_eos":true}'
        for stream in (True, False):
            with connect(router.port) as sock:
                sock.sendall(post(body if stream else body.replace(b"true", b"false", 1)))
                until(lambda: slow.metric("vllm:num_requests_running") == 1)
            until(lambda: slow.metric("vllm:num_requests_running") == 0)
        assert slow.metric('vllm:request_success_total{finished_reason="abort"') == 2
        assert router.app.metrics.counts["client_gone",] == 2
        until(lambda: not router.app.exchanges)


def buffered(router: RunningRouter) -> int:
    return sum(each.transport.get_write_buffer_size() for each in router.app.edge.connections)


def test_a_slow_reader_slows_the_replica(relay: RunningRouter, backend: Stub) -> None:
    is_stuck = threading.Event()

    def stream(seen: Seen, sock: socket.socket) -> None:
        sock.settimeout(0.5)
        with contextlib.suppress(TimeoutError):
            endless(seen, sock)
        is_stuck.set()

    backend.answer = stream
    with connect(relay.port, receive_buffer=4096) as sock:
        sock.sendall(post())
        assert is_stuck.wait(60)
        # The replica stands still; what is in flight lies in kernel buffers, and here one read and the high-water mark.
        assert buffered(relay) <= 512 * 1024


def test_a_client_that_does_not_read_waits_for_its_next_answers() -> None:
    large = b"x" * 200_000
    with (
        stub(lambda seen, sock: whole(large)) as replica,
        running_router(replica.url) as router,
        connect(router.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(post(close=False) * 50)
        until(lambda: buffered(router) > 0)
        (connection,) = router.app.edge.connections
        for _ in range(50):  # a router that does not wait would read more answers meanwhile
            assert router.complete().status_code == 200
        assert buffered(router) < 1_000_000
        assert sum(seen.body == b'{"prompt":"abc"}' for seen in replica.seen) < 40
        assert not router.app.edge.is_written  # a drain waits for it
        data = bytearray()
        while len(data) < 50 * len(large) or not data.endswith(large):
            more = sock.recv(1 << 20)
            assert more, data[:200]
            data += more
        assert data.count(b"HTTP/1.1 200") == 50
        until(lambda: router.app.edge.is_written)
        assert connection.deadline_s < float("inf"), "an idle connection is closed some time"


def test_every_route_of_an_engine_is_passed_on(relay: RunningRouter, backend: Stub) -> None:
    for path in sorted(PROXIED):
        assert relay.http.post(path, json={"model": "m"}).status_code == 200
        assert backend.seen[-1].line == b"POST %s HTTP/1.1" % path.encode()
    for method, path, expected in table(__file__, "agents"):
        assert relay.http.request(method, path).status_code == expected, path
    metrics = relay.http.get("/metrics").text
    assert '"/v1/responses/"' in metrics and "resp_x" not in metrics


def test_the_list_of_models_serves_clients_of_both_apis(relay: RunningRouter) -> None:
    models = relay.http.get("/v1/models").json()
    (model,) = models["data"]
    assert (models["has_more"], models["first_id"], model["type"]) == (False, model["id"], "model")

"""Requests through the router to a replica and back."""

import json
import socket
from collections.abc import Iterator

import pytest

from tests.support.raw_http import connect, exchange, post, status
from tests.support.refusals import table
from tests.support.router_fleet import MockReplica, RunningRouter, mock_fleet, mock_replicas, running_router, until
from tests.support.router_stub import EVENT, STREAM, Seen, Stub, whole


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[MockReplica]]:
    with mock_replicas(2) as started:
        yield started


@pytest.fixture(scope="module")
def router(replicas: list[MockReplica]) -> Iterator[RunningRouter]:
    with running_router(*(each.url for each in replicas)) as started:
        yield started


@pytest.fixture(scope="module")
def before(backend: Stub) -> Iterator[RunningRouter]:
    """A router before the stub."""
    with running_router(backend.url) as started:
        yield started


def test_a_stream_arrives_event_by_event(router: RunningRouter) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "temperature": 0, "stream": True}
    with router.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1])
    assert text == router.complete("abc", max_tokens=20).json()["choices"][0]["text"]


def test_many_requests_share_few_connections(router: RunningRouter, replicas: list[MockReplica]) -> None:
    for _ in range(20):
        assert router.complete().status_code == 200
    assert all(len(replica.pool._idle) <= 2 for replica in router.fleet.replicas.values())


def test_the_speed_of_a_replica_is_learned_from_streams_that_begin_with_a_token(
    before: RunningRouter, backend: Stub
) -> None:
    def speed_after(answer: bytes, path: bytes = b"/v1/completions") -> float:
        backend.answer = lambda seen, sock: answer
        field = b"input" if path == b"/v1/responses" else b"prompt"
        request = post(b'{"%s":"%d%s"}' % (field, len(backend.seen), b" long" * 2000))
        exchange(before.port, request.replace(b"/v1/completions", path))
        (view,) = before.http.get("/replicas").json()["replicas"]
        return float(view["placement"]["prefill_tokens_per_s"])

    stream = STREAM + EVENT + b"0\r\n\r\n"
    known = speed_after(whole())
    assert speed_after(whole()) == speed_after(stream.replace(b"200 OK", b"400 Bad")) == known
    assert speed_after(stream, b"/v1/responses") == known  # other engines send response.created before the prefill
    assert speed_after(stream) != known


def test_a_chunked_body_reaches_the_replica_with_its_length(before: RunningRouter, backend: Stub) -> None:
    body = b'{"prompt":"abc"}'
    pieces = b"5\r\n" + body[:5] + b"\r\n%x;note=1\r\n" % len(body[5:]) + body[5:] + b"\r\n0\r\ntrailer: x\r\n\r\n"
    answer = exchange(before.port, post(pieces, b"transfer-encoding: chunked"))
    assert status(answer) == 200
    seen = backend.seen[-1]
    assert (seen.body, seen.header(b"content-length")) == (body, [b"%d" % len(body)])
    assert seen.header(b"transfer-encoding") == seen.header(b"trailer") == []


def test_pipelined_requests_are_answered_in_order(before: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: whole(seen.body)
    bodies = [b'{"prompt":"%d"}' % index for index in range(50)]
    answer = exchange(before.port, b"".join(post(body, close=body == bodies[-1]) for body in bodies))
    assert [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == bodies


def test_a_client_of_http_1_0_gets_an_answer_without_chunks(router: RunningRouter) -> None:
    body = b'{"prompt":"abc","max_tokens":3,"stream":true}'
    request = post(body, close=False).replace(b"HTTP/1.1", b"HTTP/1.0")
    head, _, events = exchange(router.port, request).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert events.startswith(b"data: ") and events.endswith(b"data: [DONE]\n\n")


def test_hop_by_hop_and_private_headers_end_at_the_router_in_both_directions(
    before: RunningRouter, backend: Stub
) -> None:
    backend.answer = lambda seen, sock: whole(
        b"{}", b"200 OK", b"connection: x-inner", b"x-inner: 1", b"x-outer: 2", b"x-penstock-cached-tokens: 7"
    )
    headers = (b"Connection: X-Mine, close", b"x-mine: 1", b"te: trailers", b"upgrade-insecure-requests: 1")
    asked = post(b'{"prompt":"abc"}', *headers, b"x-penstock-forged: 1", close=False)
    answer = exchange(before.port, asked.replace(b"host: localhost", b"host: other.localhost"))
    assert backend.seen[-1].header(b"host") == [backend.url.removeprefix("http://").encode()]
    names = {name for name, _ in backend.seen[-1].headers}
    assert not names & {b"connection", b"x-mine", b"te", b"x-penstock-forged"}
    assert b"upgrade-insecure-requests" in names
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"x-outer: 2" in head and b"x-inner" not in head and b"x-penstock" not in head


@pytest.mark.parametrize("body", [b'{ "error":{"message":"no","odd":1} }', b'{"detail":"why"}', b"x" * 300_000])
def test_an_engines_error_passes_byte_by_byte(before: RunningRouter, backend: Stub, body: bytes) -> None:
    backend.answer = lambda seen, sock: whole(body, b"422 Oh", b"content-type: application/problem+json")
    answer = before.complete()
    assert (answer.status_code, answer.content) == (422, body)
    assert answer.headers["content-type"] == "application/problem+json"


def test_without_a_length_the_answer_ends_with_the_connection(before: RunningRouter, backend: Stub) -> None:
    def unframed(seen: Seen, sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nabc")

    backend.answer = unframed
    answer = exchange(before.port, post(close=False))
    assert answer.endswith(b"\r\n\r\nabc") and b"connection: close" in answer


def test_bytes_beyond_the_end_of_an_answer_reach_nobody(before: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: whole(b"first") + whole(b"for another client")
    answer = exchange(before.port, post())
    assert b"another client" not in answer


def test_when_a_client_leaves_the_engine_aborts() -> None:
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


def test_a_slow_reader_slows_the_replica_and_not_the_routers_memory(before: RunningRouter, backend: Stub) -> None:
    sent = []

    def endless(seen: Seen, sock: socket.socket) -> None:
        sock.settimeout(0.5)
        sock.sendall(STREAM)
        try:
            while True:
                sock.sendall(b"2710\r\n" + b"x" * 10000 + b"\r\n")
                sent.append(10000)
        except TimeoutError:
            sent.append(0)

    backend.answer = endless
    with connect(before.port, receive_buffer=4096) as sock:
        sock.sendall(post())
        until(lambda: bool(sent) and sent[-1] == 0)
        held = next(iter(before.app.edge.connections)).transport.get_write_buffer_size()
        # The replica stands still; what is in flight lies in kernel buffers, and here one read and the high-water mark.
        assert held <= 512 * 1024


def test_agents_apis_pass_through_whatever_their_method(router: RunningRouter) -> None:
    asked = {"input": "Hi", "max_output_tokens": 4}
    assert router.http.post("/v1/responses", json=asked).json()["usage"]["output_tokens"] == 4
    with router.http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as answer:
        names = [line for line in answer.iter_lines() if line.startswith("event: ")]
    assert names[0] == "event: response.created" and names[-1] == "event: response.incomplete"
    block = {"max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    headers = {"x-api-key": "k", "anthropic-version": "2023-06-01"}
    assert router.http.post("/v1/messages", json=block, headers=headers).json()["stop_reason"] == "max_tokens"
    assert (
        router.http.post("/v1/messages/count_tokens", json={"messages": block["messages"]}).json()["input_tokens"] > 2
    )
    assert router.http.post("/v1/responses/input_tokens", json={"input": "Hi"}).json()["input_tokens"] > 2
    assert "not compacted here" in router.http.post("/v1/responses/compact", json={"input": "Hi"}).text
    listed = router.http.get("/v1/models").json()
    (model,) = listed["data"]
    assert (listed["has_more"], listed["first_id"], model["type"]) == (False, model["id"], "model")
    for method, path, expected in table(__file__, "agents"):
        assert router.http.request(method, path).status_code == expected, path
    text = router.http.get("/metrics").text
    assert '"/v1/responses/"' in text and "resp_x" not in text

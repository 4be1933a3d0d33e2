"""Requests through the router to a replica and back, and the memory that they take. The keys that replicas get and that change the
fleet; tests/test_edges.py sends every route a wrong key."""

import contextlib
import gc
import re
import socket
import threading
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from penstock.router.exchange import Exchange
from penstock.router.fleet.fleet import Fleet
from penstock.router.routes import PROXIED
from tests.support.raw_http import clients, connect, exchange, post, read_all, status
from tests.support.refusals import cases, table
from tests.support.router_fleet import ADMIN, QUICK, RunningRouter, mock_fleet, running_router, until
from tests.support.router_stub import EVENT, STREAM, Hold, Seen, Stub, endless, stub, whole

LARGE = 100_000


@pytest.fixture(scope="module")
def relay(backend: Stub) -> Iterator[RunningRouter]:
    """Return a router in front of the stub."""
    with running_router(backend.url) as started:
        yield started


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


def test_a_client_of_http_1_0_gets_an_answer_without_chunks(relay: RunningRouter, backend: Stub) -> None:
    backend.answer = stream = Hold(EVENT + b"0\r\n\r\n", first=STREAM + EVENT)
    with clients(relay.port, post(close=False).replace(b"HTTP/1.1", b"HTTP/1.0")) as (sock,):
        answer = sock.recv(65536)
        stream.go.set()
        head, _, events = (answer + read_all(sock)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower() and events == 2 * b"data: a\n\n"


def test_the_headers_of_a_connection_and_private_ones_end_at_the_router(relay: RunningRouter, backend: Stub) -> None:
    replicas = (b"connection: x-inner", b"x-inner: 1", b"x-outer: 2", b"x-penstock-cached-tokens: 7")
    backend.answer = lambda seen, sock: whole(b"{}", b"200 OK", *replicas)
    offer = (
        b"Connection: X-Mine, Upgrade, HTTP2-Settings, close",
        b"Upgrade: h2c",
        b"http2-settings: AAMAAABkAAQCAAAA",
    )
    others = (b"x-mine: 1", b"te: trailers", b"upgrade-insecure-requests: 1", b"x-penstock-forged: 1")
    request = post(b'{"prompt":"abc"}', *offer, *others, close=False)
    answer = exchange(relay.port, request.replace(b"host: localhost", b"host: other.localhost"))
    assert backend.seen[-1].header(b"host") == [backend.url.removeprefix("http://").encode()]
    names = {name for name, _ in backend.seen[-1].headers}
    assert not names & {b"connection", b"x-mine", b"te", b"x-penstock-forged", b"upgrade", b"http2-settings"}
    assert b"upgrade-insecure-requests" in names and backend.seen[-1].body == b'{"prompt":"abc"}'
    head = answer.partition(b"\r\n\r\n")[0].lower()
    assert b"x-outer: 2" in head and b"x-inner" not in head and b"x-penstock" not in head


@pytest.mark.parametrize("body", [b'{ "error":{"message":"no","odd":1} }', b'{"detail":"why"}', b"x" * 300_000])
def test_an_engines_error_passes_byte_by_byte(relay: RunningRouter, backend: Stub, body: bytes) -> None:
    backend.answer = lambda seen, sock: whole(body, b"422 Oh", b"content-type: application/problem+json")
    answer = relay.complete()
    assert (answer.status_code, answer.content) == (422, body)
    assert answer.headers["content-type"] == "application/problem+json"


def test_an_answer_ends_with_its_length_or_without_one_with_the_connection(relay: RunningRouter, backend: Stub) -> None:
    backend.answer = lambda seen, sock: sock.sendall(b"HTTP/1.1 200 OK\r\n\r\nabc")
    answer = exchange(relay.port, post(close=False))
    assert answer.endswith(b"\r\n\r\nabc") and b"connection: close" in answer
    backend.answer = lambda seen, sock: whole(b"first") + whole(b"for another client")
    assert b"another client" not in exchange(relay.port, post())


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


@pytest.mark.parametrize("is_head", [False, True])
def test_a_client_that_does_not_read_waits_for_its_next_answers(is_head: bool) -> None:
    """Its answers' bodies or heads are large. Other clients do not wait, nor do the probes."""
    large = b"x" * (60_000 if is_head else 200_000)
    answer, count = (whole(b"", b"200 OK", b"x: " + large), 170) if is_head else (whole(large), 50)
    with (
        stub(lambda seen, sock: answer) as replica,
        running_router(replica.url, timeouts=replace(QUICK, probe_interval_s=60.0)) as router,
        connect(router.port, receive_buffer=4096) as sock,
    ):
        sock.sendall(post(close=False) * count)
        until(lambda: buffered(router) > 0)
        (connection,) = router.app.edge.connections
        for _ in range(50):  # a router that does not wait would read more answers meanwhile
            assert router.complete().status_code == 200
        assert buffered(router) < 1_000_000
        assert sum(seen.body == b'{"prompt":"abc"}' for seen in replica.seen) < 0.8 * count
        assert not router.app.edge.is_written  # a drain waits for it
        data = bytearray()
        while len(data) < count * len(large) or not data.endswith(answer[-100:]):
            more = sock.recv(1 << 20)
            assert more, data[:200]
            data += more
        assert data.count(b"HTTP/1.1 200") == count
        until(lambda: router.app.edge.is_written)
        assert connection.deadline_s < float("inf"), "an idle connection is closed some time"


def test_every_route_of_an_engine_is_passed_on(relay: RunningRouter, backend: Stub) -> None:
    for path in sorted(PROXIED):
        assert relay.http.post(path, json={"model": "m"}).status_code == 200
        assert backend.seen[-1].line == b"POST %s HTTP/1.1" % path.encode()
    assert relay.http.post("/v1/nowhere", json={"model": "m"}).status_code == 404
    for method, path, expected in table(__file__, "agents"):
        assert relay.http.request(method, path).status_code == expected, path
    metrics = relay.http.get("/metrics").text
    assert '"/v1/responses/"' in metrics and "resp_x" not in metrics
    first_bytes = re.search(r"^penstock:router_first_byte_seconds_count (\S+)$", metrics, re.MULTILINE)
    assert first_bytes is not None and float(first_bytes[1]) >= len(PROXIED)


def test_the_list_of_models_serves_clients_of_both_apis(relay: RunningRouter) -> None:
    models = relay.http.get("/v1/models").json()
    (model,) = models["data"]
    assert relay.http.get("/v1/models/m").json() == relay.http.get("/v1/models/%6d").json() == model
    assert relay.http.get("/v1/models/other").status_code == 404
    assert (models["has_more"], models["first_id"], model["type"]) == (False, model["id"], "model")


def large_values(router: RunningRouter, exchange: Exchange) -> list[int]:
    """Return the sizes of all large strings of bytes that the exchange keeps alive, however indirectly."""
    seen: set[int] = {id(each) for each in (router.app, router.app.exchanges, router.app.edge, router.app.prompts)}
    sizes, waiting = [], [exchange]
    while waiting:
        each: Any = waiting.pop()
        if id(each) in seen or isinstance(each, (types.ModuleType, types.FunctionType, type, Fleet)):
            continue
        seen.add(id(each))
        if isinstance(each, (bytes, bytearray)) and len(each) >= LARGE:
            sizes.append(len(each))
        if not isinstance(each, types.FrameType):
            waiting += gc.get_referents(each)
    return sizes


@pytest.mark.parametrize(("tokenizes", "is_split"), [(False, False), (True, True)])
def test_a_body_is_dropped_at_the_first_byte_of_its_answer(tokenizes: bool, is_split: bool) -> None:
    may_answer, may_end = Hold(answer=None), Hold(b"0\r\n\r\n", first=STREAM + EVENT)

    def stream(seen: Seen, sock: socket.socket) -> bytes | None:
        may_answer(seen, sock)
        return may_end(seen, sock)

    with stub(stream) as backend, stub(stream) as prefill:
        prefills = (f"{prefill.url},prefill=10.0.0.5:9100",) if is_split else ()
        body = b'{"stream":true,"prompt":"' + b"abcd " * LARGE + b'"}'
        with (
            running_router(backend.url, *prefills, tokenizes=tokenizes) as router,
            clients(router.port, post(body)) as (sock,),
        ):
            until(lambda: bool(backend.seen))
            (exchange,) = router.app.exchanges
            assert router.call(lambda: large_values(router, exchange))
            may_answer.go.set()
            assert b"data: a" in sock.recv(65536)
            assert router.call(lambda: large_values(router, exchange)) == []
            may_end.go.set()


KEY, BACKEND = "sk-client", "sk-backend"
WITH_KEY, WITH_ADMIN = ({"authorization": f"Bearer {key}"} for key in (KEY, ADMIN))


@pytest.fixture(scope="module")
def router(backend: Stub) -> Iterator[RunningRouter]:
    with running_router(
        backend.url, api_keys=(KEY, "sk-other"), admin_api_keys=(ADMIN,), backend_api_key=BACKEND
    ) as started:
        yield started


@pytest.mark.parametrize(("key", "settings", "expected"), cases(__file__, "keys of replicas", KEY=KEY, BACKEND=BACKEND))
def test_a_replica_gets_the_right_key(key: str, settings: dict[str, Any], expected: list[bytes], backend: Stub) -> None:
    with running_router(backend.url, **settings) as router:
        router.http.post("/v1/completions", json={"prompt": "a"}, headers=WITH_KEY)
    assert backend.seen[-1].header(b"authorization") == expected


def test_only_the_admin_key_changes_the_fleet(router: RunningRouter, backend: Stub) -> None:
    with stub() as other:
        for method in ("POST", "DELETE"):
            for headers, expected in (({}, 401), (WITH_KEY, 403)):
                answer = router.http.request(method, "/replicas", json={"url": other.url}, headers=headers)
                assert answer.status_code == expected
        assert router.change("POST", url=other.url).status_code == 200
        until(lambda: router.states() == ["up", "up"])
        assert router.change("POST", url=other.url).status_code == 400  # it is there
        assert router.change("DELETE", url=other.url).status_code == 200
        until(lambda: list(router.fleet.replicas) == [backend.url])
        assert router.change("DELETE", url=other.url).status_code == 404
    assert router.http.get("/v1/models", headers=WITH_ADMIN).status_code == 401  # it opens nothing else

    with running_router(backend.url) as plain:  # without an admin key, nobody does
        answer = plain.change("POST", url="http://127.0.0.1:1")
    assert answer.status_code == 403 and "--admin-api-key" in answer.text


def test_no_answer_or_metric_contains_a_key(router: RunningRouter) -> None:
    answers = [router.http.get(path, headers=WITH_KEY) for path in ("/metrics", "/replicas", "/version")]
    texts = [f"{answer.headers} {answer.text}" for answer in answers]
    assert not any(key in text for key in (KEY, ADMIN, BACKEND) for text in texts)

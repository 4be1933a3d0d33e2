"""The quick reader of plain messages against the parsers that read all others: it may only accept what they accept."""

import asyncio
import random
from collections.abc import Callable
from typing import cast

import pytest

from penstock.engine.http.limits import Limits
from penstock.router.http.edge import ClientConnection, Edge
from penstock.router.http.heads import AnswerHead, ClientRequest, Heads
from penstock.router.http.upstream import Pool, Upstream
from tests.support.raw_http import mangled

BODY = b'{"prompt":"abc"}'
REQUEST = (
    b"POST /v1/completions?x=1 HTTP/1.1\r\nHost: a\r\nUser-Agent: b/1 (c)\r\nAccept: */*\r\nContent-Type: application/json\r\n"
    b"Authorization: Bearer sk-1\r\nX-Session-Id: s\r\nConnection: keep-alive\r\nContent-Length: 16\r\n\r\n" + BODY
)
ANSWER = (
    b"HTTP/1.1 200 OK\r\nDate: x\r\nContent-Type: application/json\r\nX-Penstock-Cached-Tokens: 12\r\nX-Request-Id: \xe9y\r\n"
    b"content-length: 16\r\n\r\n" + BODY
)
PIECES = [
    *(b"\r\n", b"\n", b"\r", b" ", b"\t", b"\x00", b"0", b";", b":", b",", b"#", b"?", b"\x7f", b"\xff", b"(", b"\r\n\r\n"),
    *(b"content-length: 5\r\n", b"Content-Length: 16\r\n", b"transfer-encoding: chunked\r\n", b"te: trailers\r\n", b"host: b\r\n"),
    *(b"connection: close\r\n", b"Connection: Keep-Alive\r\n", b"connection: x-a\r\nx-a: b\r\n", b"expect: 100-continue\r\n"),
    *(b"x-penstock-report: 1\r\n", b"x: \r\n", b"x:y\r\n", b"x : y\r\n", b"x: y \r\n", b" x: y\r\n", b"keep-alive: 5\r\n", b"X-A: b\r\n"),
    *(b"upgrade: h2c\r\n", b"proxy-authorization: a\r\n", b"trailer: a\r\n", b"Authorization: Bearer sk-2\r\n"),
]  # fmt: skip


class Transport:
    """Takes every call without an effect."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class NotPlain(Heads):
    """Leaves everything to the parser."""

    def request(self, data: bytes) -> None:
        return None

    def answer(self, data: bytes) -> None:
        return None


class AnswerSink:
    def __init__(self) -> None:
        self.is_over = False
        self.body = b""
        self.received: AnswerHead

    def head(self, head: AnswerHead) -> None:
        self.received = head

    def data(self, data: bytes) -> None:
        self.body += data

    def ended(self) -> None:
        self.is_over = True

    def lost(self, reason: str) -> None:
        pass


def by_the_parser(data: bytes, limits: Limits) -> list[ClientRequest]:
    requests: list[ClientRequest] = []
    edge = Edge(limits, lambda request: None, lambda request, connection: requests.append(request))
    edge.heads = NotPlain(1, 0)
    connection = ClientConnection(edge)
    connection.connection_made(cast(asyncio.Transport, Transport()))
    connection.data_received(data)
    return requests


def answer_by_the_parser(data: bytes) -> AnswerSink:
    pool, sink = Pool("x", 1, b"x:1", 1.0), AnswerSink()
    pool.heads = NotPlain(1, 0)
    upstream = Upstream(pool)
    upstream.connection_made(cast(asyncio.Transport, Transport()))
    upstream.send(b"", b"", sink)
    upstream.data_received(data)
    sink.is_over &= pool.take_idle() is upstream  # it is kept for other requests
    return sink


@pytest.mark.parametrize("count", [20_000, pytest.param(500_000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("original", [REQUEST, ANSWER], ids=["request", "answer"])
def test_the_quick_reader_reads_as_the_parser_does(original: bytes, count: int) -> None:
    rng, limits = random.Random(count), Limits(max_header_bytes=8192, max_body_bytes=1000)
    heads = Heads(limits.max_header_bytes, limits.max_body_bytes)
    num_plain = 0
    for _ in range(count):
        data = mangled(rng, original, PIECES)
        if original is REQUEST and (request := heads.request(data)) is not None:
            num_plain += 1
            assert [request] == by_the_parser(data, limits), data
        if original is ANSWER and (answer := heads.answer(data)) is not None:
            num_plain += 1
            slow = answer_by_the_parser(data)
            assert slow.is_over and answer == (slow.received, slow.body), data
    assert num_plain > count / 20


def test_plain_messages_are_read_whole() -> None:
    heads = Heads(8192, 1000)
    request = heads.request(REQUEST)
    assert request is not None
    assert (request.path, request.body, request.session) == ("/v1/completions", BODY, b"s")
    assert request.authorization == [b"Bearer sk-1"] and request.content_type == b"application/json"
    assert request.lines == b"user-agent: b/1 (c)\r\naccept: */*\r\nx-session-id: s\r\n"
    head = AnswerHead(
        200, b"date: x\r\ncontent-type: application/json\r\nx-request-id: \xe9y\r\ncontent-length: 16\r\n", 12
    )
    assert heads.answer(ANSWER) == (head, BODY)
    traced = heads.request(REQUEST.replace(b"Accept", b"Traceparent: 00-a\r\ntracestate: b=c\r\nAccept"))
    assert traced is not None and b"traceparent: 00-a\r\ntracestate: b=c\r\n" in traced.lines


def test_a_part_of_a_message_is_not_plain() -> None:
    heads = Heads(8192, 1000)
    assert [size for size in range(len(REQUEST)) if heads.request(REQUEST[:size]) is not None] == []
    assert [size for size in range(len(ANSWER)) if heads.answer(ANSWER[:size]) is not None] == []


def test_heads_and_bodies_beyond_the_limits_are_left_to_the_parser() -> None:
    assert Heads(len(REQUEST) - len(BODY), len(BODY)).request(REQUEST) is not None
    assert Heads(len(REQUEST) - len(BODY) - 1, len(BODY)).request(REQUEST) is None
    assert Heads(len(REQUEST) - len(BODY), len(BODY) - 1).request(REQUEST) is None


@pytest.mark.parametrize(("value", "expected"), [(b"12", 12), (b"9" * 5000, None), (b"-1", None), (b"x", None)])
def test_an_invalid_count_of_cached_tokens_is_left_out(value: bytes, expected: int | None) -> None:
    answer = Heads(8192, 1000).answer(ANSWER.replace(b"Tokens: 12", b"Tokens: " + value))
    assert answer is not None and answer[0].cached_tokens == expected
    assert AnswerHead.of(200, [(b"x-penstock-cached-tokens", value)]).cached_tokens == expected

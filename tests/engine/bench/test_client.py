"""The load generator's HTTP client against a real socket."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.prove.http_client import Client, Events, Target
from tests.support.bench_endpoint import completion, endpoint
from tests.support.refusals import cases
from tests.support.router_stub import Answer, Seen, Stub

STREAM = b': ping\n\ndata: {"a": "\xc3\xa9"}\n\ndata:{"b": 2}\n\nevent: x\ndata: one\ndata: two\n\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": "\xc3\xa9"}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


@pytest.mark.parametrize("stream", [STREAM, STREAM.replace(b"\n", b"\r\n")], ids=["LF", "CRLF"])
def test_events_are_whole_wherever_the_stream_is_cut(stream: bytes) -> None:
    for cut in range(len(stream)):
        events = Events()
        assert events.feed(stream[:cut]) + events.feed(stream[cut:]) == PAYLOADS, cut
    events = Events()
    assert [payload for byte in stream for payload in events.feed(bytes([byte]))] == PAYLOADS


@contextlib.asynccontextmanager
async def connected(answer: Answer) -> AsyncIterator[tuple[Client, Stub]]:
    with endpoint(answer) as server:
        client = Client(Target.of(server.url))
        yield client, server
        client.close()


def sending(data: bytes, close: bool = False) -> Answer:
    def answer(seen: Seen, sock: socket.socket) -> bytes | None:
        sock.sendall(data)
        return None if close else b""

    return answer


async def complete(client: Client) -> Outcome:
    outcome = Outcome(1, 0.0)
    request = client.target.request("POST", "/v1/completions", b'{"max_tokens": 3}', {})
    outcome.finish(await client.exchange(request, outcome.take))
    return outcome


async def test_an_answer_cut_anywhere_in_two_is_read_whole() -> None:
    data = completion(num_tokens=2)
    cuts = iter(range(1, len(data)))

    def halves(seen: Seen, sock: socket.socket) -> bytes:
        cut = next(cuts)
        sock.sendall(data[:cut])
        time.sleep(0.0005)
        return data[cut:]

    async with connected(halves) as (client, server):
        for _ in range(len(data) - 1):
            assert (await complete(client)).text == " t0 t1"
        assert server.num_opened == 1


async def test_a_reused_connection_that_ends_without_an_answer_is_tried_once_more() -> None:
    answers = iter([sending(completion(1)), sending(b"", close=True), sending(completion(1))])
    half = sending(completion(3)[:200], close=True)
    async with connected(lambda *request: next(answers, half)(*request)) as (client, server):
        for num_requests in (1, 3):
            assert (await complete(client)).error == "" and len(server.seen) == num_requests
        with pytest.raises(ConnectionError, match="in the middle of the answer"):
            await complete(client)
        assert len(server.seen) == 4


@pytest.mark.parametrize(("data", "closes", "message"), cases(__file__, "no answers", HALF=completion(3)[:200]))
async def test_an_incomplete_or_foreign_answer_is_an_error(data: bytes, closes: bool, message: str) -> None:
    async with connected(sending(data, closes)) as (client, _):
        with pytest.raises(ConnectionError, match=message):
            await complete(client)


@pytest.mark.parametrize(("length", "closes"), [(b"", True), (b"Content-Length: 2\r\n", False)])
async def test_no_second_request_follows_on_a_connection_that_the_server_closes(length: bytes, closes: bool) -> None:
    """Without a length, the answer ends with its connection."""
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n"
    async with connected(sending(head + b"ok", closes)) as (client, server):
        for num_opened in (1, 2):
            assert await client.fetch("GET", "/x") == (200, b"ok") and server.num_opened == num_opened


def test_a_base_url_gives_host_port_and_prefix() -> None:
    assert Target.of("http://example:81/up/")[:3] == ("example", 81, "/up")
    assert Target.of("http://example")[1] == 80
    assert Target.of("https://example")[1] == 443 and Target.of("https://example").tls is not None
    request = Target.of("http://[::1]:81/up").request("GET", "/v1/models", b"", {})
    assert b"GET /up/v1/models HTTP/1.1\r\nHost: [::1]:81\r\n" in request
    for url in ("localhost:8000", "ftp://x", "http://", ""):
        with pytest.raises(ValueError, match="is not a URL"):
            Target.of(url)

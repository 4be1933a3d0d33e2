"""The load generator's HTTP client against a real socket."""

import contextlib
import socket
import time
from collections.abc import AsyncIterator

import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.prove.http_client import Client, Target
from tests.support.bench_endpoint import completion, endpoint
from tests.support.router_stub import Answer, Seen, Stub


@contextlib.asynccontextmanager
async def asking(answer: Answer) -> AsyncIterator[tuple[Client, Stub]]:
    with endpoint(answer) as server:
        client = Client(Target.of(server.url))
        yield client, server
        client.close()


def saying(data: bytes, close: bool = False) -> Answer:
    def answer(seen: Seen, sock: socket.socket) -> bytes | None:
        sock.sendall(data)
        return None if close else b""

    return answer


async def complete(client: Client) -> Outcome:
    outcome = Outcome(1, 0.0)
    request = client.target.request("POST", "/v1/completions", b'{"max_tokens": 3}', {"X-Id": "7"})
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

    async with asking(halves) as (client, server):
        for _ in range(len(data) - 1):
            assert (await complete(client)).text == " t0 t1"
        assert server.num_opened == 1


async def test_a_reused_connection_that_ends_without_an_answer_is_tried_once_more() -> None:
    answers = iter([completion(1), None, completion(1)])
    async with asking(lambda *_: next(answers)) as (client, server):
        await complete(client)
        assert (await complete(client)).error == ""
        assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("said", "closes", "message"),
    [
        (b"", True, "closed without an answer"),
        (completion(3)[:200], True, "in the middle of the answer"),
        (b"220 smtp ready\r\n", False, "not HTTP"),
    ],
    ids=["nothing", "half", "another protocol"],
)
async def test_what_is_no_whole_answer_of_http_is_an_error(said: bytes, closes: bool, message: str) -> None:
    async with asking(saying(said, closes)) as (client, _):
        with pytest.raises(ConnectionError, match=message):
            await complete(client)


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async with asking(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it", close=True)) as (client, _):
        assert await client.fetch("GET", "/x") == (200, b"all of it")


async def test_a_server_that_asks_to_close_is_not_asked_again_on_that_connection() -> None:
    async with asking(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")) as (
        client,
        server,
    ):
        for _ in range(2):
            assert await client.fetch("GET", "/x") == (200, b"ok")
        assert server.num_opened == 2


def test_a_base_url_gives_host_port_and_prefix() -> None:
    assert Target.of("http://example:81/up/")[:3] == ("example", 81, "/up")
    assert Target.of("http://example")[1] == 80
    assert Target.of("https://example")[1] == 443 and Target.of("https://example").tls is not None
    assert b"GET /up/v1/models HTTP/1.1\r\nHost: [::1]:81\r\n" in Target.of("http://[::1]:81/up").request(
        "GET", "/v1/models", b"", {}
    )


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL"):
        Target.of(url)

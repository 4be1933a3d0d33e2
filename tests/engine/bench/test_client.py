"""The load generator's HTTP client against a real socket."""

import asyncio
import json
from typing import Any

import pytest

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.prove.http_client import Target
from tests.support.bench_endpoint import Answer, Asked, Endpoint, completion


def saying(data: bytes, close: bool = False) -> Answer:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if close:
            writer.close()

    return answer


def post(endpoint: Endpoint, body: dict[str, Any]) -> bytes:
    return endpoint.client.target.request("POST", "/v1/completions", json.dumps(body).encode(), {"X-Id": "7"})


async def complete(endpoint: Endpoint) -> Outcome:
    outcome = Outcome(1, 0.0)
    outcome.finish(await endpoint.client.exchange(post(endpoint, {"max_tokens": 3}), outcome.take))
    return outcome


async def test_an_answer_cut_anywhere_in_two_is_read_whole() -> None:
    data = completion(num_tokens=2)
    cuts = iter(range(1, len(data)))

    async def halves(asked: Asked, writer: asyncio.StreamWriter) -> None:
        cut = next(cuts)
        writer.write(data[:cut])
        await asyncio.sleep(0.0005)
        writer.write(data[cut:])

    async with Endpoint(halves) as endpoint:
        for _ in range(len(data) - 1):
            assert (await complete(endpoint)).text == " t0 t1"
        assert endpoint.num_connections == 1


async def test_a_reused_connection_that_ends_without_an_answer_is_tried_once_more() -> None:
    async def second_is_dropped(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if len(endpoint.asked) == 2:
            writer.close()
        else:
            writer.write(completion(1))
            await writer.drain()

    async with Endpoint(second_is_dropped) as endpoint:
        await complete(endpoint)
        assert (await complete(endpoint)).error == ""
        assert len(endpoint.asked) == 3


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
    async with Endpoint(saying(said, closes)) as endpoint:
        with pytest.raises(ConnectionError, match=message):
            await complete(endpoint)


async def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async with Endpoint(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nall of it", close=True)) as endpoint:
        assert await endpoint.client.fetch("GET", "/x") == (200, b"all of it")


async def test_a_server_that_asks_to_close_is_not_asked_again_on_that_connection() -> None:
    async with Endpoint(saying(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")) as endpoint:
        for _ in range(2):
            assert await endpoint.client.fetch("GET", "/x") == (200, b"ok")
        assert endpoint.num_connections == 2


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

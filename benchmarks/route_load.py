"""Minimal counterparts for measuring a router: a backend with canned answers, and an aiohttp proxy without features to
compare with.

    python benchmarks/route_load.py backend PORT
    python benchmarks/route_load.py aiohttp PORT BACKEND_URL

The backend is an asyncio protocol without a framework, so that on two cores the proxy is what is busy.
"""

import asyncio
import contextlib
import sys
from collections.abc import Callable, Coroutine
from typing import Any

EVENT = b'data: {"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":" word","logprobs":null}]}\n\n'
ANSWER = b'{"id":"cmpl-1","object":"text_completion","model":"m","choices":[{"index":0,"text":"' + b"x" * 900 + b'"}]}'
MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
STEP_S = 0.005
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)


# -- the backend -------------------------------------------------------------------------------------------------


class Backend(asyncio.Protocol):
    """Answers a POST with 1 KB of JSON, or with `num_events` events, one of each open stream at a time."""

    def __init__(self, streams: "dict[Backend, int]") -> None:
        self.streams = streams
        self.data = b""
        self.is_paused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.pop(self, None)

    def pause_writing(self) -> None:
        self.is_paused = True

    def resume_writing(self) -> None:
        self.is_paused = False

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            place = head.find(b"content-length:")
            length = int(head[place + 15 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            self.answer(head, body)

    def answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"get /kv_events"):
            self.transport.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
        elif head.startswith(b"get"):
            self.transport.write(whole(MODELS if b"/v1/models" in head else b"{}"))
        elif (place := body.find(b'"num_events":')) >= 0:
            self.transport.write(STREAM_HEAD)
            self.streams[self] = int(body[place + 13 :].split(b",")[0].rstrip(b"} "))  # some gateways write bodies anew
        else:
            self.transport.write(whole(ANSWER))


async def produce(streams: dict[Backend, int]) -> None:
    """Simulate the steps of an engine: every 5 ms each open stream gets an event. The pace ensures that a proxy reads
    one event at a time, whose cost is compared."""
    event = chunk(EVENT)
    while True:
        for stream, left in list(streams.items()):
            if stream.is_paused:
                continue
            if left:
                streams[stream] = left - 1
                stream.transport.write(event)
            else:
                del streams[stream]
                stream.transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        await asyncio.sleep(STEP_S)


async def backend(port: str) -> None:
    streams: dict[Backend, int] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Backend(streams), "127.0.0.1", int(port), backlog=1024)
    async with server:
        await produce(streams)


# -- the other proxy ---------------------------------------------------------------------------------------------


async def aiohttp_proxy(port: str, backend_url: str) -> None:
    """Run the minimal proxy: no routing, no limits, no retries."""
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

    async def relay(request: web.Request) -> web.StreamResponse:
        body, url = await request.read(), backend_url + request.path_qs
        headers = {name: value for name, value in request.headers.items() if name.lower() != "host"}
        async with session.request(request.method, url, data=body, headers=headers) as answer:
            if "event-stream" not in (kind := answer.headers.get("content-type", "")):
                return web.Response(body=await answer.read(), status=answer.status, content_type=kind)
            response = web.StreamResponse(status=answer.status, headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response

    application = web.Application(client_max_size=1 << 26)
    application.router.add_route("*", "/{path:.*}", relay)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(port)).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    run: Callable[[Coroutine[Any, Any, None]], None] = asyncio.run
    with contextlib.suppress(ImportError):  # the other interpreter need not have it
        import uvloop

        run = uvloop.run
    run({"backend": backend, "aiohttp": aiohttp_proxy}[sys.argv[1]](*sys.argv[2:]))

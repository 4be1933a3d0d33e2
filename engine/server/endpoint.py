"""Connects ASGI to a handler: reads the body, watches for the client's disconnect, writes the reply or the stream.

A handler gets the body as bytes and returns either an object for JSON or an iterator of server-sent events. It is cancelled
as soon as the client disconnects, streaming or not, and its requests in the engine are aborted.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engine.http import token_form
from penstock.engine.http.errors import HttpError
from penstock.engine.server.call import Call
from penstock.engine.server.service import Service

Reply = msgspec.Struct | dict[str, Any] | list[dict[str, Any]] | msgspec.Raw | AsyncGenerator[bytes, None]
Handler = Callable[[Service, Call, bytes], Awaitable[Reply]]


class HandledRoute(NamedTuple):
    path: str
    handler: Handler
    method: str = "POST"
    takes_ids: bool = False  # accepts the prompt as token ids (token_form.py)
    takes_none: bool = False  # accepts requests without body and content type


_EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Endpoint:
    """The ASGI application of one route."""

    def __init__(self, service: Service, route: HandledRoute) -> None:
        self._service, self._route = service, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service, call = self._service, scope["penstock.call"]
        service.num_open_requests += 1
        call.scope = scope
        try:
            kind = self._content_type(scope) if scope["method"] == "POST" else b""
            call.reports = any(name == token_form.REPORT_HEADER for name, _ in scope["headers"])
            body = await Request(scope, receive).body()  # the connection has limited its size
            if kind == token_form.CONTENT_TYPE:
                body, call.prompt_ids = token_form.unpack(body)
            await unless_gone(receive, self._answer(call, body, scope, receive, send))
        except ClientDisconnect:
            call.is_gone = True  # for the log; part of the answer may have been sent
        finally:
            service.release(call)
            call.scope = {}  # breaks the reference cycle between scope and call
            service.num_open_requests -= 1

    def _content_type(self, scope: Scope) -> bytes:
        """Return the content type; refuse all but JSON, since any web page can make a browser post plain text."""
        given: bytes = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
        if self._route.takes_none and not given and all(name != b"origin" for name, _ in scope["headers"]):
            return b""  # not from a web page, whose requests have a content type or an origin
        kind = given.split(b";")[0].strip().lower()
        if kind == b"application/json" or (self._route.takes_ids and kind == token_form.CONTENT_TYPE):
            return kind
        raise HttpError(415, "content-type: 'application/json' is expected", param="content-type")

    async def _answer(self, call: Call, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._route.handler(self._service, call, body)
        if isinstance(reply, AsyncGenerator):
            call.is_stream = True
            await _send_events(send, reply, call)
        else:
            whole = Response(msgspec.json.encode(reply), 200, _report(call), "application/json")
            await whole(scope, receive, send)


def _report(call: Call) -> dict[str, str]:
    """Return the header with the number of cached prompt tokens if a router asked for it."""
    if not call.reports or not call.answers:
        return {}
    return {token_form.CACHED_HEADER: str(call.num_cached_tokens)}


async def _send_events(send: Send, events: AsyncGenerator[bytes, None], call: Call) -> None:
    """Send a stream. Its status is sent before the first token, so a later failure is one of its events.

    For a router, the status is sent with the first token: only then the number of cached tokens is known, and an
    earlier failure gets an error status, after which the router retries on another engine.
    """
    async with aclosing(events):
        first = await anext(events, b"") if call.reports else b""
        headers = [*_EVENTS, *((name.encode(), value.encode()) for name, value in _report(call).items())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if first:
            await send({"type": "http.response.body", "body": first, "more_body": True})
        async for data in events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the client disconnects."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

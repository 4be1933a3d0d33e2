"""Handlers of GET, DELETE and cancel for stored responses, and of removed routes."""

import asyncio
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from penstock.engine.http.errors import HttpError, clip
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.agents.items_api import not_stored, owner_of
from penstock.engine.server.agents.response_store import RunningResponse, StoredResponse
from penstock.engine.server.call import Call
from penstock.engine.server.endpoint import Reply
from penstock.engine.server.service import Service

CANCEL_WAIT_S = 5.0  # limits the wait for the other connection, whose client may not be reading


class Deleted(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True


async def get(service: Service, call: Call, _body: bytes) -> Reply:
    """Return a response; a running one is returned as written so far."""
    query = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    if query.get("stream", ["false"])[-1] != "false":
        raise InvalidRequest("stream", "a response is streamed once, while it is made; only 'false' is served")
    if (running := _running(service, call)) is not None:
        return running.reply
    return Raw(_stored(service, call).reply)


async def delete(service: Service, call: Call, _body: bytes) -> Deleted:
    """Delete a response. Responses that continue it cannot be continued any more either."""
    response_id = _id(call)
    if _running(service, call) is not None:
        raise HttpError(409, f"response_id: {response_id!r} is still running; cancel it first", param="response_id")
    if not service.responses.delete(owner_of(call), response_id):
        raise not_stored("response_id", response_id)
    return Deleted(response_id)


async def cancel(service: Service, call: Call, _body: bytes) -> Reply:
    """Cancel a response that is still being streamed on another connection."""
    if (running := _running(service, call)) is None:
        stored = _stored(service, call)
        status = msgspec.json.decode(stored.reply)["status"]
        if status != "cancelled":
            what = f"only a response that is still running can be cancelled; this one has ended ({status})"
            raise InvalidRequest("response_id", what)
        return Raw(stored.reply)
    running.call.is_cancelled = True
    for answer in running.call.answers:
        answer.abort()
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            await running.has_ended.wait()
    except TimeoutError:
        return msgspec.structs.replace(running.reply, status="cancelled")
    return running.reply


async def removed(_service: Service, call: Call, _body: bytes) -> Any:
    """Raise an error that names the replacement of a removed route."""
    path = call.scope["path"]
    raise HttpError(
        400, f"{clip(path)}: conversations and items are not kept here; send items, or use previous_response_id"
    )


def _id(call: Call) -> str:
    response_id: str = call.scope["path_params"]["response_id"]
    return response_id


def _running(service: Service, call: Call) -> RunningResponse | None:
    running = service.responses.running.get(_id(call))
    return running if running is not None and running.owner == owner_of(call) else None


def _stored(service: Service, call: Call) -> StoredResponse:
    stored = service.responses.get(owner_of(call), _id(call))
    if stored is None:
        raise not_stored("response_id", _id(call))
    return stored

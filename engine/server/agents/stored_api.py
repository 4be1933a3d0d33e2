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
    found = _find(service, call)
    return Raw(found.reply) if isinstance(found, StoredResponse) else found.reply


async def delete(service: Service, call: Call, _body: bytes) -> Deleted:
    """Delete a response. Responses that continue it cannot be continued any more either."""
    response_id = call.scope["path_params"]["response_id"]
    if isinstance(_find(service, call), RunningResponse):
        raise HttpError(409, f"response_id: {response_id!r} is still running; cancel it first", param="response_id")
    service.responses.delete(owner_of(call), response_id)
    return Deleted(response_id)


async def cancel(service: Service, call: Call, _body: bytes) -> Reply:
    """Cancel a response that is still being streamed on another connection."""
    found = _find(service, call)
    if isinstance(found, StoredResponse):
        status = msgspec.json.decode(found.reply)["status"]
        if status != "cancelled":
            what = f"only a response that is still running can be cancelled; this one has ended ({status})"
            raise InvalidRequest("response_id", what)
        return Raw(found.reply)
    found.call.is_cancelled = True
    for answer in found.call.answers:
        answer.abort()
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            await found.has_ended.wait()
    except TimeoutError:
        return msgspec.structs.replace(found.reply, status="cancelled")
    return found.reply


async def removed(_service: Service, call: Call, _body: bytes) -> Any:
    """Raise an error that names the replacement of a removed route."""
    path = call.scope["path"]
    raise HttpError(
        400, f"{clip(path)}: conversations and items are not kept here; send items, or use previous_response_id"
    )


def _find(service: Service, call: Call) -> RunningResponse | StoredResponse:
    """Return the response that the path names; raise a 404 if there is none."""
    response_id = call.scope["path_params"]["response_id"]
    found = service.responses.find(owner_of(call), response_id)
    if found is None:
        raise not_stored("response_id", response_id)
    return found

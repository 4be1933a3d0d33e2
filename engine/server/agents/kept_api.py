"""What is asked of responses and conversations that are kept: GET, DELETE and the rest, over item_store.py."""

import asyncio
import re
import secrets
import time
from typing import Any
from urllib.parse import parse_qs

import msgspec

from penstock.engine.http.errors import HttpError, clip
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.agents.item_store import Kept
from penstock.engine.server.agents.items import Item, named_items
from penstock.engine.server.agents.items_api import Background, not_kept, tenant_of
from penstock.engine.server.agents.items_schema import ConversationRequest
from penstock.engine.server.call import Call
from penstock.engine.server.requests import parse
from penstock.engine.server.service import Service

MAX_LISTED = 100
NO_ROOM = "it cannot be kept: the store is too small for it, or has failed"


async def get(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    """A response or a conversation as it stands."""
    _query(call, include=None, stream=("false",), include_obfuscation=None)
    if (running := _running(service, call)) is not None:
        return dict(msgspec.to_builtins(running.writer.reply))
    return _shown(await _kept(service, call))


async def delete(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    """Forget it; of a response also what came after it cannot be gone on with."""
    field, kept_id = _id(call)
    if _running(service, call) is not None:
        raise HttpError(409, f"{field}: {kept_id!r} runs; cancel it first", param=field)
    if not await service.store.delete(tenant_of(call), kept_id):
        raise not_kept(field, kept_id)
    return {"id": kept_id, "object": "response" if field == "response_id" else "conversation.deleted", "deleted": True}


async def cancel(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    """End a response that runs in the background."""
    if (running := _running(service, call)) is not None:
        running.writer.is_cancelled = True
        for answer in running.call.answers:
            answer.abort()
        await asyncio.wait((running.task,))  # not the task itself: it would be cancelled with who waits
        return dict(msgspec.to_builtins(running.writer.reply))
    reply = _shown(await _kept(service, call))
    if not reply["background"]:
        raise InvalidRequest("response_id", "only a response that runs in the background can be cancelled")
    return reply


async def list_items(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    """Of a conversation all, of a response those that it was given."""
    if (running := _running(service, call)) is not None:
        return _page(call, running.given)
    kept = await _kept(service, call)
    return _page(call, kept["items"][: kept.get("num_given")])


async def create_conversation(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Begin a conversation, to which responses are added."""
    request = parse(body, ConversationRequest, {})
    kept_id = f"conv_{secrets.token_hex(16)}"
    shown: dict[str, Any] = {"id": kept_id, "object": "conversation", "created_at": int(time.time())}
    shown["metadata"] = request.metadata or {}
    items = _new_items(request, kept_id)
    if not await service.store.put(tenant_of(call), kept_id, {"shown": shown, "items": items}):
        raise HttpError(503, NO_ROOM)
    return shown


async def change_conversation(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Other metadata."""
    request = parse(body, ConversationRequest, {})
    if request.items is not None:
        raise InvalidRequest("items", "they are added with POST /v1/conversations/{conversation_id}/items")
    return _shown(await _changed(service, call, lambda kept: kept["shown"].update(metadata=request.metadata or {})))


async def add_items(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    items = _new_items(parse(body, ConversationRequest, {}), _id(call)[1])
    await _changed(service, call, lambda kept: kept["items"].extend(items))
    return _page(call, items[::-1])


async def get_item(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    item_id = call.scope["path_params"]["item_id"]
    found = [item for item in (await _kept(service, call))["items"] if item["id"] == item_id]
    if not found:
        raise not_kept("item_id", item_id)
    return _listed(found[0])


async def delete_item(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    item_id = call.scope["path_params"]["item_id"]

    def without(kept: Kept) -> None:
        left = [item for item in kept["items"] if item["id"] != item_id]
        if len(left) == len(kept["items"]):
            raise not_kept("item_id", item_id)
        kept["items"] = left

    return _shown(await _changed(service, call, without))


def _new_items(request: ConversationRequest, owner: str) -> list[Item]:
    items = named_items(request.items or [], "items", owner)
    for place, item in enumerate(items):
        if item["type"] == "item_reference":
            raise InvalidRequest(f"items[{place}].type", "a conversation takes the item itself, no reference to it")
    return items


def _id(call: Call) -> tuple[str, str]:
    """The name and the value in the path, which has to be one of this kind."""
    field, kept_id = next(iter(call.scope["path_params"].items()))
    if not kept_id.startswith("resp_" if field == "response_id" else "conv_"):
        raise not_kept(field, kept_id)
    return field, kept_id


def _running(service: Service, call: Call) -> Background | None:
    running = service.background.get(_id(call)[1])
    return running if running is not None and running.tenant == tenant_of(call) else None


async def _kept(service: Service, call: Call) -> Kept:
    field, kept_id = _id(call)
    kept = await service.store.get(tenant_of(call), kept_id)
    if kept is None:
        raise not_kept(field, kept_id)
    return kept


async def _changed(service: Service, call: Call, change: Any) -> Kept:
    kept = await service.store.change(tenant_of(call), _id(call)[1], change)
    if kept is None:
        await _kept(service, call)  # raises if it is not there
        raise HttpError(503, NO_ROOM)
    return kept


def _shown(kept: Kept) -> dict[str, Any]:
    if "num_given" not in kept:
        return dict(kept["shown"])
    return {**kept["shown"], "output": kept["items"][kept["num_given"] :]}


def _page(call: Call, items: list[Item]) -> dict[str, Any]:
    """A page of them, the newest first unless asked otherwise."""
    asked = _query(call, order=("asc", "desc"), limit=None, after=None, include=None)
    limit = asked.get("limit", "20")
    if re.fullmatch(r"[0-9]{1,4}", limit) is None or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest("limit", f"{clip(limit)!r}; 1 to {MAX_LISTED} are allowed")
    ordered = items if asked.get("order") == "asc" else items[::-1]
    if "after" in asked:
        ids = [item["id"] for item in ordered]
        if asked["after"] not in ids:
            raise not_kept("after", asked["after"], 400)
        ordered = ordered[ids.index(asked["after"]) + 1 :]
    shown = [_listed(item) for item in ordered[: int(limit)]]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, "has_more": len(ordered) > int(limit), **ends}


def _listed(item: Item) -> Item:
    """A message's text as a list of parts, in whatever form it came."""
    shown = {"status": "completed", **item}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        shown["content"] = [{"type": kind, "text": item["content"], "annotations": []}]
    return shown


def _query(call: Call, **known: tuple[str, ...] | None) -> dict[str, str]:
    """What stands behind the question mark: one value each, of those that are known."""
    given = parse_qs(call.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    for name, values in given.items():
        allowed = known.get(name.removesuffix("[]"), ())
        if allowed is not None and values[-1] not in allowed:
            served = f"{clip(values[-1])!r} is not served; {' or '.join(allowed)} is"
            raise InvalidRequest(clip(name), served if allowed else "there is no such field")
    return {name: values[-1] for name, values in given.items()}

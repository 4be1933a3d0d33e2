"""POST /v1/responses and what belongs to it: a conversation of items, answered by the one chat path.

A response that is kept can be asked for, and be the beginning of the next one. One in the background runs on without its
client; only this process knows of it until it has ended.
"""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from penstock.engine.http.auth import key_digest
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server import requests as schema
from penstock.engine.server.agents.events import num_prompt_tokens, thinking_switch, write
from penstock.engine.server.agents.item_store import Kept
from penstock.engine.server.agents.item_writer import ItemsReply, ItemWriter
from penstock.engine.server.agents.items import Item, Messages, given_items, in_words_of, named_items, to_messages
from penstock.engine.server.agents.items_schema import (
    NOT_SERVED,
    AllowedTools,
    ChosenTool,
    ItemsRequest,
    ResponsesRequest,
)
from penstock.engine.server.call import Call
from penstock.engine.server.chat import ChatReply, ask
from penstock.engine.server.service import Service

MAX_CHAIN = 1000  # responses, each with the one before it
NAMES = {  # what a chat calls otherwise
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}
SAME = schema.CHAT_FIELDS & {*ResponsesRequest.__struct_fields__}


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


class Background(NamedTuple):
    """A response that runs without its client."""

    task: asyncio.Task[None]
    call: Call
    writer: ItemWriter
    given: list[Item]
    tenant: bytes


async def responses(service: Service, call: Call, body: bytes) -> ItemsReply | AsyncGenerator[bytes, None]:
    """Answer a conversation of items."""
    request = service.accept(call, body, ResponsesRequest, NOT_SERVED)
    if request.background:
        if request.stream or request.store is False:
            raise InvalidRequest("background", "what runs in the background is kept (store) and not streamed")
        client, call = call, Call(call.client_id)  # of its own, that does not end with the client's
        call.model, call.scope, call.trace = client.model, client.scope, client.trace
    reply = _reply(service, call, request)
    given, chat, messages = await _chat(service, call, request, reply.id, len(body))
    try:
        with in_words_of(NAMES, messages.places):
            plan = await ask(service, call, chat, len(body))
    except BaseException:
        service.release(call)
        raise

    keep = partial(_keep, service, call, request, given)
    writer = ItemWriter(call, reply, service.tokenizer, keep, is_stream=bool(request.stream))
    raises = not (request.stream or request.background)
    pieces = write(service, call, ChatReply(service, call, chat, plan), writer, raises=raises)
    if request.stream:
        return pieces
    if request.background:
        task = asyncio.create_task(_run_on(service, call, pieces))
        service.background[reply.id] = Background(task, call, writer, given, tenant_of(call))
        return msgspec.structs.replace(reply, output=[])
    async for _ in pieces:
        pass
    return reply


async def input_tokens(service: Service, call: Call, body: bytes) -> InputTokens:
    """How many tokens the prompt of a response would have."""
    request = service.accept(call, body, ItemsRequest, NOT_SERVED)
    with service.admit(1):
        _, chat, messages = await _chat(service, call, request, "resp_", len(body))
        with in_words_of(NAMES, messages.places):
            return InputTokens(await num_prompt_tokens(service, chat, len(body)))


def tenant_of(call: Call) -> bytes:
    """By whose key it came; where there are none, all are one."""
    return key_digest(call.scope["headers"]) or b""


def not_kept(field: str, kept_id: str, status: int = 404) -> HttpError:
    return HttpError(status, f"{field}: {clip(kept_id)!r} is not kept here (any more)", param=field)


async def _past(service: Service, call: Call, request: ItemsRequest) -> list[Item]:
    """The items before those that came."""
    before, within = request.previous_response_id, request.conversation_id
    if before is not None and within is not None:
        raise InvalidRequest("previous_response_id", "give only one of it and conversation")
    turns: list[list[Item]] = []
    at = before or within
    while at is not None:
        kept = await service.store.get(tenant_of(call), at) if len(turns) < MAX_CHAIN else None
        if kept is None:
            raise not_kept("conversation", at) if before is None else not_kept("previous_response_id", at, 400)
        if before is not None and (within := (kept["shown"].get("conversation") or {}).get("id")) is not None:
            raise InvalidRequest("previous_response_id", f"it belongs to a conversation; give conversation: {within!r}")
        turns.append(kept["items"])
        at = kept.get("previous")
    return [item for turn in reversed(turns) for item in turn]


async def _chat(
    service: Service, call: Call, request: ItemsRequest, owner: str, size_bytes: int
) -> tuple[list[Item], schema.ChatRequest, Messages]:
    """What was given, and the chat that the request stands for."""
    past = [("input (before it)", item) for item in await _past(service, call, request)]
    given = named_items(given_items(request.input, service.info), "input", owner)
    owners: dict[str, list[Item]] = {}
    for place, item in enumerate(given):
        if item["type"] == "item_reference":
            given[place] = await _referred(service, call, f"input[{place}].id", item["id"], owners)
    placed = [*past, *((f"input[{place}]", item) for place, item in enumerate(given))]
    if not placed:
        raise InvalidRequest("input", "at least one item is needed")
    fields = _fields(request)

    def chat_of(start: int) -> tuple[list[Item], schema.ChatRequest, Messages]:
        messages = to_messages(placed[start:], request.instructions)
        return given, schema.ChatRequest(messages=Raw(msgspec.json.encode(messages.messages)), **fields), messages

    if request.truncation != "auto":
        return chat_of(0)
    # From which of the user's messages on it fits: by halves, for every look renders all of it.
    starts = [0, *(at for at, (_, item) in enumerate(placed) if at and item.get("role") == "user")]
    limit = service.info.max_model_len - (fields.get("max_tokens") or 1)
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        _, chat, messages = chat_of(starts[middle])
        with in_words_of(NAMES, messages.places):
            fits = await num_prompt_tokens(service, chat, size_bytes) <= limit
        low, high = (low, middle) if fits else (middle + 1, high)
    return chat_of(starts[low])


async def _referred(service: Service, call: Call, field: str, item_id: str, owners: dict[str, list[Item]]) -> Item:
    """An item by its id, in which its owner is named. `owners`: what was read for the references before it."""
    token = item_id.partition("_")[2][:32]
    for owner in (f"resp_{token}", f"conv_{token}"):
        if owner not in owners:
            kept = await service.store.get(tenant_of(call), owner)
            owners[owner] = kept["items"] if kept else []
        for item in owners[owner]:
            if item["id"] == item_id:
                return dict(item)
    raise not_kept(field, item_id, 400)


def _fields(request: ItemsRequest) -> dict[str, Any]:
    """Of the chat, all but its messages."""
    tools, choice = request.tools or [], request.tool_choice
    fields: dict[str, Any] = {name: getattr(request, name, None) for name in SAME} | {"tool_choice": choice}
    if isinstance(choice, ChosenTool):
        fields["tool_choice"] = schema.NamedTool(schema.FunctionName(choice.name))
    elif isinstance(choice, AllowedTools):
        fields["tool_choice"], names = choice.mode, {tool.name for tool in choice.tools}
        if missing := names - {tool.name for tool in tools}:
            raise InvalidRequest("tool_choice.tools", f"{clip(min(missing))!r} is not among the tools")
        tools = [tool for tool in tools if tool.name in names]
    fields["tools"] = [
        schema.Tool(schema.Function(each.name, each.description, each.parameters, each.strict)) for each in tools
    ]
    form = request.text.format if request.text is not None else None
    if form is not None:
        of_json = schema.JsonSchema(form.schema) if form.type == "json_schema" else None
        fields["response_format"] = schema.ResponseFormat(form.type, of_json)
    if request.reasoning is not None and (effort := request.reasoning.effort) is not None:
        fields["reasoning_effort"] = effort if effort != "none" else None
        fields["chat_template_kwargs"] = thinking_switch(effort != "none") | (request.chat_template_kwargs or {})
    if isinstance(request, ResponsesRequest):
        fields["max_tokens"] = request.max_output_tokens
        if request.top_logprobs is not None or "message.output_text.logprobs" in (request.include or ()):
            fields["logprobs"] = True
    return fields


def _reply(service: Service, call: Call, request: ResponsesRequest) -> ItemsReply:
    """What was asked, as it was understood."""
    names = {*ItemsReply.__struct_fields__} & {*ResponsesRequest.__struct_fields__} - {"model", "text", "conversation"}
    asked = {name: value for name in names if (value := getattr(request, name)) is not None}
    defaults = {name: service.config.default_sampling.get(name, 1.0) for name in ("temperature", "top_p")}
    reply = ItemsReply(id=f"resp_{call.id}", created_at=call.created, model=call.model, **{**defaults, **asked})
    form = msgspec.to_builtins(request.text.format) if request.text is not None else None
    reply.text = {"format": {name: value for name, value in (form or {"type": "text"}).items() if value is not None}}
    if request.conversation_id is not None:
        reply.conversation = {"id": request.conversation_id}
    return reply


async def _keep(service: Service, call: Call, request: ResponsesRequest, given: list[Item], reply: ItemsReply) -> bool:
    """In the store, and at the end of its conversation."""
    items, tenant = [*given, *msgspec.to_builtins(reply.output)], tenant_of(call)
    if request.conversation_id is not None and reply.status in ("completed", "incomplete"):
        try:
            await service.store.change(tenant, request.conversation_id, lambda kept: kept["items"].extend(items))
        except HttpError:  # it is in the log, and the client gets its answer
            return False
    if request.store is False:
        return False
    whole = msgspec.to_builtins(msgspec.structs.replace(reply, output=[]))
    kept: Kept = {"shown": whole, "items": items, "num_given": len(given), "previous": request.previous_response_id}
    return await service.store.put(tenant, reply.id, kept)


async def _run_on(service: Service, call: Call, pieces: AsyncGenerator[bytes, None]) -> None:
    service.num_open_requests += 1  # a drain waits for it
    try:
        async for _ in pieces:
            pass
    finally:
        service.background.pop(f"resp_{call.id}", None)
        service.release(call)
        service.num_open_requests -= 1

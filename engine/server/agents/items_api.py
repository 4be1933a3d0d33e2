"""POST /v1/responses and /v1/responses/input_tokens: converts a conversation of items to a chat request and answers it.

A stored response (response_store.py) can be continued by the next one, and be read, deleted and cancelled here.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw

from penstock.engine.http.auth import key_digest
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server import requests as schema
from penstock.engine.server.agents.events import num_prompt_tokens, thinking_switch, write
from penstock.engine.server.agents.item_writer import ItemsReply, ItemWriter
from penstock.engine.server.agents.items import add_items, chat_tools, checked_items, given_items, own_tools
from penstock.engine.server.agents.items_schema import (
    ITEM,
    NOT_SERVED,
    VENDOR_TOOLS,
    AllowedTools,
    AnyItem,
    ChosenTool,
    FlatTool,
    ItemsRequest,
    ResponsesRequest,
)
from penstock.engine.server.agents.response_store import RunningResponse, StoredResponse
from penstock.engine.server.call import Call
from penstock.engine.server.chat import ask
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.endpoint import Reply
from penstock.engine.server.service import Service

CANCEL_WAIT_S = 5.0  # limits the wait for the other connection, whose client may not be reading
MAX_CHAIN = 1000  # length of a chain of previous responses
PATHS = {  # the chat API's field → the field in this API
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}
SAME = schema.CHAT_FIELDS & {*ResponsesRequest.__struct_fields__}


class InputTokens(msgspec.Struct, frozen=True):
    input_tokens: int
    object: str = "response.input_tokens"


async def responses(service: Service, call: Call, body: bytes) -> ItemsReply | AsyncGenerator[bytes, None]:
    """Answer a conversation of items."""
    request = service.accept(call, body, ResponsesRequest, NOT_SERVED)
    chat, conversation, tools, given = _chat(service, call, request, len(body))
    reply = _reply(service, call, request, tools)
    plan = await ask(service, call, chat, conversation)
    keep = partial(_keep, service, call, request, given)
    writer = ItemWriter(call, reply, service.tokenizer, keep, is_stream=bool(request.stream))
    pieces = write(service, call, plan, writer, raises=not request.stream)
    if request.stream:
        return _cancellable(service, reply.id, RunningResponse(owner_of(call), call, reply), pieces)
    async for _ in pieces:
        pass
    return reply


async def input_tokens(service: Service, call: Call, body: bytes) -> InputTokens:
    """Return how many tokens the prompt of a response would have."""
    request = service.accept(call, body, ItemsRequest, NOT_SERVED)
    with service.admit(1):
        chat, conversation, _, _ = _chat(service, call, request, len(body))
        return InputTokens(await num_prompt_tokens(service, chat, conversation))


def owner_of(call: Call) -> bytes:
    """Return the digest of the request's API key. Without API keys, all clients count as the same owner."""
    return key_digest(call.scope["headers"]) or b""


def not_stored(field: str, response_id: str, status: int = 404) -> HttpError:
    return HttpError(status, f"{field}: {clip(response_id)!r} is not stored here (any more)", param=field)


async def _cancellable(
    service: Service, response_id: str, running: RunningResponse, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    """Pass the stream on, and register it while it runs, so that another connection can cancel it."""
    service.responses.running[response_id] = running
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
    finally:
        del service.responses.running[response_id]
        running.has_ended.set()


def _past(service: Service, call: Call, previous_id: str | None) -> list[StoredResponse]:
    """Return the chain of previous responses, oldest first."""
    turns: list[StoredResponse] = []
    while previous_id is not None:
        stored = service.responses.get(owner_of(call), previous_id) if len(turns) < MAX_CHAIN else None
        if stored is None:
            raise not_stored("previous_response_id", previous_id, 400)
        turns.append(stored)
        previous_id = stored.previous_id
    return turns[::-1]


def _chat(
    service: Service, call: Call, request: ItemsRequest, size_bytes: int
) -> tuple[schema.ChatRequest, Conversation, list[FlatTool], list[AnyItem]]:
    """Convert the request to a chat; return it with its tools and its items. `size_bytes`: size of the body."""
    conversation = Conversation(size_bytes, PATHS)
    tools = own_tools(request.tools, FlatTool, VENDOR_TOOLS, call.ignored)
    fields = _fields(request, tools, conversation)
    past = _past(service, call, request.previous_response_id)
    given = checked_items(given_items(request.input, service.info), "input")
    placed: list[tuple[str, AnyItem]] = [
        ("previous_response_id", item) for stored in past for item in msgspec.json.decode(stored.items, type=list[ITEM])
    ]
    placed += [(f"input[{place}]", item) for place, item in enumerate(given)]
    if not placed:
        raise InvalidRequest("input", "at least one item is needed")
    conversation.size_bytes += sum(len(stored.items) for stored in past)
    add_items(conversation, placed, request.instructions)
    return schema.ChatRequest(messages=Raw(), **fields), conversation, [*tools.values()], given


def _fields(request: ItemsRequest, tools: dict[int, FlatTool], conversation: Conversation) -> dict[str, Any]:
    """Return all fields of the chat request except its messages."""
    choice = request.tool_choice
    fields: dict[str, Any] = {name: getattr(request, name, None) for name in SAME} | {"tool_choice": choice}
    if isinstance(choice, ChosenTool):
        fields["tool_choice"] = schema.NamedTool(schema.FunctionName(choice.name))
    elif isinstance(choice, AllowedTools):
        fields["tool_choice"], names = choice.mode, {tool.name for tool in choice.tools}
        if missing := names - {tool.name for tool in tools.values()}:
            raise InvalidRequest("tool_choice.tools", f"{clip(min(missing))!r} is not among the tools")
        tools = {place: tool for place, tool in tools.items() if tool.name in names}
    fields["tools"] = chat_tools(tools, conversation.paths, "parameters")
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


def _reply(service: Service, call: Call, request: ResponsesRequest, tools: list[FlatTool]) -> ItemsReply:
    """Return the response without an answer yet, with the effective options of the request."""
    names = {*ItemsReply.__struct_fields__} & {*ResponsesRequest.__struct_fields__} - {"model", "text", "tools"}
    asked = {name: value for name in names if (value := getattr(request, name)) is not None}
    defaults = {name: service.config.default_sampling.get(name, 1.0) for name in ("temperature", "top_p")}
    reply = ItemsReply(
        id=f"resp_{call.id}", created_at=call.created, model=call.model, tools=tools, **{**defaults, **asked}
    )
    form = msgspec.to_builtins(request.text.format) if request.text is not None else None
    reply.text = {"format": {name: value for name, value in (form or {"type": "text"}).items() if value is not None}}
    return reply


def _keep(service: Service, call: Call, request: ResponsesRequest, given: list[AnyItem], reply: ItemsReply) -> bool:
    """Store the response unless the client has disabled it; return whether it is stored."""
    if request.store is False:
        return False
    items = msgspec.json.encode([*given, *reply.output])
    stored = StoredResponse(owner_of(call), msgspec.json.encode(reply), items, request.previous_response_id)
    return service.responses.put(reply.id, stored)


# Stored responses.


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

"""POST /v1/responses: converts a conversation of items to a chat request and answers it.

A stored response (response_store.py) can be continued by the next one, and be read and deleted here.
"""

from typing import Any, get_args

import msgspec
from msgspec import Raw

from penstock.engine.http.errors import HttpError, clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server import prompts, requests
from penstock.engine.server.agents import items_schema as schema
from penstock.engine.server.agents.item_writer import DEFAULTS, ItemWriter
from penstock.engine.server.agents.items import add_items, chat_tools, given_items, own_tools
from penstock.engine.server.agents.response_store import StoredResponse
from penstock.engine.server.answer_writer import respond
from penstock.engine.server.call import Call
from penstock.engine.server.chat import ask
from penstock.engine.server.conversation import Conversation
from penstock.engine.server.custom_tools import CustomTool, as_function, check_regexes
from penstock.engine.server.endpoint import Reply
from penstock.engine.server.logprobs import TextLogprobs
from penstock.engine.server.service import Service

MAX_CHAIN = 1000  # length of a chain of previous responses
PATHS = {  # the chat API's field → the field in this API
    "messages": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function": "tool_choice",
}
SAME = requests.CHAT_FIELDS & {*schema.ResponsesRequest.__struct_fields__}


async def responses(service: Service, call: Call, body: bytes) -> Reply:
    """Answer a conversation of items."""
    request = service.accept(call, body, schema.ResponsesRequest)
    if request.prompt_cache_options is not None and request.prompt_cache_options.get("prewarm"):
        raise InvalidRequest("prompt_cache_options.prewarm", "every response is generated; send max_output_tokens 1")
    chat, conversation, tools, given = await _chat(service, call, request, len(body))
    reply = _reply(service, call, request, [*tools.values()])
    plan = await ask(service, call, chat, conversation)
    logprobs = None
    if chat.logprobs:
        skips = getattr(chat, "skip_special_tokens", None) is not False
        stream = service.tokenizer.stream(skips, shown_ids=plan.shown_ids)
        logprobs = TextLogprobs(service.tokenizer, stream, request.return_tokens_as_token_ids)
    writer = ItemWriter(service, call, request, given, plan, reply, logprobs)
    return await respond(service, call, writer)


async def input_tokens(service: Service, call: Call, body: bytes) -> dict[str, Any]:
    """Return how many tokens the prompt of a response would have."""
    request = service.accept(call, body, schema.CountItemsRequest)
    chat, conversation, _, _ = await _chat(service, call, request, len(body))
    num_tokens = await prompts.count_tokens(chat, conversation, service)
    return {"object": "response.input_tokens", "input_tokens": num_tokens}


async def compact(_service: Service, _call: Call, _body: bytes) -> Reply:
    """Refuse to summarize a conversation: OpenAI's summaries are encrypted, and only its own models read them."""
    raise HttpError(400, "conversations are not compacted here; send fewer items, or let the model summarize them")


def not_stored(field: str, response_id: str, status: int = 404) -> HttpError:
    return HttpError(status, f"{field}: {clip(response_id)!r} is not stored here (any more)", param=field)


def _past(service: Service, call: Call, previous_id: str | None) -> list[StoredResponse]:
    """Return the chain of previous responses, oldest first."""
    turns: list[StoredResponse] = []
    while previous_id is not None:
        if len(turns) == MAX_CHAIN:
            what = f"more than {MAX_CHAIN} responses in a row; send the older items as input"
            raise InvalidRequest("previous_response_id", what)
        stored = service.responses.get(call.owner, previous_id)
        if stored is None:
            raise not_stored("previous_response_id", previous_id, 400)
        turns.append(stored)
        previous_id = stored.previous_id
    size, limit = sum(len(stored.items) for stored in turns), service.config.limits.max_body_bytes
    if size > limit:  # they are decoded together, so they are limited like a body
        what = f"{size} bytes in the items of the previous responses; at most {limit} are allowed (--max-body-bytes)"
        raise InvalidRequest("previous_response_id", what)
    return turns[::-1]


async def _chat(
    service: Service, call: Call, request: schema.CountItemsRequest, size_bytes: int
) -> tuple[requests.ChatRequest, Conversation, dict[int, schema.AnyTool], list[schema.AnyItem]]:
    """Convert the request to a chat; return it with its tools and its items. `size_bytes`: size of the body."""
    call.paths |= PATHS
    conversation = Conversation(size_bytes, call.paths)
    tools: dict[int, schema.AnyTool] = own_tools(request.tools, schema.AnyTool, schema.VENDOR_TOOLS, call.ignored)
    fields = _fields(request, tools, call)
    past = _past(service, call, request.previous_response_id)
    given = given_items(request.input, service.info, call.ignored)
    placed: list[tuple[str, schema.AnyItem]] = [
        ("previous_response_id", item)
        for stored in past
        for item in msgspec.json.decode(stored.items, type=list[schema.ITEM])
    ]
    placed += [(f"input[{place}]", item) for place, item in enumerate(given)]
    if not placed:
        raise InvalidRequest("input", "at least one item is needed")
    conversation.size_bytes += sum(len(stored.items) for stored in past)
    add_items(conversation, placed, request.instructions)
    custom = {place: tool for place, tool in tools.items() if isinstance(tool, CustomTool)}
    await check_regexes({f"tools[{place}].format.definition": tool.format for place, tool in custom.items()})
    return requests.ChatRequest(messages=Raw(), **fields), conversation, tools, given


def _fields(request: schema.CountItemsRequest, tools: dict[int, schema.AnyTool], call: Call) -> dict[str, Any]:
    """Return all fields of the chat request except its messages."""
    choice = request.tool_choice
    fields: dict[str, Any] = {name: getattr(request, name, None) for name in SAME}
    fields |= {"tool_choice": choice, "max_tokens": getattr(request, "max_output_tokens", None)}
    if isinstance(choice, schema.ChosenTool):
        if any(tool.name == choice.name and tool.__struct_config__.tag != choice.type for tool in tools.values()):
            raise InvalidRequest("tool_choice.type", f"the tool {clip(choice.name)!r} has another type")
        fields["tool_choice"] = requests.NamedTool(requests.FunctionName(choice.name))
    functions = {
        place: as_function(tool.name, tool.description, tool.format) if isinstance(tool, CustomTool) else tool
        for place, tool in tools.items()
    }
    fields["tools"] = chat_tools(functions, call.paths, "parameters")
    form = request.text.format if request.text is not None else None
    if form is not None:
        of_json = None if form.type != "json_schema" and form.schema is None else requests.JsonSchema(form.schema)
        fields["response_format"] = requests.ResponseFormat(form.type, of_json)
    included = getattr(request, "include", None) or ()
    call.ignored += dict.fromkeys(f"include:{part}" for part in included if part in get_args(schema.VendorPart))
    fields["logprobs"] = schema.LOGPROBS in included or bool(fields["top_logprobs"]) or None
    if not fields["logprobs"]:
        fields["top_logprobs"] = None
    if request.reasoning is not None:
        fields["reasoning_effort"] = request.reasoning.effort
    return fields


def _reply(
    service: Service, call: Call, request: schema.ResponsesRequest, tools: list[schema.AnyTool]
) -> dict[str, Any]:
    """Return the response without an answer yet, with the effective options of the request."""
    asked = {name: value for name in DEFAULTS if (value := getattr(request, name, None)) is not None}
    defaults = {name: service.config.default_sampling.get(name, 1.0) for name in ("temperature", "top_p")}
    form = msgspec.to_builtins(request.text.format) if request.text is not None else None
    text = {"format": {name: value for name, value in (form or {"type": "text"}).items() if value is not None}}
    names = {"id": f"resp_{call.id}", "created_at": call.created, "model": call.model}
    return {**names, **DEFAULTS, **defaults, **asked, "tools": tools, "text": text, "output": []}


# Stored responses.


async def get(service: Service, call: Call, _body: bytes) -> Reply:
    """Return a stored response."""
    if call.query.get("stream", ["false"])[-1] != "false":
        raise InvalidRequest("stream", "a response is streamed once, while it is made; only 'false' is served")
    response_id = call.scope["path_params"]["response_id"]
    stored = service.responses.get(call.owner, response_id)
    if stored is None:
        raise not_stored("response_id", response_id)
    return Raw(stored.reply)


async def delete(service: Service, call: Call, _body: bytes) -> dict[str, Any]:
    """Delete a response. Responses that continue it cannot be continued any more either."""
    response_id = call.scope["path_params"]["response_id"]
    if not service.responses.delete(call.owner, response_id):
        raise not_stored("response_id", response_id)
    return {"id": response_id, "object": "response", "deleted": True}

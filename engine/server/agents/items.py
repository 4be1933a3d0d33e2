"""Validates the items of the Responses API and adds them to a conversation; decodes the tools of both agents' APIs."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Raw

from penstock.engine.http.body import decode
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.server.agents import items_schema as schema
from penstock.engine.server.conversation import MAX_MESSAGES, Conversation, check_braces
from penstock.engine.server.custom_tools import Function
from penstock.engine.server.other_fields import decode_lenient
from penstock.engine.server.requests import Tool
from penstock.engine.server.tool_choice import MAX_TOOLS
from penstock.engine.text.chat_messages import TextPart
from penstock.executor.protocol import ModelInfo

INPUT: Any = str | list[dict[str, Any]]


def given_items(raw: Raw, info: ModelInfo, ignored: list[str]) -> list[schema.AnyItem]:
    """Decode `input`, which may be missing, a text or a list of items; an item without a type is a message. Append the
    names of ignored fields to `ignored`."""
    if bytes(raw) in (b"", b"null"):
        return []
    check_braces("input", raw, info)
    given = decode(INPUT, raw, "input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest("input", f"{len(given)} given; at most {MAX_MESSAGES} are allowed")
    for place, item in enumerate(given):
        if item.get("type", "message") == "item_reference" or not item.keys() & {"type", "role"}:
            what = "items are not kept by their ids; send the item itself, or previous_response_id"
            raise InvalidRequest(f"input[{place}].type", what)
    items = [{name: value for name, value in item.items() if value is not None} for item in given]
    typed = msgspec.json.encode([{"type": "message", **item} for item in items])
    return [*decode_lenient(list[schema.ITEM], typed, "input", ignored)]


def add_items(
    conversation: Conversation, items: Iterable[tuple[str, schema.AnyItem]], instructions: str | None
) -> None:
    """Add items, each with its path in the request, to a conversation."""
    if instructions:
        conversation.say("instructions", "system", instructions, "")
    for place, item in items:
        if isinstance(item, schema.MessageItem):
            conversation.say(place, item.role, chat_text(item.content))
        elif isinstance(item, schema.CallItem | schema.CustomCallItem):
            if item.status != "incomplete":  # an incomplete call has truncated arguments
                arguments = item.arguments if isinstance(item, schema.CallItem) else {"input": item.input}
                conversation.call(place, item.call_id, item.name, arguments)
        elif isinstance(item, schema.ResultItem):
            conversation.result(place, item.call_id, chat_text(item.output), "call_id")
        elif isinstance(item, schema.ReasoningItem):
            conversation.think(place, "\n".join(part.text for part in item.content or item.summary))


class _ToolType(msgspec.Struct):
    """The type of a tool, which is decoded first."""

    type: Any = None


def own_tools(
    raw_tools: Sequence[Raw] | None, kind: Any, vendors: re.Pattern[str], ignored: list[str]
) -> dict[int, Any]:
    """Decode the tools that the client runs, by position. Tools whose type matches `vendors` run only in a vendor's
    cloud: they are skipped, and their types are added to `ignored`."""
    tools: dict[int, Any] = {}
    if raw_tools is not None and len(raw_tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(raw_tools)} given; at most {MAX_TOOLS} are allowed")
    for index, raw in enumerate(raw_tools or ()):
        tool_type = decode(_ToolType, raw, f"tools[{index}]").type
        if not isinstance(tool_type, str) or vendors.fullmatch(tool_type) is None:
            tools[index] = decode_lenient(kind, raw, f"tools[{index}]", ignored)
        elif (name := f"tools:{tool_type}") not in ignored:
            ignored.append(name)
    return tools


def chat_tools(tools: Mapping[int, Function], paths: dict[str, str], schema_field: str) -> list[Tool]:
    """Return the tools in the chat API's form, and add the client's names of their fields to `paths`."""
    for index, place in enumerate(tools):
        paths[f"tools[{index}].function"] = f"tools[{place}]"
        paths[f"tools[{index}].function.parameters"] = f"tools[{place}].{schema_field}"
    return [Tool(tool) for tool in tools.values()]


def chat_text(content: str | list[schema.ItemText]) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    return [TextPart("text", part.text or part.refusal) for part in content]

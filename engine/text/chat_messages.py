"""The messages of a conversation in OpenAI's form, for the servers, the router and `LLM`, and as plain data for templates.

The types are decoded from JSON, or built from the parts of the other APIs and the dictionaries of Python callers
(engine/front/hf_interface.py). `plain_messages` then makes what chat templates expect: text as one string and call
arguments as objects. It also validates what the types do not; errors name the field in the request.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engine.invalid_request import InvalidRequest, check_unicode

MAX_ROLE_CHARS = 64
MAX_DEPTH = 64  # levels of nesting

PlainMessage = dict[str, Any]  # what a template is given


class TextPart(msgspec.Struct, frozen=True):
    """A part of a message. Other types than "text" are refused."""

    type: Any = None
    text: Any = None


class CalledFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any]  # the text of a JSON object, or the object


class PastCall(msgspec.Struct, kw_only=True):
    """A call of an earlier answer, sent back as history."""

    id: str | None = None
    function: CalledFunction


class Message(msgspec.Struct, kw_only=True):
    role: Annotated[str, Meta(min_length=1, max_length=MAX_ROLE_CHARS)]
    content: str | Sequence[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`
    tool_calls: Sequence[PastCall] | None = None
    tool_call_id: str | None = None  # in a tool message: the call that it answers


class OpenMessage(Message, kw_only=True):
    """A message of a Python caller, with further entries for templates that read them."""

    content: str | list[TextPart] | None = None
    tool_calls: list[PastCall] | None = None
    others: dict[str, Any] = {}


def plain_messages(messages: Sequence[Message]) -> list[PlainMessage]:
    """Return the messages as templates expect them, as data that nothing else refers to."""
    if not messages:
        raise InvalidRequest("messages", "a list of at least one message is expected")
    return [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _plain(message: Message, field: str) -> PlainMessage:
    content = message.content
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    text = content if isinstance(content, str) else _text(content or (), f"{field}.content")
    result: PlainMessage = {"role": message.role, "content": text}
    if isinstance(message, OpenMessage):
        plain(text, f"{field}.content")
        result |= message.others
    if message.name is not None:
        result["name"] = message.name
    if message.tool_call_id is not None:
        result["tool_call_id"] = message.tool_call_id
    if reasoning is not None:
        result["reasoning_content"] = result["thinking"] = reasoning
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        result["tool_calls"] = [_plain_call(call, f"{field}.tool_calls[{place}]") for place, call in calls]
    return result


def _text(parts: Sequence[TextPart], field: str) -> str:
    for place, part in enumerate(parts):
        if part.type != "text":
            raise InvalidRequest(f"{field}[{place}].type", f"{str(part.type)[:40]!r} is not supported; only 'text' is")
        if not isinstance(part.text, str):
            raise InvalidRequest(f"{field}[{place}].text", "a string is expected")
    return "\n".join([part.text for part in parts])


def _plain_call(call: PastCall, field: str) -> dict[str, Any]:
    """Decode a call's arguments, which are a JSON string in OpenAI's API and an object in templates."""
    field, arguments = f"{field}.function.arguments", call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise InvalidRequest(field, "not valid JSON") from None
        if not isinstance(arguments, dict):
            raise InvalidRequest(field, "the JSON of an object is expected")
    function = {"name": call.function.name, "arguments": plain(arguments, field)}
    named = {} if call.id is None else {"id": call.id}
    return {**named, "type": "function", "function": function}


def objects(values: object, field: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise InvalidRequest(field, "a list of objects is expected")
    checked: list[dict[str, Any]] = plain(values, field)
    return checked


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """Return a copy of JSON data; refuse other objects, since the sandbox does not protect their methods."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(field, f"nested more than {MAX_DEPTH} levels deep")
    if value is None or type(value) in (int, float, bool):
        return value
    if type(value) is str:
        return check_unicode(value, field)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {check_unicode(str(key), field): plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, field, depth + 1) for item in value]
    raise InvalidRequest(field, f"holds a {type(value).__name__}; only JSON values are allowed")

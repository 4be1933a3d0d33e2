"""Turns what the agents' APIs call a conversation (items, blocks) into the messages of a chat, and the names in an error back
into the client's own."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from penstock.engine.http.body import decode
from penstock.engine.http.errors import HttpError
from penstock.engine.options import objection
from penstock.engine.sampling_params import InvalidRequest
from penstock.engine.server.agents.items_schema import (
    ITEM,
    AnyItem,
    CallItem,
    MessageItem,
    ReasoningItem,
    ResultItem,
    TextPart,
)
from penstock.engine.server.prompts import MAX_MESSAGES, Conversation, check_braces
from penstock.engine.server.requests import Message
from penstock.engine.server.service import as_http_error
from penstock.engine.server.tool_choice import MAX_TOOLS
from penstock.executor.protocol import ModelInfo

T = TypeVar("T")
Item = dict[str, Any]
INPUT: Any = str | list[Item]


class ConversationBuilder:
    """Collects the messages of a chat, each with its place in the client's request. An assistant's reasoning, text and calls
    in a row become one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []

    def build(self, size_bytes: int) -> Conversation:
        """`size_bytes`: of the request, with the stored turns that belong to it."""
        return Conversation(msgspec.convert(self.messages, list[Message]), self.places, size_bytes)

    def add(self, place: str, role: str, **fields: Any) -> None:
        self.messages.append({"role": role, **fields})
        self.places.append(place)

    def say(self, place: str, role: str, content: str | list[dict[str, str]]) -> None:
        if role == "assistant":
            self._assistants(place, "content", "tool_calls")["content"] = content
        else:
            self.add(place, role, content=content)

    def think(self, place: str, text: str) -> None:
        if text:
            self._assistants(place, "content", "tool_calls", "reasoning_content")["reasoning_content"] = text

    def call(self, place: str, call_id: str, name: str, arguments: str | dict[str, Any]) -> None:
        function = {"name": name, "arguments": arguments}
        self._assistants(place).setdefault("tool_calls", []).append({"id": call_id, "function": function})

    def _assistants(self, place: str, *without: str) -> dict[str, Any]:
        """The assistant's message at the end, if it has none of these fields yet; else a new one."""
        if not self.messages or self.messages[-1]["role"] != "assistant" or self.messages[-1].keys() & set(without):
            self.add(place, "assistant")
        return self.messages[-1]


def given_items(raw: Raw, info: ModelInfo) -> list[Item]:
    """Decode `input`, which may be a text or missing, into items that are not yet checked."""
    if bytes(raw) in (b"", b"null"):
        return []
    check_braces("input", raw, info)
    given = decode(INPUT, raw, "input")
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def checked_items(given: list[Item], field: str) -> list[AnyItem]:
    """Convert the client's items, filling in the type of messages that have none."""
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(field, f"{len(given)} given; at most {MAX_MESSAGES} are allowed")
    for place, item in enumerate(given):
        if item.get("type", "message") == "item_reference" or not item.keys() & {"type", "role"}:
            what = "items are not kept by their ids; send the item itself, or previous_response_id"
            raise InvalidRequest(f"{field}[{place}].type", what)
        _check_parts(item, f"{field}[{place}]")
    items = [{name: value for name, value in item.items() if value is not None} for item in given]
    converted: list[AnyItem] = of_kind([{"type": "message", **item} for item in items], list[ITEM], field)
    return converted


def _check_parts(item: Item, field: str) -> None:
    """Refuse images and files by name."""
    for name in ("content", "output"):
        parts = item.get(name)
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("input_image", "input_file", "input_audio", "computer_screenshot"):
                what = f"{kind!r} is not served; this model reads text only"
                raise InvalidRequest(f"{field}.{name}[{place}].type", what)


def to_messages(items: Sequence[tuple[str, AnyItem]], instructions: str | None) -> ConversationBuilder:
    """Turn items, each with its place in the request, into the messages of a chat."""
    chat = ConversationBuilder()
    if instructions:
        chat.add("instructions", "system", content=instructions)
    for place, item in items:
        if isinstance(item, MessageItem):
            chat.say(place, item.role, chat_text(item.content))
        elif isinstance(item, CallItem):
            if item.status == "incomplete":
                continue  # its arguments were cut off
            chat.call(place, item.call_id, item.name, item.arguments)
        elif isinstance(item, ResultItem):
            chat.add(place, "tool", tool_call_id=item.call_id, content=chat_text(item.output))
        elif isinstance(item, ReasoningItem):
            chat.think(place, "\n".join(part.text for part in item.content or item.summary))
    return chat


class _ToolType(msgspec.Struct):
    """The fields of a tool that are read first."""

    type: Any = None


def own_tools(given: Sequence[Raw] | None, kind: type[T], vendors: re.Pattern[str], ignored: list[str]) -> list[T]:
    """Decode the tools that the client runs. Those whose type matches `vendors` run in a vendor's cloud only: they are
    left out, and named in `ignored`."""
    tools: list[T] = []
    if given is not None and len(given) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(given)} given; at most {MAX_TOOLS} are allowed")
    for place, raw in enumerate(given or ()):
        tool_type = decode(_ToolType, raw, f"tools[{place}]").type
        if not isinstance(tool_type, str) or vendors.fullmatch(tool_type) is None:
            tools.append(decode(kind, raw, f"tools[{place}]"))
        elif (name := f"tools:{tool_type}") not in ignored:
            ignored.append(name)
    return tools


def chat_text(content: str | list[TextPart]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text or part.refusal} for part in content]


def of_kind(value: object, kind: Any, field: str) -> Any:
    """A plain object as a struct; raises InvalidRequest."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        within, what = objection(error, kind)
        raise InvalidRequest(field + within, what) from None


@contextmanager
def in_words_of(names: Mapping[str, str]) -> Iterator[None]:
    """Turn the chat's names of fields into those of the API that the request came by, in what is refused."""
    try:
        yield
    except (InvalidRequest, HttpError) as error:
        found = as_http_error(error)
        if found.param is None:
            raise
        name = _renamed(found.param, names)
        message = name + found.message.removeprefix(found.param)
        raise HttpError(found.status, message, param=name, headers=found.headers) from None


def _renamed(field: str, names: Mapping[str, str]) -> str:
    field = field.replace("].function", "]") if field.startswith("tools[") else field
    field = field.partition(".tool_calls")[0]  # the agents' APIs have calls in items or blocks of their own
    old = max((name for name in names if field == name or field.startswith(f"{name}.")), default=None)
    return field if old is None else names[old] + field[len(old) :]

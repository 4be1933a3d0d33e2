"""Validates messages and tools, and converts them to the form that chat templates expect.

Clients use OpenAI's form; templates expect text as one string and call arguments as objects. Errors name the field in
the request. Only JSON data is accepted. Templates without tool support get tools as text; other templates render tools
themselves, in the format that their model was trained on.
"""

import json
from typing import Any

from penstock.engine.invalid_request import InvalidRequest

MAX_ROLE_CHARS = 64
MAX_DEPTH = 64  # levels of nesting

SYSTEM_ROLES = ("system", "developer")

# Field names for a message's reasoning; templates read one of the first two.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]

_HOW = (
    "You can call functions. These are all there are, one a line, with a JSON schema of their parameters:\n"
    "<tools>\n{tools}\n</tools>\n"
    "A call is written like this, and several calls one after the other:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"parameter": "value"}}}}\n</tool_call>'
)


def check_messages(messages: list[Message]) -> list[Message]:
    """Return a copy of the messages as templates expect them: text as one string, call arguments as objects."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", "a list of at least one message is expected")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Message, field: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(field, f"{type(message).__name__} given; an object with role and content is expected")
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise InvalidRequest(f"{field}.role", f"a name of 1 to {MAX_ROLE_CHARS} characters is expected")
    content = _text(message.get("content"), f"{field}.content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
    checked: Message = {"role": role, "content": content, **plain(rest, field)}
    if calls := objects(message.get("tool_calls"), f"{field}.tool_calls"):
        checked["tool_calls"] = [_tool_call(call, f"{field}.tool_calls[{place}]") for place, call in enumerate(calls)]
    reasoning = next((checked[name] for name in REASONING if checked.get(name) is not None), None)
    return checked if reasoning is None else {"thinking": reasoning, **checked, "reasoning_content": reasoning}


def _text(content: object, field: str) -> str:
    """Return the text of an OpenAI `content` field: a string, a list of text parts, or null next to tool calls."""
    if content is None:
        return ""
    if isinstance(content, str):
        return _check_unicode(content, field)
    if not isinstance(content, list):
        raise InvalidRequest(field, f"{type(content).__name__} given; a string or a list of text parts is expected")
    return "\n".join(_part(part, f"{field}[{place}]") for place, part in enumerate(content))


def _part(part: object, field: str) -> str:
    if isinstance(part, str):
        return _check_unicode(part, field)
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text") if isinstance(part, dict) else None
    if kind != "text":
        raise InvalidRequest(f"{field}.type", f"{str(kind)[:40]!r} is not supported; only 'text' is")
    if not isinstance(text, str):
        raise InvalidRequest(f"{field}.text", "a string is expected")
    return _check_unicode(text, f"{field}.text")


def _tool_call(call: dict[str, Any], field: str) -> dict[str, Any]:
    """Decode a call's arguments, which are a JSON string in OpenAI's API and an object in templates."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{field}.function.arguments", "not valid JSON") from None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field}.function.arguments", "the JSON of an object is expected")
    return {**call, "function": {**function, "arguments": plain(arguments, f"{field}.function.arguments")}}


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
        return _check_unicode(value, field)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {str(key): plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, field, depth + 1) for item in value]
    raise InvalidRequest(field, f"holds a {type(value).__name__}; only JSON values are allowed")


def _check_unicode(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"half of a surrogate pair at character {error.start}; not Unicode") from None
    return text


def with_system_first(chat: list[Message], *, takes_later: bool) -> list[Message]:
    """Merge system and developer messages into one at the beginning. With `takes_later`, the template supports later
    system messages, so only leading ones are merged."""

    def is_system(message: Message) -> bool:
        return message["role"] in SYSTEM_ROLES

    num_first = next((place for place, message in enumerate(chat) if not is_system(message)), len(chat))
    system, rest = chat[:num_first], chat[num_first:]
    if not takes_later:
        system = [*system, *filter(is_system, rest)]
        rest = [message for message in rest if not is_system(message)]
    if not system:
        return chat
    content = "\n\n".join(message["content"] for message in system if message["content"])
    return [{**system[0], "content": content}, *rest]


def without_tools(chat: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """Return the conversation for a template without tool support: functions, calls and results become text in the
    Hermes format, which most models have seen."""
    plain: list[Message] = []
    has_results = False  # the last message begins with a result
    for message in chat:
        role, text = message["role"], message["content"]
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if has_results and role in ("tool", "user"):  # many templates refuse two messages of the user in a row
            plain[-1]["content"] += f"\n{text}"
            continue
        has_results = role == "tool"
        calls = "\n".join(map(_call_text, message.get("tool_calls") or []))
        rest = {"role": "user"} if has_results else {key: message[key] for key in message if key != "tool_calls"}
        plain.append({**rest, "content": "\n".join(part for part in (text, calls) if part)})
    return _introduced(plain, tools) if tools else plain


def with_text_as_reasoning(chat: list[Message]) -> list[Message]:
    """Move the text of messages with calls and reasoning to the end of the reasoning, for templates that refuse both."""
    for message in chat:
        if message.get("tool_calls") and message["content"] and message.get("thinking"):
            message["thinking"] = f"{message['thinking']}\n\n{message['content']}"
            message["content"] = ""
    return chat


def with_arguments_as_text(chat: list[Message]) -> list[Message]:
    """Encode call arguments as JSON text, for templates that print them unchanged."""
    for message in chat:
        for call in message.get("tool_calls", ()):
            function = call.get("function")
            if isinstance(function, dict) and not isinstance(function.get("arguments"), str):
                call["function"] = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
    return chat


def _introduced(chat: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Append the functions to a leading system message, or else put them before the first message's text, since not
    every template supports a system message."""
    how = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = chat[0]
    parts = [first["content"], how] if first["role"] == "system" else [how, first["content"]]
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *chat[1:]]


def _call_text(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    text = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"

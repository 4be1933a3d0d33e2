"""Rewrites a conversation for templates that would drop or refuse a part of it.

Templates without tool support get tools as text; other templates render tools themselves, in the format that their model
was trained on.
"""

import json
from typing import Any

from penstock.engine.text.chat_messages import PlainMessage

SYSTEM_ROLES = ("system", "developer")

_HOW = (
    "You can call functions. These are all there are, one a line, with a JSON schema of their parameters:\n"
    "<tools>\n{tools}\n</tools>\n"
    "A call is written like this, and several calls one after the other:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"parameter": "value"}}}}\n</tool_call>'
)


def with_system_first(chat: list[PlainMessage], *, takes_later: bool) -> list[PlainMessage]:
    """Merge system and developer messages into one at the beginning. With `takes_later`, the template supports later
    system messages, so only leading ones are merged."""

    def is_system(message: PlainMessage) -> bool:
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


def without_tools(chat: list[PlainMessage], tools: list[dict[str, Any]] | None) -> list[PlainMessage]:
    """Return the conversation for a template without tool support: functions, calls and results become text in the
    Hermes format, which most models have seen."""
    plain: list[PlainMessage] = []
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


def with_text_as_reasoning(chat: list[PlainMessage]) -> list[PlainMessage]:
    """Move the text of messages with calls and reasoning to the end of the reasoning, for templates that refuse both."""
    for message in chat:
        if message.get("tool_calls") and message["content"] and message.get("thinking"):
            message["thinking"] = f"{message['thinking']}\n\n{message['content']}"
            message["content"] = ""
    return chat


def with_arguments_as_text(chat: list[PlainMessage]) -> list[PlainMessage]:
    """Encode call arguments as JSON text, for templates that print them unchanged."""
    for message in chat:
        for call in message.get("tool_calls", ()):
            function = call["function"]
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return chat


def _introduced(chat: list[PlainMessage], tools: list[dict[str, Any]]) -> list[PlainMessage]:
    """Append the functions to a leading system message, or else put them before the first message's text, since not
    every template supports a system message."""
    how = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = chat[0]
    parts = [first["content"], how] if first["role"] == "system" else [how, first["content"]]
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *chat[1:]]


def _call_text(call: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"

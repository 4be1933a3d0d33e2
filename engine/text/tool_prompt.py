"""Tools for models whose chat template knows none: the functions, the calls and their results as plain text.

The form is that of Hermes, which most models have seen. Templates that know tools write all this themselves, in
the way that their model was trained on.
"""

import json
from typing import Any

Message = dict[str, Any]

_HOW = (
    "You can call functions. These are all there are, one a line, with a JSON schema of their parameters:\n"
    "<tools>\n{tools}\n</tools>\n"
    "A call is written like this, and several calls one after the other:\n"
    '<tool_call>\n{{"name": "the function", "arguments": {{"parameter": "value"}}}}\n</tool_call>'
)


def without_tools(chat: list[Message], tools: list[dict[str, Any]] | None) -> list[Message]:
    """The conversation without anything that only templates with tools understand."""
    plain: list[Message] = []
    for message in chat:
        text = message["content"]
        if message["role"] == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{text}"
                continue
            plain.append({"role": "user", "content": text, "is_result": True})
            continue
        calls = "\n".join(map(_call, message.get("tool_calls") or []))
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        plain.append({**rest, "content": "\n".join(part for part in (text, calls) if part)})
    for message in plain:
        message.pop("is_result", None)
    return _introduced(plain, tools) if tools else plain


def _introduced(chat: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """With the functions in the system message, or before the first text where there is none: not every template
    takes a system message."""
    how = _HOW.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    first = chat[0]
    parts = [first["content"], how] if first["role"] == "system" else [how, first["content"]]
    return [{**first, "content": "\n\n".join(part for part in parts if part)}, *chat[1:]]


def _call(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    text = json.dumps({"name": function.get("name"), "arguments": function.get("arguments")}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"

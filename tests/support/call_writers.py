"""Calls as the chat templates of models write them into a conversation: independent of the table of formats.

The forms are those of the templates that come with the models (or, for those without, of their documentation).
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from penstock.engine.text.tools.call_kinds import ToolFormat
from penstock.engine.text.tools.formats import named
from tests.support.refusals import cases

Call = tuple[str, dict[str, Any]]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _objects(before: str, after: str, join: str, key: str = "arguments") -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        written = (f'{{"name": "{name}", "{key}": {_json(arguments)}}}' for name, arguments in calls)
        return before + join.join(written) + after

    return write


def _each(
    write: Callable[[str, dict[str, Any]], str], before: str, after: str, join: str
) -> Callable[[Sequence[Call]], str]:
    return lambda calls: before + join.join(write(name, arguments) for name, arguments in calls) + after


def _function(break_: str) -> Callable[[str, dict[str, Any]], str]:
    def write(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<parameter={key}>{break_}{_text(value)}{break_}</parameter>\n" for key, value in arguments.items()
        )
        return f"<function={name}>\n{values}</function>"

    return write


def _glm(break_: str) -> Callable[[str, dict[str, Any]], str]:
    def write(name: str, arguments: dict[str, Any]) -> str:
        pairs = (
            f"<arg_key>{key}</arg_key>{break_}<arg_value>{_text(value)}</arg_value>{break_}"
            for key, value in arguments.items()
        )
        return f"{name}{break_}{''.join(pairs)}"

    return write


def _minimax(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f'<parameter name="{key}">{_text(value)}</parameter>\n' for key, value in arguments.items())
    return f'<invoke name="{name}">\n{values}</invoke>'


def _python(literal: Callable[[Any], str]) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: f"{name}({', '.join(f'{key}={literal(value)}' for key, value in arguments.items())})"


def _literal(value: Any) -> str:
    return str(value) if value is None or isinstance(value, bool) else _json(value)


def _gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return quote + value + quote
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(inner, quote)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma_value(inner, quote) for inner in value) + "]"
    return _json(value)


def _gemma(start: str, end: str, quote: str) -> Callable[[Sequence[Call]], str]:
    return lambda calls: "".join(
        f"{start}call:{name}{_gemma_value(arguments, quote)}{end}" for name, arguments in calls
    )


def _deepseek(before: str, after: str, join: str) -> Callable[[Sequence[Call]], str]:
    def write(name: str, arguments: dict[str, Any]) -> str:
        return f"<｜tool▁call▁begin｜>{before.format(name)}{_json(arguments)}{after}<｜tool▁call▁end｜>"

    return _each(write, "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", join)


def _tag(write: Callable[[str, dict[str, Any]], str], tag: str, break_: str) -> Callable[[Sequence[Call]], str]:
    return _each(lambda name, arguments: f"<{tag}>{break_}{write(name, arguments)}{break_}</{tag}>", "", "", break_)


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = dict(cases(__file__, "writers of calls", **globals()))
# The same with values as Python prints them, which is read, but forced of no model.
PRINTED = _each(_python(repr), "<|tool_call_start|>[", "]<|tool_call_end|>", ", ")
_MARKED = {"mistral with args": "[TOOL_CALLS][ARGS]", "phi4_mini_json": "functools["}  # what tells the form of a format
FORMS: dict[str, ToolFormat] = {name: named(name.split()[0], _MARKED.get(name, ""), False) for name in WRITERS}

"""Functions and custom tools, as chats and the agents' APIs share them.

The input of a custom tool is a text instead of JSON. The model is shown a function with one string, `input`, which is read
again from the JSON that the model writes. A regex becomes its `pattern`, which the grammar of calls can enforce. A Lark
grammar is only described to the model: llguidance cannot apply one inside a JSON string.
"""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from penstock.engine.grammar.json_schema import check_pattern
from penstock.engine.text.tools.reader import object_in

_BEGIN = re.compile(r'\s{0,64}+\{\s{0,64}+"input"\s{0,64}+:\s{0,64}+"')
# The complete characters of a JSON string. A character beyond the BMP has two escapes, which are decoded together.
_CHARS = re.compile(
    r'[^"\\]*+(?:(?:\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r'|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})[^"\\]*+)*'
)


class Function(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object; None: the function has no parameters
    strict: bool | None = None  # refuse a schema that a grammar cannot enforce exactly


class TextInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Any text is an input."""


class Grammar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1, max_length=10_000)]


class GrammarFormat(Grammar, frozen=True, tag_field="type", tag="grammar"):
    """A grammar in the Responses API's form; chats nest it."""


class CustomTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="custom"):
    name: str
    description: str | None = None
    format: TextInput | GrammarFormat | None = None


def as_function(name: str, description: str | None, form: TextInput | Grammar | None) -> Function:
    """Return the function that the model is shown for a custom tool whose input has this form."""
    text, description = {"type": "string"}, description or ""
    if isinstance(form, Grammar):
        kind = "Lark grammar" if form.syntax == "lark" else "regular expression"
        description += f"\n\nThe input has to match this {kind}:\n{form.definition}"
        text |= {"pattern": f"^(?:{form.definition})$"} if form.syntax == "regex" else {}
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return Function(name, description.strip(), schema)


async def check_regexes(formats: Mapping[str, TextInput | Grammar | None]) -> None:
    """Raise InvalidRequest for an invalid regex, by the path of its text. llguidance parses it without the GIL, at up to
    30 µs per character."""
    for field, form in formats.items():
        if isinstance(form, Grammar) and form.syntax == "regex":
            await asyncio.to_thread(check_pattern, form.definition, field)


class InputDecoder:
    """Decodes `input` from the JSON of a call's arguments, which arrive in pieces cut anywhere."""

    def __init__(self) -> None:
        self.parts: list[str] = []  # the text so far
        self._rest = ""  # arguments that were not decoded yet
        self._has_begun = False  # the string has begun

    def feed(self, arguments: str, *, is_last: bool = False) -> str:
        """Return the text that more of the arguments completes. If complete arguments do not begin with a string `input`,
        their JSON is the text."""
        self._rest += arguments
        if not self._has_begun and (begin := _BEGIN.match(self._rest)) is not None:
            self._has_begun, self._rest = True, self._rest[begin.end() :]
        text = ""
        if self._has_begun and (chars := _CHARS.match(self._rest)) is not None:
            text, self._rest = json.loads(f'"{chars[0]}"', strict=False), self._rest[chars.end() :]
        elif is_last and object_in(self._rest) is not None:
            text = self._rest
        self.parts.append(text)
        return text

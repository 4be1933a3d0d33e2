"""Custom tools of chats and of the Responses API: checks their regexes, and reads their input, which is a text, from the
JSON that the model writes (tool_schema.as_function)."""

import asyncio
import json
import re
from collections.abc import Mapping

from penstock.engine.grammar.json_schema import check_pattern
from penstock.engine.server.tool_schema import Grammar, TextInput
from penstock.engine.text.tools.reader import object_in

_BEGIN = re.compile(r'\s{0,64}+\{\s{0,64}+"input"\s{0,64}+:\s{0,64}+"')
# The complete characters of a JSON string. A character beyond the BMP has two escapes, which are decoded together.
_CHARS = re.compile(
    r'(?:[^"\\]++|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)


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

"""Converts call arguments in formats other than JSON (formats.py) to JSON incrementally.

A reader is fed text from a position on. It returns how far it has read, the JSON for that text, and whether the
arguments have ended. It reads each character a bounded number of times, and the result does not depend on the pieces.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec

from penstock.engine.text.tools.formats import Parameters, ToolFormat
from penstock.engine.text.tools.scan import (
    MAX_DEPTH,
    MAX_FRAME_CHARS,
    Fed,
    Malformed,
    ObjectScan,
    num_held,
    skip_blank,
)

ALL = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
MAX_KEY_CHARS = 256  # a key of this length or more is malformed
_KEY = re.compile(rf'[^<>"\n]{{0,{MAX_KEY_CHARS}}}+')
_WORD = re.compile(r"""[^\s,:=(){}\[\]<>'"\\]++""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_NAME = re.compile(r"[^\W\d]\w*+")
_STRING = frozenset(("string",))
_NESTED = {"[": "array", "{": "object"}
_CONSTANTS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_TYPES = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
_PLAIN = {"'": re.compile(r"[^'\\]*+"), '"': re.compile(r'[^"\\]*+')}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^xuU0-9]))", re.DOTALL)
_ESCAPE_CHARS = {"x": 4, "u": 6, "U": 10}
_MEANT = dict(zip("ntrbfva/'\"\\", "\n\t\r\b\f\v\a/'\"\\", strict=True)) | {"\n": ""}


class ArgumentsReader(Protocol):
    def feed(self, text: str, at: int) -> Fed:
        """Read from `at` on; raise Malformed, with the JSON found so far, if the text is not arguments."""


def kinds(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types of the values that a schema accepts."""
    return _kinds(schema, root, set()) & ALL or ALL


def _kinds(schema: Any, root: Any, seen: set[str]) -> frozenset[str]:
    """Return the type names in a schema. `seen` holds the references already followed, since they may be circular."""
    if not isinstance(schema, Mapping):
        return ALL
    if isinstance(given := schema.get("type"), (str, list)):
        names = frozenset((given,) if isinstance(given, str) else map(str, given))
        return names | {"integer"} if "number" in names else names
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset(_TYPES[type(value)] for value in values)
    for several in ("anyOf", "oneOf", "allOf"):
        if isinstance(members := schema.get(several), list) and members:
            members = members[:1] if several == "allOf" else members
            return frozenset().union(*(_kinds(member, root, seen) for member in members))
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return ALL
    if reference in seen:
        return frozenset()
    seen.add(reference)
    found = root
    for part in reference.split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return _kinds(found, root, seen)


def typed(text: str, wanted: Collection[str]) -> str:
    """Return the JSON of a value that was written as text, given the types that the schema accepts. Text that is not a
    value of one of the other types becomes a string, even if the schema does not accept strings."""
    body = text.strip()
    if wanted != _STRING:
        body = _CONSTANTS.get(body, body) if "string" not in wanted else body
        is_number = "number" in wanted or ("integer" in wanted and "string" not in wanted)
        if is_number and _NUMBER.fullmatch(body):
            return body  # without decoding, because it may be too large for a float
        try:
            kind = _TYPES[type(msgspec.json.decode(body))]
            if kind in wanted and kind != "string":
                return body
        except (msgspec.DecodeError, RecursionError):
            pass
        if body[:1] in ("{", "[") and "string" not in wanted:  # some templates print lists and objects in Python syntax
            try:
                place, found, is_done = Literals('"', is_value=True).feed(body, 0)
                if is_done and place == len(body) and msgspec.json.decode(found) is not None:
                    return found
            except (Malformed, msgspec.DecodeError, RecursionError):
                pass
    return json.dumps(text, ensure_ascii=False)


def expect(text: str, at: int, words: Collection[str]) -> int | None:
    """Return the position after these words, each with optional whitespace before it; None if more text is needed."""
    start = at
    for word in words:
        at = skip_blank(text, at)
        if at - start > MAX_FRAME_CHARS:
            raise Malformed(start)
        if not text.startswith(word, at):
            if not word.startswith(text[at:]):
                raise Malformed(start)
            return None
        at += len(word)
    return at


def _inside(text: str) -> str:
    """Return text escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class PieceReader(ABC):
    """Base class of readers that parse one piece after the other until the text runs out or the arguments end."""

    def __init__(self, found: str) -> None:
        self._found = [found]
        self._is_done = False

    def feed(self, text: str, at: int) -> Fed:
        try:
            goes_on = True
            while goes_on and not self._is_done:
                at, goes_on = self._piece(text, at)
        except Malformed as error:
            error.found = "".join(self._found)
            raise
        found, self._found = "".join(self._found), []
        return at, found, self._is_done

    @abstractmethod
    def _piece(self, text: str, at: int) -> tuple[int, bool]:
        """Parse one piece; return the position after it, and whether another one may be in the text already."""


class Tagged(PieceReader):
    """Reads arguments whose values are text between marks; the function's schema determines their types."""

    def __init__(self, parameters: Parameters, schema: Mapping[str, Any], end: str) -> None:
        super().__init__("{")
        self._parameters, self._schema, self._end = parameters, schema, end
        self._closer = parameters.after_value.strip()
        self._held = (self._closer, *(("\n" + self._closer,) if parameters.trims else ()))
        self._wanted: frozenset[str] = frozenset()  # accepted types of the current value; empty between values
        self._is_begun = self._is_json = self._is_quoted = False  # state of the current value; inside a JSON string
        self._parts: list[str] = []  # text of the current value; that of a string is passed on at once instead
        self._join = ""

    def _piece(self, text: str, at: int) -> tuple[int, bool]:
        return self._value(text, at) if self._wanted else self._key(text, skip_blank(text, at))

    def _key(self, text: str, at: int) -> tuple[int, bool]:
        if text.startswith(self._end, at):
            self._found.append("}")
            self._is_done = True
            return at, False
        if self._end.startswith(text[at:]):
            return at, False
        place = expect(text, at, self._parameters.before_key.split())
        key = None if place is None else _KEY.match(text, place)
        if key is not None and len(key[0]) == MAX_KEY_CHARS:
            raise Malformed(at)
        if key is None or key.end() == len(text):
            return at, False
        properties, others = self._schema.get("properties"), self._schema.get("additionalProperties")
        schema = properties.get(key[0], others) if isinstance(properties, Mapping) else others
        wanted = kinds(schema, self._schema)
        place = expect(text, key.end(), self._parameters.before_value.split())
        if place is None:
            return at, False
        self._found.append(f"{self._join}{json.dumps(key[0], ensure_ascii=False)}: ")
        self._join, self._wanted, self._is_begun, self._is_quoted = ", ", wanted, False, False
        if wanted == _STRING:
            self._found.append('"')
        return place, True

    def _value(self, text: str, at: int) -> tuple[int, bool]:
        if not self._is_begun:
            start = at + text.startswith("\n", at)
            first = skip_blank(text, start)
            if first == len(text) and first - start <= MAX_FRAME_CHARS:
                return at, False
            at, self._is_begun = start if self._parameters.trims else at, True
            self._is_json = _NESTED.get(text[first : first + 1]) in self._wanted
        stop, end = self._ended(text, at)
        stop -= end > at and self._parameters.trims and text[end - 1] == "\n"
        is_string = self._wanted == _STRING
        (self._found if is_string else self._parts).append(_inside(text[at:stop]) if is_string else text[at:stop])
        if end < 0:
            return stop, False
        self._found.append('"' if is_string else typed("".join(self._parts), self._wanted))
        self._wanted, self._parts = frozenset(), []
        return end + len(self._closer), True

    def _ended(self, text: str, at: int) -> tuple[int, int]:
        """Return the end of the value's text so far, and the position of its mark (outside JSON strings) or -1."""
        while True:
            if self._is_quoted:
                rest = _PLAIN['"'].match(text, at)
                assert rest is not None  # the pattern also matches the empty string
                at = rest.end()
                if text[at : at + 1] in ("", "\\") and len(text) - at < 2:
                    return at, -1
                self._is_quoted = text[at] == "\\"
                at += 1 + self._is_quoted
                if self._is_quoted:
                    continue
            end = text.find(self._closer, at)
            quote = text.find('"', at, len(text) if end < 0 else end) if self._is_json else -1
            if quote < 0:
                return (end, end) if end >= 0 else (len(text) - num_held(text, at, self._held), -1)
            at, self._is_quoted = quote + 1, True


class Literals(PieceReader):
    """Reads arguments written as literals, up to the closing bracket: Python literals, or JSON-like ones whose strings
    are enclosed in `quote`. With `is_value`, reads a single list or object instead of arguments."""

    def __init__(self, quote: str, is_value: bool = False) -> None:
        super().__init__("" if is_value else "{")
        self._quote, self._is_python = quote, quote == '"'
        self._open = [] if is_value else [")" if self._is_python else "}"]  # expected closing brackets
        self._string = ""  # closing quote of the current string; empty outside strings

    def _piece(self, text: str, at: int) -> tuple[int, bool]:
        if at == len(text):
            return at, False
        if self._string:
            return self._python_string(text, at) if self._is_python else self._quoted_string(text, at)
        sign = text[at]
        if sign.isspace():
            return skip_blank(text, at), True
        if self._is_python and sign in "'\"":
            return self._sign(at + 1, '"', string=sign)
        if not self._is_python and self._quote.startswith(text[at : at + len(self._quote)]):
            is_whole = text.startswith(self._quote, at)
            return self._sign(at + len(self._quote), '"', string=self._quote) if is_whole else (at, False)
        if sign in "{[":
            self._open.append("}" if sign == "{" else "]")
            if len(self._open) > MAX_DEPTH:
                raise Malformed(at)
            return self._sign(at + 1, sign)
        if sign in ")}]":
            if not self._open or self._open.pop() != sign:
                raise Malformed(at)
            self._is_done = not self._open
            return self._sign(at + 1, "}" if sign == ")" else sign)
        return self._sign(at + 1, f"{sign} ") if sign in ",:" else self._word(text, at)

    def _sign(self, place: int, found: str, string: str = "") -> tuple[int, bool]:
        self._found.append(found)
        self._string = string
        return place, True

    def _word(self, text: str, at: int) -> tuple[int, bool]:
        """Read a name, a number or a constant; the character after it decides which."""
        found = _WORD.match(text, at)
        place = at if found is None else skip_blank(text, found.end())
        if found is None or place - at > MAX_FRAME_CHARS:
            raise Malformed(at)
        if place == len(text):
            return at, False
        word, is_top = found[0], len(self._open) == 1
        if text[place] == "=" and self._is_python and is_top and _NAME.fullmatch(word):
            return self._sign(place + 1, f"{json.dumps(word, ensure_ascii=False)}: ")
        if text[place] == ":" and not self._is_python and self._open[-1:] == ["}"]:
            return self._sign(place + 1, f"{json.dumps(word, ensure_ascii=False)}: ")
        if word not in _CONSTANTS and not _NUMBER.fullmatch(word):
            raise Malformed(at)
        return self._sign(found.end(), _CONSTANTS.get(word, word))

    def _python_string(self, text: str, at: int) -> tuple[int, bool]:
        plain = _PLAIN[self._string].match(text, at)
        assert plain is not None  # the pattern also matches the empty string
        self._found.append(_inside(plain[0]))
        at = plain.end()
        if at == len(text):
            return at, False
        if text[at] == self._string:
            return self._sign(at + 1, '"')
        escape = _ESCAPE.match(text, at)
        if escape is None:
            if len(text) - at >= _ESCAPE_CHARS.get(text[at + 1 : at + 2], 2):
                raise Malformed(at)
            return at, False
        code = int(escape[1] or escape[3] or "0", 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise Malformed(at)
        letter = escape[4]
        meant = chr(code) if letter is None else _MEANT.get(letter, "\\" + letter)
        # A \u escape is copied unchanged, like in JSON: it may be one half of a surrogate pair.
        self._found.append(f"\\u{escape[2]}" if escape[2] else _inside(meant))
        return escape.end(), True

    def _quoted_string(self, text: str, at: int) -> tuple[int, bool]:
        end = text.find(self._string, at)
        stop = end if end >= 0 else len(text) - num_held(text, at, (self._string,))
        self._found.append(_inside(text[at:stop]))
        return self._sign(end + len(self._string), '"') if end >= 0 else (stop, False)


def arguments_reader(form: ToolFormat, schema: Mapping[str, Any], mark: str) -> ArgumentsReader:
    """Return a reader for the arguments of one call that is written as a name followed by arguments."""
    if form.parameters is None:
        return ObjectScan()
    if form.parameters.quote:
        return Literals(form.parameters.quote)
    return Tagged(form.parameters, schema, (form.written.after_arguments.split() or form.closing(mark))[0])

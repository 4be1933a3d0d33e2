"""Converts call arguments in formats other than JSON (formats.py) to JSON while they arrive.

Each character is read a bounded number of times, and the result does not depend on how the text is split.
"""

import contextlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from penstock.engine.text.tools.scan import (
    MAX_DEPTH,
    MAX_FRAME_CHARS,
    STRING_REST,
    Malformed,
    Source,
    Wait,
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
_CLOSING = {"[": "]", "{": "}", "(": ")"}
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


class Parameters(NamedTuple):
    """The spelling of arguments that are not JSON: one after the other, separated by `join`.

    Without `quote`, a value is the text up to `after_value`, and the schema determines its type. With the quote '"',
    values are Python literals. With any other quote, values are JSON, except that strings are verbatim between two
    quotes and names are unquoted."""

    before_key: str
    before_value: str
    after_value: str = ""
    join: str = ""
    quote: str = ""

    @property
    def trims(self) -> bool:
        """True if a line break at the start or end of a value is not part of it."""
        return self.before_value.endswith("\n")


def kinds(schema: Any, root: Any) -> frozenset[str]:
    """Return the JSON types of the values that a schema accepts."""
    names, pending = set[str](), [schema]
    seen = set[str]()  # the references already followed, since they may be circular
    while pending:
        schema = pending.pop()
        if not isinstance(schema, Mapping):
            return ALL
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        several = next((name for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)), "")
        reference = schema.get("$ref")
        if isinstance(given := schema.get("type"), (str, list)):
            given = [given] if isinstance(given, str) else [*map(str, given)]
            names.update(given, ["integer"] if "number" in given else [])
        elif isinstance(values, list):
            names.update(_TYPES[type(value)] for value in values)
        elif several:
            pending += schema[several][: 1 if several == "allOf" else None]
        elif not isinstance(reference, str):
            return ALL
        elif reference not in seen:
            seen.add(reference)
            pending.append(target(reference, root))
    return ALL & names or ALL


def target(reference: str, root: Any) -> Any:
    """Return the part of a schema that a reference such as "#/$defs/a" names, or None."""
    start, *parts = unquote(reference).split("/")
    found = root if start == "#" else None
    for part in parts:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and len(name) < 10 and int(name) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def followed(root: Any) -> list[Any]:
    """Return a schema and those to which its references lead, up to the one that is in force or to a bound."""
    found = [root]
    while len(found) < MAX_DEPTH and isinstance(following := target(str(found[-1].get("$ref")), root), Mapping):
        found.append(following)
    return found


def typed(text: str, types: Collection[str]) -> str:
    """Return the JSON of a value that was written as text, given the types that the schema accepts. Text that is not a
    value of one of the other types becomes a string, even if the schema does not accept strings."""
    body = text.strip()
    if types != _STRING:
        body = _CONSTANTS.get(body, body) if "string" not in types else body
        is_number = "number" in types or ("integer" in types and "string" not in types)
        if is_number and _NUMBER.fullmatch(body):
            return body  # without decoding, because it may be too large for a float
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            kind = _TYPES[type(msgspec.json.decode(body))]
            if kind in types and kind != "string":
                return body
        if body[:1] in ("{", "[") and "string" not in types:  # some templates print lists and objects in Python syntax
            source = Source(body)
            with contextlib.suppress(Malformed, msgspec.DecodeError, RecursionError):
                is_done = next(literals(source, '"', ""), True)
                if is_done and source.at == len(body) and msgspec.json.decode("".join(source.json)) is not None:
                    return "".join(source.json)
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    """Return text escaped for the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def tagged(source: Source, parameters: Parameters, schema: Mapping[str, Any], end: str) -> Wait[None]:
    """Read arguments whose values are text between marks, up to `end`; the schema determines their types."""
    form = followed(schema)[-1]
    properties, others = form.get("properties"), form.get("additionalProperties")
    before = "{"
    while True:
        position = yield from source.sign()
        if (yield from source.passed(position, end)) > position:
            source.take(position, "}" if before == ", " else "{}")
            return
        yield from source.match(*parameters.before_key.split())
        key = _KEY.match(source.text, source.at)
        while key is not None and key.end() == len(source.text):
            yield
            key = _KEY.match(source.text, source.at)
        if key is None or len(key[0]) == MAX_KEY_CHARS:
            raise Malformed(source.at)
        source.take(key.end())
        yield from source.match(*parameters.before_value.split())
        source.take(source.at, f"{before}{json.dumps(key[0], ensure_ascii=False)}: ")
        schema_of_value = properties.get(key[0], others) if isinstance(properties, Mapping) else others
        yield from _tagged_value(source, parameters, kinds(schema_of_value, schema))
        before = ", "


def _tagged_value(source: Source, parameters: Parameters, types: frozenset[str]) -> Wait[None]:
    """Read a value up to its closing mark. A string is passed on while it arrives, other values when they are complete.
    In a list or an object, the mark does not count within a JSON string."""
    closer, is_string = parameters.after_value.strip(), types == _STRING
    held = (closer, *(("\n" + closer,) if parameters.trims else ()))
    while True:
        start = source.at + source.text.startswith("\n", source.at)
        first = skip_blank(source.text, start)
        if first < len(source.text) or first - start > MAX_FRAME_CHARS:
            break
        yield from source.wait()
    is_json, is_quoted = _NESTED.get(source.text[first : first + 1]) in types, False
    source.take(start if parameters.trims else source.at, '"' if is_string else "")
    parts: list[str] = []
    while True:
        text, at = source.text, source.at
        position, end, is_quoted = _closing_mark(text, at, closer, is_json, is_quoted)
        stop = position - (0 if end < 0 else end > at and parameters.trims and text[end - 1] == "\n")
        if end < 0 and not is_quoted:
            stop -= num_held(text, at, held)
        parts += [] if is_string else [text[at:stop]]
        source.take(stop, _inside(text[at:stop]) if is_string else "")
        if end >= 0:
            source.take(end + len(closer), '"' if is_string else typed("".join(parts), types))
            return
        yield from source.wait()


def _closing_mark(text: str, at: int, closer: str, is_json: bool, is_quoted: bool) -> tuple[int, int, bool]:
    """Return how far the value goes, the position of its mark (outside JSON strings) or -1, and whether the text ends
    within a JSON string."""
    while True:
        if is_quoted:
            rest = STRING_REST.match(text, at)
            assert rest is not None  # the pattern also matches the empty string
            at = rest.end()
            if not text.startswith('"', at):
                return at, -1, True
            at, is_quoted = at + 1, False
        end = text.find(closer, at)
        quote = text.find('"', at, len(text) if end < 0 else end) if is_json else -1
        if quote < 0:
            return len(text) if end < 0 else end, end, False
        at, is_quoted = quote + 1, True


def literals(source: Source, quote: str, closing: str) -> Wait[None]:
    """Read arguments written as literals, up to the bracket `closing`: Python literals, or JSON-like ones whose strings
    are enclosed in `quote`. Without `closing`, read a single list or object instead of arguments."""
    is_python, stack = quote == '"', [*closing]  # the expected closing brackets
    source.take(source.at, "{" if closing else "")
    while True:
        text, at = source.text, source.at
        sign = text[at : at + 1]
        is_cut = not is_python and quote.startswith(text[at:]) and text[at:] != quote
        if not sign or is_cut:
            yield from source.wait()
        elif sign.isspace():
            source.take(skip_blank(text, at))
        elif is_python and sign in "'\"":
            source.take(at + 1, '"')
            yield from _python_string(source, sign)
        elif not is_python and text.startswith(quote, at):
            source.take(at + len(quote), '"')
            yield from _verbatim_string(source, quote)
        elif sign in "{[":
            if len(stack) == MAX_DEPTH:
                raise Malformed(at)
            stack.append(_CLOSING[sign])
            source.take(at + 1, sign)
        elif sign in ")}]":
            if not stack or stack.pop() != sign:
                raise Malformed(at)
            source.take(at + 1, "}" if sign == ")" else sign)
            if not stack:
                return
        elif sign in ",:":
            source.take(at + 1, f"{sign} ")
        else:
            yield from _word(source, stack, is_python)


def _word(source: Source, stack: list[str], is_python: bool) -> Wait[None]:
    """Read a name, a number or a constant; the character after it decides which."""
    while True:
        text, at = source.text, source.at
        found = _WORD.match(text, at)
        place = at if found is None else skip_blank(text, found.end())
        if found is None or place - at > MAX_FRAME_CHARS:
            raise Malformed(at)
        if place < len(text):
            break
        yield from source.wait()
    word = found[0]
    if is_python:
        is_name = text[place] == "=" and len(stack) == 1 and _NAME.fullmatch(word) is not None
    else:
        is_name = text[place] == ":" and stack[-1:] == ["}"]
    if is_name:
        source.take(place + 1, f"{json.dumps(word, ensure_ascii=False)}: ")
    elif word in _CONSTANTS or _NUMBER.fullmatch(word):
        source.take(found.end(), _CONSTANTS.get(word, word))
    else:
        raise Malformed(at)


def _python_string(source: Source, quote: str) -> Wait[None]:
    while True:
        text = source.text
        plain = _PLAIN[quote].match(text, source.at)
        assert plain is not None  # the pattern also matches the empty string
        source.take(plain.end(), _inside(plain[0]))
        at = source.at
        escape = _ESCAPE.match(text, at)
        if text.startswith(quote, at):
            source.take(at + 1, '"')
            return
        if escape is not None:
            source.take(escape.end(), _unescaped(escape, at))
        elif len(text) - at >= _ESCAPE_CHARS.get(text[at + 1 : at + 2], 2):
            raise Malformed(at)
        else:
            yield from source.wait()


def _unescaped(escape: re.Match[str], at: int) -> str:
    """Return a Python escape as the inside of a JSON string."""
    if escape[2]:  # copied unchanged, like in JSON: it may be one half of a surrogate pair
        return f"\\u{escape[2]}"
    if (letter := escape[4]) is not None:
        return _inside(_MEANT.get(letter, "\\" + letter))
    code = int(escape[1] or escape[3], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise Malformed(at)
    return _inside(chr(code))


def _verbatim_string(source: Source, quote: str) -> Wait[None]:
    while True:
        text, at = source.text, source.at
        end = text.find(quote, at)
        stop = end if end >= 0 else len(text) - num_held(text, at, (quote,))
        source.take(stop, _inside(text[at:stop]))
        if end >= 0:
            source.take(end + len(quote), '"')
            return
        yield from source.wait()

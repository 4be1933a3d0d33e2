"""Prepares JSON schemas for llguidance, which enforces every keyword of a schema or refuses the schema.

A copy of the schema is adjusted where llguidance differs from JSON Schema: an unknown `format` is an annotation in JSON
Schema but an error in llguidance, and brackets in patterns follow ECMA 262. Values with characters that JSON can only
write as \\u00xx are refused, because answers never contain such escapes. llguidance options are removed.
"""

import json
import re
from typing import Any

import msgspec

from penstock.engine.grammar.library import shortened
from penstock.engine.http.errors import clip
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import check_depth

# Compact, one space, or indented. Unbounded, a model sampled at a high temperature can write whitespace until it reaches
# max_tokens, and its output is not valid JSON.
WHITESPACE = r"( |\n[ \t]{0,32})?"
# No \u: a property name written with such an escape would count as a name that the schema does not mention.
ESCAPES = 'nrbtf\\"'
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# Removed, so that descriptions of tools do not count towards the size of a grammar.
_ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "$comment", "x-guidance"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_UNWRITABLE = re.compile("[\0-\x07\x0b\x0e-\x1f\x7f]")  # llguidance would silently drop them from a fixed text
_PIECE = re.compile(r"\\.|\[\^?|.", re.DOTALL)  # of a pattern: an escape, an opening bracket or a character
_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_TRANSLATED = {".": r"[^\n\r\x{2028}\x{2029}]", r"\s": f"[{_SPACE}]", r"\S": f"[^{_SPACE}]"}


def prepared(schema: Any, field: str, name: str = "") -> dict[str, Any]:
    """Return the schema, which may be JSON text, adjusted for llguidance; raise InvalidRequest naming `field`.

    The schema is not compiled here: only the threads of `Compiler` have a stack large enough for a hostile one. `name`
    is the owner of the schema, for error messages.
    """
    place = f"{name}: " if name else ""
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except msgspec.DecodeError as error:
            raise InvalidRequest(field, f"not valid JSON: {error}") from None
        except RecursionError:
            raise InvalidRequest(field, "the JSON is nested too deeply") from None
    if isinstance(schema, dict):
        check_depth(field, schema)
        try:
            schema = _adjusted(schema)
        except ValueError as error:
            raise InvalidRequest(field, f"{place}{error}") from None
    elif schema is False:
        raise InvalidRequest(field, f"{place}the schema 'false' accepts no answer at all")
    elif schema is not True:
        raise InvalidRequest(field, f"{place}{type(schema).__name__} given; a JSON schema is an object, true or false")
    found: dict[str, Any] = {} if schema is True else schema
    return found


def guided_json(schema: dict[str, Any], **options: Any) -> str:
    """Return a prepared schema as JSON text with llguidance's `options`."""
    return json.dumps({**schema, "x-guidance": {"json_allowed_escapes": ESCAPES, **options}}, ensure_ascii=False)


def lark_json(schema: dict[str, Any], **options: Any) -> str:
    """Return a prepared schema as a Lark expression."""
    return f"%json {guided_json(schema, **options)}"


def check_pattern(pattern: str, field: str) -> None:
    """Raise InvalidRequest if llguidance cannot parse a pattern of a schema. Only compiling it shows if it is too large."""
    from llguidance import LLMatcher

    schema = prepared({"type": "string", "pattern": pattern}, field)
    if error := LLMatcher.validate_grammar(f"start: {lark_json(schema)}"):
        what = f"{shortened(error).rpartition('error: ')[2]}; a regular expression without look-around is allowed"
        raise InvalidRequest(field, f"{clip(pattern)!r}: {what}")


def _adjusted(schema: Any) -> Any:
    """Return a copy of the schema adjusted for llguidance. The value of an unknown keyword is treated as a schema,
    because a reference may point into it. Raise ValueError for a value that cannot be written."""
    if isinstance(schema, list):
        return [_adjusted(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        is_unknown_format = keyword == "format" and not (isinstance(value, str) and value in FORMATS)
        # llguidance refuses uniqueItems with any value.
        if keyword in _ANNOTATIONS or is_unknown_format or (keyword == "uniqueItems" and value is False):
            continue
        if keyword in ("const", "enum"):
            if (unwritable := _UNWRITABLE.search(_text(value))) is not None:
                raise ValueError(f"{keyword}: {unwritable[0]!r} cannot be written without an escape")
            found[keyword] = value
        elif keyword == "pattern" and isinstance(value, str):
            found[keyword] = _pattern(value)
        elif keyword in _NAMED and isinstance(value, dict):
            names = map(_pattern, value) if keyword == "patternProperties" else iter(value)
            found[keyword] = {name: _adjusted(inner) for name, inner in zip(names, value.values(), strict=True)}
        else:
            found[keyword] = _adjusted(value)
    if "oneOf" in found:
        # To see that the schemas exclude each other, llguidance follows references only if the oneOf has a sibling
        # keyword that is not an annotation. This one has no effect on answers.
        found.setdefault("discriminator", {})
    return found


def _pattern(pattern: str) -> str:
    """Translate a pattern from ECMA 262 to Rust, where `.` and `\\s` differ and brackets may contain operators."""
    parts, is_in_brackets = [], False
    for piece in _PIECE.findall(pattern):
        if piece == "\\":
            raise ValueError(f"pattern {pattern[:100]!r} ends in a backslash")
        if not is_in_brackets:
            parts.append(_TRANSLATED.get(piece, piece))
            is_in_brackets = piece[0] == "["
        elif piece == r"\s":
            parts.append(_SPACE)
        else:
            parts.append("\\" + piece if piece[0] in "[&~" else piece)
            is_in_brackets = piece != "]"
    return "".join(parts)


def _text(value: Any) -> str:
    """Return all strings and keys of a JSON value, concatenated."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(key + _text(inner) for key, inner in value.items())
    return "".join(map(_text, value)) if isinstance(value, list) else ""

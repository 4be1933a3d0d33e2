"""Prepares JSON schemas for llguidance, which enforces every keyword of a schema or refuses the schema.

A copy of the schema is adjusted where llguidance differs from JSON Schema: an unknown `format` is an annotation in JSON
Schema but an error in llguidance, and patterns are translated from ECMA 262 (ecma.py). Values with characters that JSON
can only write as \\u00xx are refused, because answers never contain such escapes. llguidance options are removed.
"""

import json
from typing import Any

import msgspec

from penstock.engine.grammar.ecma import UNWRITABLE, translated
from penstock.engine.sampling_params import InvalidRequest, check_depth

WHITESPACE = r"( |\n[ \t]{0,32})?"  # compact, one space, or indented
# No \u: a property name written with such an escape would count as a name that the schema does not mention.
ESCAPES = 'nrbtf\\"'
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# Removed, so that descriptions of tools do not count towards the size of a grammar.
_ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "$comment"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


class _NotHeld(Exception):
    """Raised for a keyword whose value cannot be enforced by a grammar."""


def parsed(value: str | dict[str, Any] | bool, field: str) -> Any:
    """Return the value, decoded from JSON if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        found = msgspec.json.decode(value)
    except msgspec.DecodeError as error:
        raise InvalidRequest(field, f"not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest(field, "the JSON is nested too deeply") from None
    if isinstance(found, (dict, list)):
        check_depth(field, found)
    return found


def prepared(schema: Any, field: str, lenient: bool = False, name: str = "") -> dict[str, Any]:
    """Return the schema adjusted for llguidance; raise InvalidRequest naming `field`.

    The schema is not compiled here: only the threads of `Compiler` have a stack large enough for a hostile one.
    `lenient` drops keywords that cannot be enforced. `name` is the owner of the schema, for error messages.
    """
    place = f"{name}: " if name else ""
    if isinstance(schema, dict):
        check_depth(field, schema)
        try:
            schema = _adjusted(schema, lenient)
        except _NotHeld as error:
            raise InvalidRequest(field, f"{place}{error}") from None
    elif not isinstance(schema, bool):
        raise InvalidRequest(field, f"{place}{type(schema).__name__} given; a JSON schema is an object, true or false")
    found: dict[str, Any] = {"enum": []} if schema is False else {} if schema is True else schema
    return found


def lark_json(
    schema: Any, field: str, lenient: bool = False, name: str = "", coerce_one_of: bool = False, **options: Any
) -> str:
    """Return the schema as a Lark expression. `options` are passed to llguidance."""
    found = prepared(schema, field, lenient, name)
    return lark_prepared(found, lenient=lenient, coerce_one_of=lenient or coerce_one_of, **options)


def lark_prepared(schema: dict[str, Any], **options: Any) -> str:
    text = json.dumps({**schema, "x-guidance": {"json_allowed_escapes": ESCAPES, **options}}, ensure_ascii=False)
    return "%json " + text.replace("::=", ":\\u003a=")  # "::=" would make the grammar look like another dialect


def _adjusted(schema: Any, lenient: bool) -> Any:
    """Return a copy of the schema adjusted for llguidance. The value of an unknown keyword is treated as a schema,
    because a reference may point into it."""
    if isinstance(schema, list):
        return [_adjusted(member, lenient) for member in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for keyword, value in schema.items():
        if (
            keyword == "x-guidance"
            or keyword in _ANNOTATIONS
            or (keyword == "format" and not (isinstance(value, str) and value in FORMATS))
        ):
            continue
        if keyword == "uniqueItems" and value is False:
            continue  # llguidance refuses the keyword with any value
        try:
            found[keyword] = _keyword(keyword, value, lenient)
        except _NotHeld:
            if not lenient:
                raise
    if "oneOf" in found:
        # To see that the schemas exclude each other, llguidance follows references only if the oneOf has a sibling
        # keyword that is not an annotation. This one has no effect on answers.
        found.setdefault("discriminator", {})
    return found


def _keyword(keyword: str, value: Any, lenient: bool) -> Any:
    if keyword in ("const", "enum"):
        return _writable(keyword, value)
    if isinstance(value, int):
        _check_integers(keyword, value)
    if keyword == "pattern" and isinstance(value, str):
        return _pattern(value)
    if keyword in _NAMED and isinstance(value, dict):
        names = map(_pattern, value) if keyword == "patternProperties" else iter(value)
        return {name: _adjusted(inner, lenient) for name, inner in zip(names, value.values(), strict=True)}
    return _adjusted(value, lenient)


def _pattern(pattern: str) -> str:
    try:
        return translated(pattern)
    except ValueError as error:
        raise _NotHeld(f"pattern {pattern[:100]!r}: {error}") from None


def _check_integers(keyword: str, value: Any) -> None:
    """Raise _NotHeld for an integer beyond 64 bits, which llguidance would read as a float."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for member in value:
            if not isinstance(member, str):
                _check_integers(keyword, member)
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise _NotHeld(f"{keyword}: an integer beyond 64 bits")


def _writable(keyword: str, value: Any) -> Any:
    """Return the value of `const` or `enum` without members that need a \\u escape; raise _NotHeld if none is left."""
    _check_integers(keyword, value)
    values = value if keyword == "enum" and isinstance(value, list) else [value]
    found = [value for value in values if UNWRITABLE.isdisjoint(_text(value))]
    if values and not found:
        raise _NotHeld(f"{keyword}: no value can be written without a control character")
    return value if keyword == "const" else found


def _text(value: Any) -> str:
    """Return all strings and keys of a JSON value, concatenated."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(key + _text(inner) for key, inner in value.items())
    return "".join(map(_text, value)) if isinstance(value, list) else ""

"""Prepares JSON schemas for llguidance, which compiles them: it holds an answer to every keyword, or refuses the schema.

What stands between the two standards is adjusted here, in a copy: an unknown `format` is an annotation in JSON Schema but an
error in llguidance, patterns are ECMA 262's (ecma.py), and values with characters that JSON can only write as \\u00xx are
refused, because answers never contain such an escape. Options of llguidance's own inside a schema have no effect.
"""

import json
from typing import Any

import msgspec

from penstock.engine.grammar.ecma import UNWRITABLE, translated
from penstock.engine.sampling_params import InvalidRequest, check_depth

WHITESPACE = r"( |\n[ \t]{0,32})?"  # compact, one space, or indented
# No \u: a property name spelled with it would pass for a name that the schema does not mention.
ESCAPES = 'nrbtf\\"'
FORMATS = frozenset(("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
# Left out, so that what tools say in prose does not count towards the size of a grammar.
_ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "$comment"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


class _NotHeld(Exception):
    """A keyword's value that no grammar can hold an answer to."""


def parsed(value: str | dict[str, Any] | bool, field: str) -> Any:
    """Decode JSON that was given as text."""
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
    """Return the schema as llguidance takes it; raise InvalidRequest naming `field`. Whether llguidance compiles it is found out
    by the `Compiler`, whose threads have the stack for hostile ones.

    `lenient` leaves out what cannot be held. `name` says whose schema it is.
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
    """Return a schema as part of a Lark rule. `options` are llguidance's."""
    found = prepared(schema, field, lenient, name)
    return lark_prepared(found, lenient=lenient, coerce_one_of=lenient or coerce_one_of, **options)


def lark_prepared(schema: dict[str, Any], **options: Any) -> str:
    text = json.dumps({**schema, "x-guidance": {"json_allowed_escapes": ESCAPES, **options}}, ensure_ascii=False)
    return "%json " + text.replace("::=", ":\\u003a=")  # "::=" in a grammar would be taken for another dialect


def _adjusted(schema: Any, lenient: bool) -> Any:
    """Copy a schema with what llguidance reads differently adjusted. A keyword that is not known is read as if its value
    were a schema, because a reference may lead into it."""
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
            continue  # llguidance refuses the keyword whatever it says
        try:
            found[keyword] = _keyword(keyword, value, lenient)
        except _NotHeld:
            if not lenient:
                raise
    if "oneOf" in found:
        # llguidance follows references to see that the schemas exclude each other only if some keyword that is not an
        # annotation stands beside them. This one holds nothing.
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
    """Return the values of an enumeration that can be written without a \\u escape."""
    _check_integers(keyword, value)
    values = value if keyword == "enum" and isinstance(value, list) else [value]
    found = [value for value in values if UNWRITABLE.isdisjoint(_text(value))]
    if values and not found:
        raise _NotHeld(f"{keyword}: no value can be written without a control character")
    return value if keyword == "const" else found


def _text(value: Any) -> str:
    """Return all the text in a value of JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "".join(key + _text(inner) for key, inner in value.items())
    return "".join(map(_text, value)) if isinstance(value, list) else ""

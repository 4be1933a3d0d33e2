"""Which schemas no finite value keeps to: those that require themselves. llguidance would write on without end.

Of every definition the kinds of values that can be written to their end are found as a least fixed point. Where that
cannot be decided, a schema is taken to have an end.
"""

from collections.abc import Iterator
from typing import Any

from penstock.engine.grammar.opposites import TYPES, subschemas

ROOT = "#"
MAX_ROUNDS = 8  # definitions come before what they refer to and are looked at from the last, so few suffice

Kinds = frozenset[str]


def without_endless(schemas: dict[str, Any]) -> bool:
    """Let nothing keep to those that cannot end, in place. `schemas`: the root and the definitions, as they are passed
    on, by what refers to them. False: the root is one of them."""
    most, least = _settled(schemas, frozenset(TYPES)), _settled(schemas, frozenset())
    if least == most or least is None or most is None:
        return True
    for node in [node for schema in schemas.values() for node in _nodes(schema)]:
        if node is not schemas[ROOT] and not _kinds(node, least):
            node.clear()
            node["anyOf"] = []
    return bool(least[ROOT]) or not most[ROOT]


def _settled(schemas: dict[str, Any], start: Kinds) -> dict[str, Kinds] | None:
    found = dict.fromkeys(schemas, start)
    for _ in range(MAX_ROUNDS):
        before = dict(found)
        for name in reversed(schemas):
            found[name] = _kinds(schemas[name], found)
        if found == before:
            return found
    return None


def _kinds(schema: Any, known: dict[str, Kinds]) -> Kinds:
    """The types of which it may have a value."""
    if isinstance(schema, bool):
        return frozenset(TYPES if schema else ())
    found = set(TYPES)
    if "type" in schema:
        given = schema["type"]
        names = given if isinstance(given, list) else [given]
        found &= {"number" if name == "integer" else name for name in names}
    if "$ref" in schema:
        found &= known[schema["$ref"]]
    for inner in schema.get("allOf", ()):
        found &= _kinds(inner, known)
    if "anyOf" in schema:
        found &= frozenset().union(*(_kinds(inner, known) for inner in schema["anyOf"]))
    for kind, needed in (("object", _required), ("array", _items)):
        if kind in found and not all(_kinds(inner, known) for inner in needed(schema)):
            found.remove(kind)
    return frozenset(found)


def _required(schema: dict[str, Any]) -> Iterator[Any]:
    properties = schema.get("properties", {})
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    return (properties.get(name, others) for name in schema.get("required", ()))


def _items(schema: dict[str, Any]) -> list[Any]:
    """Those that an array must have."""
    items = schema.get("items", True)
    first, rest = (items, schema.get("additionalItems", True)) if isinstance(items, list) else ([], items)
    first = schema.get("prefixItems", first)
    at_least = schema.get("minItems", 0)
    return [*first[:at_least], *([rest] if at_least > len(first) else [])]


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for inner in subschemas(schema):
            yield from _nodes(inner)

"""Checks a text against a JSON schema, as far as the schemas of our own cases need it."""

import json
from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "integer": (int,),
    "number": (int, float),
}


def errors_of(text: str, schema: Mapping[str, Any]) -> str:
    """Return the first violation of the schema, or an empty text."""
    try:
        return _violation(json.loads(text), schema, schema)
    except ValueError as error:
        return f"not JSON ({error})"


def _violation(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return _violation(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        found = [_violation(value, each, root) for each in schema["anyOf"]]
        return "" if "" in found else f"none of anyOf: {found}"
    if value not in schema.get("enum", [value]):
        return f"{value!r} is none of {schema['enum']}"
    kind = schema.get("type")
    is_of_kind = kind is None or (isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)))
    if not is_of_kind:
        return f"{value!r} is no {kind}"
    if isinstance(value, str | list):
        low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
            return f"{value!r} has a length of {len(value)}"
    if kind in ("integer", "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{value!r} is out of range"
    if isinstance(value, list):
        return next(filter(None, (_violation(each, schema.get("items", {}), root) for each in value)), "")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        missing = [name for name in schema.get("required", ()) if name not in value]
        extra = [name for name in value if name not in properties and schema.get("additionalProperties") is False]
        if missing or extra:
            return f"missing {missing}, not allowed {extra}"
        inner = (_violation(each, properties.get(name, {}), root) for name, each in value.items())
        return next(filter(None, inner), "")
    return ""

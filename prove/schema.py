"""The JSON schemas of our own requests, and a check of a text against them that supports what they need."""

from collections.abc import Mapping
from typing import Any

from .answers import loads
from .tables import load_table

TOOL_TOKENS = 160  # most of a call
_TABLE = load_table("schemas")
SCHEMA: dict[str, Any] = _TABLE["counted"]
FORMATTED = {"type": "json_schema", "json_schema": {"name": "counted", "schema": SCHEMA}}
TOOLS: dict[str, dict[str, Any]] = _TABLE["tools"]
# The fields of a chat that force a call of a tool.
FORCED: dict[str, dict[str, Any]] = {
    name: {
        "tools": [{"type": "function", "function": {"name": name, "parameters": parameters}}],
        "tool_choice": {"type": "function", "function": {"name": name}},
        "max_tokens": TOOL_TOKENS,
    }
    for name, parameters in TOOLS.items()
}
TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None), "integer": int}


def errors_of(text: str, schema: Mapping[str, Any]) -> str:
    """Return the first violation of the schema, or an empty text."""
    try:
        return _violation(loads(text.encode()), schema, schema)
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
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)  # 1.0 is an integer in JSON schemas
    if kind and not (isinstance(value, TYPES[kind]) and isinstance(value, bool) == (kind == "boolean")):
        return f"{value!r} is no {kind}"
    if isinstance(value, str | list):
        low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
            return f"{value!r} has a length of {len(value)}"
    if kind == "integer" and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
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

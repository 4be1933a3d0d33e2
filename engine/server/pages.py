"""Describes the API: generates an OpenAPI document from the structs, and an HTML page from that document.

The page has no scripts and loads nothing, so it works offline, and its content security policy forbids all loading.
"""

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import msgspec

import penstock
from penstock.engine.server.endpoint import PostRoute
from penstock.engine.server.requests import Message

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
    "x-content-type-options": "nosniff",
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
code { font: 14px ui-monospace, monospace } table { border-collapse: collapse; width: 100% }
td, th { text-align: left; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; vertical-align: top }
h2 { margin-top: 2.5rem; font-size: 1.1rem }
"""

_TEXT = {"type": "string"}


def openapi(
    posts: Sequence[PostRoute], others: Iterable[tuple[str, str]], error: type[msgspec.Struct]
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes. `others`: methods and paths of the routes without a schema."""
    types = [kind for post in posts for kind in (post.takes, post.gives, post.streams) if kind] + [Message, error]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refused = {"description": "An error", "content": _content(error)}
    paths: dict[str, Any] = {}
    for method, path in others:
        shown = path.replace(":path", "")
        names = re.findall(r"{(\w+)}", shown)
        paths.setdefault(shown, {})[method.lower()] = {
            "parameters": [{"name": each, "in": "path", "required": True, "schema": _TEXT} for each in names],
            "responses": {"200": {"description": "OK"}, "4XX": refused},
        }
    for post in posts:
        replies = _content(post.gives)
        if post.streams is not None:
            replies |= _content(post.streams, "text/event-stream")
        paths.setdefault(post.path, {})["post"] = {
            "summary": (post.handler.__doc__ or "").strip(),
            "requestBody": {"required": True, "content": _content(post.takes)},
            "responses": {"200": {"description": "OK", "content": replies}, "4XX": refused, "5XX": refused},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock", "version": penstock.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }


def docs(document: dict[str, Any]) -> str:
    """Return the document as an HTML page that lists each route with a table of its request's fields."""
    schemas = document["components"]["schemas"]
    parts = [f"<h1>Penstock {escape(document['info']['version'])}</h1>"]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('summary', ''))}</p>")
            if "requestBody" in operation:
                reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
                parts.append(_fields(schemas[reference.rpartition("/")[2]]))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>Penstock API</title>'
        f"<style>{_STYLE}</style><body>{''.join(parts)}</body></html>"
    )


def _content(kind: type[msgspec.Struct], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(_type(field))}</td>"
        f"<td>{'required' if name in required else ''}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    return f"<table><tr><th>Field</th><th>Type</th><th></th></tr>{''.join(rows)}</table>"


def _type(field: dict[str, Any]) -> str:
    """Describe a schema in a few words, without null, which every optional field accepts."""
    if "$ref" in field:
        return str(field["$ref"]).rpartition("/")[2]
    if "anyOf" in field:
        return " or ".join(_type(choice) for choice in field["anyOf"] if choice.get("type") != "null")
    if "enum" in field:
        return " or ".join(map(repr, field["enum"]))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))

"""Generates the OpenAPI document of the API from the structs of its requests and replies."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

import penstock
from penstock.engine.server.endpoint import PostRoute
from penstock.engine.server.requests import Message

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


def _content(kind: type[msgspec.Struct], media_type: str = "application/json") -> dict[str, Any]:
    return {media_type: {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}

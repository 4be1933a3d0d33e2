"""The table of all routes, and the handlers of the GET routes."""

import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import penstock
from penstock.engine.http.errors import ErrorReply
from penstock.engine.http.page.document import document
from penstock.engine.server import control, scoring
from penstock.engine.server import requests as schema
from penstock.engine.server import responses as reply
from penstock.engine.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.engine.server.agents import items_api, messages_api
from penstock.engine.server.agents.block_writer import MessageReply
from penstock.engine.server.agents.item_writer import ItemsReply
from penstock.engine.server.agents.items_schema import ResponsesRequest
from penstock.engine.server.agents.messages_schema import CountRequest, MessagesRequest
from penstock.engine.server.chat import chat
from penstock.engine.server.completions import completions
from penstock.engine.server.endpoint import Endpoint, Handler, PostRoute
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.service import Service
from penstock.engine.server.tokens import detokenize, load_adapter, reset_prefix_cache, tokenize, unload_adapter

Shown = Callable[[Service], dict[str, Any]]

RESPONSE = "/v1/responses/{response_id}"
POSTS = (
    PostRoute("/v1/chat/completions", chat, schema.ChatRequest, reply.Chat, reply.ChatChunk, takes_ids=True),
    PostRoute(
        "/v1/completions", completions, schema.CompletionRequest, reply.Completion, reply.Completion, takes_ids=True
    ),
    PostRoute("/v1/embeddings", scoring.embeddings, schema.EmbeddingRequest, reply.Embeddings),
    PostRoute("/tokenize", tokenize, schema.TokenizeRequest, reply.Tokens),
    PostRoute("/detokenize", detokenize, schema.DetokenizeRequest, reply.Detokenized),
    PostRoute("/reset_prefix_cache", reset_prefix_cache, schema.ResetRequest, reply.Status, takes_none=True),
    *scoring.ROUTES,
    PostRoute("/v1/responses", items_api.responses, ResponsesRequest, ItemsReply, ItemsReply),
    PostRoute("/v1/messages", messages_api.messages, MessagesRequest, MessageReply, MessageReply),
    PostRoute("/v1/messages/count_tokens", messages_api.count_tokens, CountRequest, messages_api.CountReply),
)
WITHOUT_SCHEMA: tuple[tuple[str, str, Handler], ...] = (
    ("GET", RESPONSE, items_api.get),
    ("DELETE", RESPONSE, items_api.delete),
)
ADAPTER_POSTS = (
    PostRoute("/v1/load_lora_adapter", load_adapter, LoadAdapterRequest, reply.Status),
    PostRoute("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest, reply.Status),
)


def routes(service: Service, kv_events: KvEvents) -> list[Route]:
    posts, shown = (*POSTS, *(ADAPTER_POSTS if service.config.allow_lora_updates else ())), {}
    if service.config.allow_weight_updates:
        posts, shown = (*posts, *control.POSTS), control.GETS
    made = [Route(path, get, methods=["GET"]) for path, get in Gets(service, kv_events, posts, shown).table.items()]
    for post in posts:
        endpoint = Endpoint(service, post.handler, post.takes_ids, post.takes_none)
        made.append(Route(post.path, endpoint, methods=["POST"]))
    for method, path, handler in WITHOUT_SCHEMA:
        made.append(Route(path, Endpoint(service, handler), methods=[method]))
    return made


class Gets:
    """The GET routes: `table` maps each path to a function or an ASGI application, such as a constant response."""

    def __init__(
        self, service: Service, kv_events: KvEvents, posts: Sequence[PostRoute], shown: dict[str, Shown]
    ) -> None:
        self._service, self._posts = service, posts
        self._started = int(time.time())
        self._page = cache(self._make_page)
        self.table: dict[str, Any] = {
            "/": self.unchanging,
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/tokenizer_info": self.tokenizer_info,
            "/version": _json(reply.Version(penstock.__version__)),
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.models,
            "/kv_events": kv_events,
            "/openapi.json": self.unchanging,
            **{path: partial(self.showing, what) for path, what in shown.items()},
        }

    async def showing(self, what: Shown, _request: Request) -> Response:
        return _json(what(self._service))

    async def models(self, request: Request) -> Response:
        service = self._service
        await service.know_text_digest()
        one = request.path_params.get("model")
        if one is not None:
            return _json(self._model(service.check_model(one)))
        names = (*service.config.served_model_names, *service.adapters.served)
        return _json(reply.Models([self._model(name) for name in names]))

    def _model(self, name: str) -> reply.Model:
        service, info = self._service, self._service.info
        return reply.Model(
            id=name,
            created=self._started,
            max_model_len=info.max_model_len,
            root=service.model_name,
            parent=service.model_name if (adapter := service.adapter_of(name)) else None,
            adapter=adapter,
            block_size=info.block_size,
            fingerprint=info.fingerprint.hex(),
            num_blocks=info.num_blocks - 1,  # block 0 is padding and never allocated
            max_num_batched_tokens=info.max_num_batched_tokens,
            text_digest=service.text_digest,
        )

    async def health(self, _request: Request) -> Response:
        state = self._service.engine.health()
        return _json(reply.Status(state.reason), 200 if state.alive else 503)

    async def ready(self, _request: Request) -> Response:
        state = self._service.engine.health()
        if self._service.is_draining:
            return _json(reply.Status("the server is shutting down"), 503)
        return _json(reply.Status(state.reason), 200 if state.alive and state.ready else 503)

    async def tokenizer_info(self, _request: Request) -> Response:
        """Return special tokens and template under tokenizer_config.json's names, for clients that render prompts."""
        service = self._service
        sources = {} if service.template is None else service.template.sources
        return _json({**service.tokenizer.special_tokens, "chat_template": sources.get("default")})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def unchanging(self, request: Request) -> Response:
        return self._page(request.scope["path"])

    def _make_page(self, path: str) -> Response:
        """Build a constant page when it is first requested."""
        if path == "/":
            found = document()
            return HTMLResponse(found.body, headers=found.headers)
        others = [("GET", path) for path in self.table] + [(method, path) for method, path, _ in WITHOUT_SCHEMA]
        described = _openapi(self._posts, others, ErrorReply)
        return Response(msgspec.json.encode(described), media_type="application/json")


def _json(body: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _openapi(
    posts: Sequence[PostRoute], others: Iterable[tuple[str, str]], error: type[msgspec.Struct]
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of all routes, from the structs of their requests and replies. `others` has the
    methods and paths of routes without a schema."""
    types = [kind for post in posts for kind in (post.takes, post.gives, post.streams) if kind]
    types += [schema.Message, error]
    _, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    refused = {"description": "An error", "content": _content(error)}
    paths: dict[str, Any] = {}
    for method, path in others:
        shown = path.replace(":path", "")
        names = re.findall(r"{(\w+)}", shown)
        paths.setdefault(shown, {})[method.lower()] = {
            "parameters": [
                {"name": each, "in": "path", "required": True, "schema": {"type": "string"}} for each in names
            ],
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

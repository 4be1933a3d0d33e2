"""The tables of all routes, and the handlers of the GET routes."""

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

import penstock
from penstock.engine.http.page.document import document
from penstock.engine.server import control, scoring
from penstock.engine.server.agents import items_api, messages_api
from penstock.engine.server.chat import chat
from penstock.engine.server.completions import completions
from penstock.engine.server.endpoint import Endpoint, HandledRoute
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.service import Service
from penstock.engine.server.tokens import detokenize, load_adapter, reset_prefix_cache, tokenize, unload_adapter

Shown = Callable[[Service], dict[str, Any]]

POSTS = (
    HandledRoute("/v1/chat/completions", chat, takes_ids=True),
    HandledRoute("/v1/completions", completions, takes_ids=True),
    HandledRoute("/v1/embeddings", scoring.embeddings),
    HandledRoute("/tokenize", tokenize),
    HandledRoute("/detokenize", detokenize),
    HandledRoute("/reset_prefix_cache", reset_prefix_cache, takes_none=True),
    *scoring.ROUTES,
    HandledRoute("/v1/responses", items_api.responses),
    HandledRoute("/v1/messages", messages_api.messages),
    HandledRoute("/v1/messages/count_tokens", messages_api.count_tokens),
)
STORED_RESPONSE = "/v1/responses/{response_id}"
OTHERS = (
    HandledRoute(STORED_RESPONSE, items_api.get, "GET"),
    HandledRoute(STORED_RESPONSE, items_api.delete, "DELETE"),
)
ADAPTER_POSTS = (
    HandledRoute("/v1/load_lora_adapter", load_adapter),
    HandledRoute("/v1/unload_lora_adapter", unload_adapter),
)


def routes(service: Service, kv_events: KvEvents) -> list[Route]:
    handled, shown = (*POSTS, *OTHERS, *(ADAPTER_POSTS if service.config.allow_lora_updates else ())), {}
    if service.config.allow_weight_updates:
        handled, shown = (*handled, *control.POSTS), control.GETS
    made = [Route(path, get, methods=["GET"]) for path, get in Gets(service, kv_events, shown).table.items()]
    return made + [Route(route.path, Endpoint(service, route), methods=[route.method]) for route in handled]


class Gets:
    """The GET routes: `table` maps each path to a function or an ASGI application, such as a constant response."""

    def __init__(self, service: Service, kv_events: KvEvents, shown: dict[str, Shown]) -> None:
        self._service = service
        self._started = int(time.time())
        self.table: dict[str, Any] = {
            "/": self.page,
            "/health": self.health,
            "/ping": self.health,
            "/ready": self.ready,
            "/metrics": self.metrics,
            "/tokenizer_info": self.tokenizer_info,
            "/version": _json({"version": penstock.__version__}),
            "/v1/models": self.models,
            "/v1/models/{model:path}": self.models,
            "/kv_events": kv_events,
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
        return _json({"object": "list", "data": [self._model(name) for name in names]})

    def _model(self, name: str) -> dict[str, Any]:
        service, info = self._service, self._service.info
        adapter = service.adapter_of(name)
        return {
            "id": name,
            "object": "model",
            "owned_by": "penstock",
            "created": self._started,
            "max_model_len": info.max_model_len,
            "context_limit": info.context_limit,
            "root": service.model_name,
            "parent": service.model_name if adapter else None,
            "adapter": adapter,  # the digest that is part of the keys of its blocks
            # A router needs these two to compute the keys of cached blocks …
            "block_size": info.block_size,
            "fingerprint": info.fingerprint.hex(),
            "num_blocks": info.num_blocks - 1,  # block 0 is padding and never allocated
            "max_num_batched_tokens": info.max_num_batched_tokens,
            "text_digest": service.text_digest,  # … and with the same digest may send ids instead of text
        }

    async def health(self, _request: Request) -> Response:
        state = self._service.engine.health()
        return _json({"status": state.reason}, 200 if state.alive else 503)

    async def ready(self, _request: Request) -> Response:
        state = self._service.engine.health()
        if self._service.is_draining:
            return _json({"status": "the server is shutting down"}, 503)
        return _json({"status": state.reason}, 200 if state.alive and state.ready else 503)

    async def tokenizer_info(self, _request: Request) -> Response:
        """Return special tokens and template under tokenizer_config.json's names, for clients that render prompts."""
        service = self._service
        sources = {} if service.template is None else service.template.sources
        return _json({**service.tokenizer.special_tokens, "chat_template": sources.get("default")})

    async def metrics(self, _request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def page(self, _request: Request) -> Response:
        return self._page

    @cached_property
    def _page(self) -> Response:
        """The page, built when it is first requested."""
        found = document()
        return HTMLResponse(found.body, headers=found.headers)


def _json(body: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")

"""The tables of all routes, and the handlers of the GET routes."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import penstock
from penstock.engine.http.model_list import model_entry, model_list
from penstock.engine.page.document import document
from penstock.engine.server import control
from penstock.engine.server.agents import items_api, messages_api
from penstock.engine.server.chat import chat
from penstock.engine.server.completions import completions
from penstock.engine.server.embeddings import embeddings
from penstock.engine.server.endpoint import Endpoint, HandledRoute
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.rendering import render_chat, render_completions
from penstock.engine.server.service import Service
from penstock.engine.server.tokens import detokenize, load_adapter, reset_prefix_cache, tokenize, unload_adapter

Shown = Callable[[Service], dict[str, Any] | Response]

POSTS = (
    HandledRoute("/v1/chat/completions", chat, takes_ids=True),
    HandledRoute("/v1/completions", completions, takes_ids=True),
    HandledRoute("/v1/embeddings", embeddings),
    HandledRoute("/v1/chat/completions/render", render_chat),
    HandledRoute("/v1/completions/render", render_completions),
    HandledRoute("/tokenize", tokenize),
    HandledRoute("/detokenize", detokenize),
    HandledRoute("/reset_prefix_cache", reset_prefix_cache, takes_none=True),
    HandledRoute("/v1/responses", items_api.responses),
    HandledRoute("/v1/responses/input_tokens", items_api.input_tokens),
    HandledRoute("/v1/responses/compact", items_api.compact),
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
    handled, shown = (*POSTS, *OTHERS, *(ADAPTER_POSTS if service.config.allow_lora_updates else ())), GETS
    if service.config.allow_weight_updates:
        handled, shown = (*handled, *control.POSTS), GETS | control.GETS
    gets: dict[str, Any] = {path: partial(_show, service, show) for path, show in shown.items()}
    gets |= dict.fromkeys(("/v1/models", "/v1/models/{model:path}"), partial(_models, service))
    get_routes = [Route(path, get, methods=["GET"]) for path, get in {**gets, "/kv_events": kv_events}.items()]
    return get_routes + [Route(route.path, Endpoint(service, route), methods=[route.method]) for route in handled]


async def _show(service: Service, show: Shown, _request: Request) -> Response:
    reply = show(service)
    return reply if isinstance(reply, Response) else _json(reply)


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _health(service: Service) -> Response:
    state = service.engine.health()
    return _json({"status": state.reason}, 200 if state.alive else 503)


def _ready(service: Service) -> Response:
    if service.is_draining:
        return _json({"status": "the server is shutting down"}, 503)
    state = service.engine.health()
    return _json({"status": state.reason}, 200 if state.alive and state.ready else 503)


def _tokenizer_info(service: Service) -> dict[str, Any]:
    """Return special tokens and template under tokenizer_config.json's names, for clients that render prompts."""
    sources = {} if service.template is None else service.template.sources
    # The class of transformers that loads any tokenizer.json; the server itself uses none of its classes.
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": sources.get("default")}
    return {**service.tokenizer.special_tokens, **names}


# The GET routes that show the state of the server: a response, or an object for JSON.
GETS: dict[str, Shown] = {
    "/": lambda _service: document(),
    "/health": _health,
    "/ping": _health,
    "/ready": _ready,
    "/metrics": lambda service: Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST),
    "/tokenizer_info": _tokenizer_info,
    "/version": lambda _service: {"version": penstock.__version__},
}


async def _models(service: Service, request: Request) -> Response:
    await asyncio.to_thread(getattr, service, "text_digest")  # computed at the first request, not at the start
    one = request.path_params.get("model")
    if one is not None:
        return _json(_model(service, service.check_model(one)))
    names = (*service.config.served_model_names, *service.adapters.served)
    return _json(model_list([_model(service, name) for name in names]))


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.info
    adapter = service.adapter_of(name)
    return {
        **model_entry(name, service.started),
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

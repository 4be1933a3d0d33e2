"""The ASGI application: routes, the middleware around them, and the answers to what goes wrong.

From the outside in: the log and the request counters, the API key, then the routes. A request that fails
anywhere below is answered in the one error format.
"""

import time
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import penstock
from penstock.engine.http.access_line import AccessLine, AccessLog
from penstock.engine.http.auth import NO_KEY, Authentication, Keys
from penstock.engine.http.errors import CLIENT_CLOSED, ErrorReply, HttpError, clip
from penstock.engine.server import requests as schema
from penstock.engine.server import responses as reply
from penstock.engine.server.adapters import LoadAdapterRequest, UnloadAdapterRequest
from penstock.engine.server.agents import agent_routes
from penstock.engine.server.call import Call, client_id
from penstock.engine.server.chat import chat
from penstock.engine.server.completions import completions
from penstock.engine.server.embeddings import embeddings
from penstock.engine.server.endpoint import Endpoint, PostRoute
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.service import REFUSALS, Service, as_http_error
from penstock.engine.server.tokens import detokenize, load_adapter, reset_prefix_cache, tokenize, unload_adapter

QUIET_ROUTES = frozenset({"/health", "/ping", "/ready", "/metrics"})  # probed every few seconds

POSTS = (
    PostRoute("/v1/chat/completions", chat, schema.ChatRequest, reply.Chat, reply.ChatChunk),
    PostRoute("/v1/completions", completions, schema.CompletionRequest, reply.Completion, reply.Completion),
    PostRoute("/v1/embeddings", embeddings, schema.EmbeddingRequest, reply.Embeddings),
    PostRoute("/tokenize", tokenize, schema.TokenizeRequest, reply.Tokens),
    PostRoute("/detokenize", detokenize, schema.DetokenizeRequest, reply.Detokenized),
    PostRoute("/reset_prefix_cache", reset_prefix_cache, schema.ResetRequest, reply.Status, takes_none=True),
)
SCORING = {
    "/classify": "scoring.classify",
    **dict.fromkeys(("/score", "/v1/score"), "scoring.score"),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), "scoring.rerank"),
}
LATER = (*(("POST", path, name) for path, name in SCORING.items()), *agent_routes.ROUTES)
ADAPTER_POSTS = (
    PostRoute("/v1/load_lora_adapter", load_adapter, LoadAdapterRequest, reply.Status),
    PostRoute("/v1/unload_lora_adapter", unload_adapter, UnloadAdapterRequest, reply.Status),
)


class ServerApp:
    """The whole application. `service` is what the server's life and the tests need to see."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self.service = service
        self.kv_events = KvEvents(service)
        self._keys = Keys(config.api_keys)
        self._lines = AccessLog(form, "engine") if (form := config.access_log) != "off" else None
        routes = _routes(service, self.kv_events)
        handlers = dict.fromkeys(REFUSALS, _refuse) | {HTTPException: _refuse_route, Exception: _fail}
        self.templates = frozenset(route.path for route in routes)
        self._patterns = [route for route in routes if "{" in route.path]
        starlette = Starlette(routes=routes, exception_handlers=handlers)
        starlette.router.redirect_slashes = False
        self._inner: ASGIApp = Authentication(starlette, self._keys, _error(NO_KEY))
        if config.allowed_origins:  # a browser asks beforehand, without the key
            self._inner = CORSMiddleware(
                self._inner,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id",),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = scope["penstock.call"] = Call(client_id(scope["headers"]))
        status = 500  # unless something better is sent
        if (spans := self.service.spans) is not None:
            spans.begin(call, scope)

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                echoed_id = (call.client_id or call.id).encode()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", echoed_id)]
            await send(message)

        try:
            await self._inner(scope, receive, send_noting)
        finally:
            route = self._template(scope["path"])
            status = CLIENT_CLOSED if call.is_gone else status
            self.service.metrics.requests[route, status] += 1
            if spans is not None:
                spans.end(call, route, status)
            if self._lines is not None and (level := self._lines.level(route in QUIET_ROUTES)) is not None:
                self._lines.write(level, _line(call, route, status, self._keys.number(scope["headers"])))

    def _template(self, path: str) -> str:
        """The route as it is written in the table: the label may take no value that a client makes up."""
        if path in self.templates:
            return path
        return next((route.path for route in self._patterns if route.path_regex.match(path)), "unmatched")


def _routes(service: Service, kv_events: KvEvents) -> list[Route]:
    started = int(time.time())
    posts, shown = (*POSTS, *(ADAPTER_POSTS if service.config.allow_lora_updates else ())), {}
    if service.config.allow_weight_updates:
        from penstock.engine.server import control

        posts, shown = (*posts, *control.POSTS), control.GETS

    def showing(what: Callable[[Service], dict[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def show(_request: Request) -> Response:
            return _json(what(service))

        return show

    async def models(request: Request) -> Response:
        await service.know_text_digest()
        one = request.path_params.get("model")
        if one is not None:
            return _json(_model(service, service.check_model(one), started))
        names = (*service.config.served_model_names, *service.adapters.served)
        return _json(reply.Models([_model(service, name, started) for name in names]))

    async def health(_request: Request) -> Response:
        state = service.engine.health()
        return _json(reply.Status(state.reason), 200 if state.alive else 503)

    async def ready(_request: Request) -> Response:
        state = service.engine.health()
        if service.is_draining:
            return _json(reply.Status("the server is shutting down"), 503)
        return _json(reply.Status(state.reason), 200 if state.alive and state.ready else 503)

    async def tokenizer_info(_request: Request) -> Response:
        """For clients that tokenize here and render themselves, under the names of tokenizer_config.json."""
        sources = {} if service.template is None else service.template.sources
        return _json({**service.tokenizer.special_tokens, "chat_template": sources.get("default")})

    async def metrics(_request: Request) -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @cache
    def page(path: str) -> Response:
        """What does not change, made when it is first asked for: most servers never are."""
        if path == "/":
            from penstock.engine.http.page.document import document

            found = document("live")
            return HTMLResponse(found.body, headers=found.headers)
        from penstock.engine.server import pages, scoring

        others = [("GET", path) for path in gets] + [(method, path) for method, path, _ in agent_routes.ROUTES]
        described = pages.openapi([*posts, *scoring.ROUTES, *agent_routes.described()], others, ErrorReply)
        if path == "/docs":
            return HTMLResponse(pages.docs(described), headers=pages.HEADERS)
        return Response(msgspec.json.encode(described), media_type="application/json")

    async def unchanging(request: Request) -> Response:
        return page(request.scope["path"])

    gets: dict[str, Any] = {  # functions, or ASGI applications, which a response is too
        "/": unchanging,
        "/health": health,
        "/ping": health,
        "/ready": ready,
        "/metrics": metrics,
        "/tokenizer_info": tokenizer_info,
        "/version": _json(reply.Version(penstock.__version__)),
        "/v1/models": models,
        "/v1/models/{model:path}": models,
        "/kv_events": kv_events,
        "/openapi.json": unchanging,
        "/docs": unchanging,
        **{path: showing(what) for path, what in shown.items()},
    }
    return (
        [Route(path, endpoint, methods=["GET"]) for path, endpoint in gets.items()]
        + [
            Route(post.path, Endpoint(service, post.handler, bool(post.streams), post.takes_none), methods=["POST"])
            for post in posts
        ]
        + [
            Route(path, Endpoint(service, agent_routes.later(name), takes_ids=False), methods=[method])
            for method, path, name in LATER
        ]
    )


def _model(service: Service, name: str, started: int) -> reply.Model:
    info = service.info
    return reply.Model(
        id=name,
        created=started,
        max_model_len=info.max_model_len,
        root=service.model_name,
        parent=service.model_name if (adapter := service.adapter_of(name)) else None,
        adapter=adapter,
        block_size=info.block_size,
        fingerprint=info.fingerprint.hex(),
        num_blocks=info.num_blocks - 1,  # block 0 holds nothing
        max_num_batched_tokens=service.engine.config.scheduler.max_num_batched_tokens,
        text_digest=service.text_digest,
    )


def _json(body: msgspec.Struct | dict[str, Any], status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")


def _error(error: HttpError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _refuse(_request: Request, error: Exception) -> Response:
    return _error(as_http_error(error))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """What the router itself refuses: an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    message = f"{request.method[:16]} {clip(request.scope['path'])}: there is no such route"
    if error.status_code == 405:
        message = f"{request.method[:16]}: not a method of this route"
    return _error(HttpError(error.status_code, message, headers=error.headers))


async def _fail(_request: Request, _error_of_ours: Exception) -> Response:
    """A bug of ours. The traceback goes to the log, and nothing of it to the client."""
    return _error(HttpError(500, "internal error"))


def _line(call: Call, route: str, status: int, key: int | None) -> AccessLine:
    line = AccessLine(
        route=route,
        status=status,
        total_ms=round((time.monotonic() - call.begun_s) * 1000, 3),
        id=call.id,
        client_id=call.client_id,
        model=call.model or None,
        key=key,
        trace_id=None if call.trace is None else call.trace.trace_id,
    )
    if call.answers:
        times = call.answers[0].metrics
        line.prompt_tokens, line.output_tokens = call.num_prompt_tokens, call.num_tokens
        line.cached_tokens = call.num_cached_tokens
        line.finish_reason = ",".join(dict.fromkeys(call.finish_reasons))
        line.queue_ms, line.first_token_ms = _ms(times.queued_s), _ms(times.first_token_s)
    return line


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

"""The ASGI application: the middleware around the routes, and the error responses.

From outside to inside: access log and request counters, Host header, CORS, API key, routes. All errors below have the
same format.
"""

import logging
import re
import time
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engine.http.access_line import AccessLine, AccessLog
from penstock.engine.http.auth import NO_KEY, Keys, bearers, is_open
from penstock.engine.http.errors import CLIENT_CLOSED, HttpError, clip
from penstock.engine.http.hosts import Hosts
from penstock.engine.server.call import Call
from penstock.engine.server.kv_events import KvEvents
from penstock.engine.server.routes import routes
from penstock.engine.server.service import REFUSALS, Service, as_http_error

IGNORED_HEADER = b"x-penstock-ignored"
MAX_HEADER_CHARS = 1024
MAX_LOGGED = 256  # names, bounded because clients choose them
QUIET_ROUTES = frozenset({"/health", "/ping", "/ready", "/metrics"})  # probed every few seconds

log = logging.getLogger("penstock.engine")

_UNSAFE = re.compile(r"[^A-Za-z0-9_.:\[\]-]")


class ServerApp:
    """The whole ASGI application. `service` is public for the server's lifetime code and the tests."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self.service = service
        self.kv_events = KvEvents(service)
        self._logged: set[str] = set()  # names of ignored fields
        self._keys = Keys(config.api_keys)
        self._hosts = Hosts(config.allowed_hosts, config.host, has_keys=bool(config.api_keys))
        self._lines = AccessLog(config.access_log, "engine")
        table = routes(service, self.kv_events)
        handlers = dict.fromkeys(REFUSALS, _refuse) | {HTTPException: _refuse_route, Exception: _fail}
        self.templates = frozenset(route.path for route in table)
        self._patterns = [route for route in table if "{" in route.path]
        starlette = Starlette(routes=table, exception_handlers=handlers)
        starlette.router.redirect_slashes = False
        self._starlette = starlette
        self._inner: ASGIApp = self._authenticate
        if config.allowed_origins:  # outside authentication, because a browser's preflight request has no key
            self._inner = CORSMiddleware(
                self._inner,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("x-request-id", IGNORED_HEADER.decode()),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = scope["penstock.call"] = Call(scope["headers"], self._keys.number(bearers(scope["headers"])))
        status = 500  # if no response is sent
        spans = self.service.spans
        spans.begin(call, scope)

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                echoed_id = (call.client_id or call.id).encode()
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", echoed_id)]
                if call.ignored:
                    message["headers"].append(self._ignored_header(call.ignored))
            await send(message)

        try:
            host = next((value for name, value in scope["headers"] if name == b"host"), None)
            refusal = self._hosts.refusal(host)
            await (self._inner if refusal is None else _error(refusal))(scope, receive, send_noting)
        finally:
            route = self._template(scope["path"])
            status = CLIENT_CLOSED if call.is_gone else status
            self.service.metrics.requests[route, status] += 1
            spans.end(call, route, status)
            if (level := self._lines.level(route in QUIET_ROUTES)) is not None:
                self._lines.write(level, _line(call, route, status))

    async def _authenticate(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request if it has an accepted key or needs none."""
        is_admitted = not self._keys or scope["penstock.call"].key is not None or is_open(scope)
        await (self._starlette if is_admitted else _error(NO_KEY))(scope, receive, send)

    def _ignored_header(self, names: Sequence[str]) -> tuple[bytes, bytes]:
        """Return the header with the ignored parts of a request, which the handlers collect in `Call.ignored`. Log each
        name once."""
        shown = [clip(_UNSAFE.sub("?", name)).replace("…", "...") for name in names]
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(name)
                log.warning("requests have %s, which is not served here and is ignored", name)
        return IGNORED_HEADER, clip(", ".join(shown), MAX_HEADER_CHARS).replace("…", "...").encode()

    def _template(self, path: str) -> str:
        """Return the route template of a path, so that clients cannot create new values of the metric label."""
        if path in self.templates:
            return path
        return next((route.path for route in self._patterns if route.path_regex.match(path)), "unmatched")


def _error(error: HttpError) -> Response:
    return Response(error.body(), error.status, error.headers, "application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    return _error(as_http_error(error, request.scope["penstock.call"]))


async def _refuse_route(request: Request, error: Exception) -> Response:
    """Return the error response for an unknown path, or for a method that the path does not support."""
    assert isinstance(error, HTTPException)
    message = f"{request.method[:16]} {clip(request.scope['path'])}: there is no such route"
    if error.status_code == 405:
        message = f"{request.method[:16]}: not a method of this route"
    return _error(HttpError(error.status_code, message, headers=error.headers))


async def _fail(_request: Request, _error_of_ours: Exception) -> Response:
    """Return the error response for an internal error. Only the log has the traceback."""
    return _error(HttpError(500, "internal error"))


def _line(call: Call, route: str, status: int) -> AccessLine:
    line = AccessLine(
        route=route,
        status=status,
        total_ms=round((time.monotonic() - call.begun_s) * 1000, 3),
        id=call.id,
        client_id=call.client_id,
        model=call.model or None,
        key=call.key,
        trace_id=call.trace_id,
    )
    if call.answers:
        times = call.answers[0].metrics
        line.prompt_tokens, line.output_tokens = call.num_prompt_tokens, call.num_tokens
        line.cached_tokens = call.num_cached_tokens
        line.accepted_drafts = sum(answer.metrics.accepted_drafts for answer in call.answers) or None
        reasons = dict.fromkeys(answer.reuse.reason for answer in call.answers if answer.reuse is not None)
        line.cache_miss = ",".join(reasons) or None
        line.finish_reason = ",".join(dict.fromkeys(call.finish_reasons))
        line.queue_ms, line.first_token_ms = _ms(times.queued_s), _ms(times.first_token_s)
    return line


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)

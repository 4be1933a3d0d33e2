"""The application of the router: admits requests, answers its own routes, and passes the others to a replica.

Deny by default, as the engine's server does: with a key every route needs it but `GET /health` and `GET /`. Changing the
fleet needs another key, for a replica that a tenant could add would read the others' prompts.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from penstock import __version__
from penstock.engine.http.access_line import AccessLine, AccessLog
from penstock.engine.http.auth import NO_KEY, OWNER_HEADER, Keys
from penstock.engine.http.body import decode
from penstock.engine.http.errors import HttpError, clean_id, clip
from penstock.engine.http.hosts import Hosts
from penstock.engine.http.model_list import model_entry, model_list
from penstock.router import routes
from penstock.router.answer import as_refusal
from penstock.router.backend import Backend, RouteError
from penstock.router.exchange import BeginTrace, Exchange
from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Replica
from penstock.router.http.edge import ClientConnection, Edge, headers_of
from penstock.router.http.heads import ClientRequest, Headers
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.metrics import RouterMetrics
from penstock.router.placement.prompts import NOTHING, PreparedRequest, PromptReader, RequestFields

LOOK_S = 0.5  # between two looks at running requests and at the loop's lag
JSON = [(b"content-type", b"application/json")]
TEXT = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
ROOT = b"This is a Penstock router. The API is under /v1, the fleet at /replicas; every replica has a page of its own at /.\n"
ID = re.compile(r"[\w.-]{1,256}", re.ASCII)  # of a stored response
NOT_STORED = {400, 404, 405}  # how replicas answer that they do not store a response; vLLM: 400 for a foreign id
NULL = msgspec.Raw(b"null")
_REQUEST_ID = re.compile(rb"^x-request-id:[ \t]*([^\r]*)\r\n", re.MULTILINE)


class ReplicaChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST and DELETE /replicas."""

    url: str


class RouterApp:
    """The router behind its listener. `exchanges`: the proxied requests. `watch`: starts to probe an added replica."""

    def __init__(
        self,
        fleet: Fleet,
        exchanges: set[Exchange],
        prompts: PromptReader,
        watch: Callable[[Replica], None],
        begin_trace: BeginTrace,
    ) -> None:
        self.config = config = fleet.config
        self.fleet = fleet
        self.prompts = prompts
        self.edge = Edge(config.limits, self.admit, self.handle)
        self.begin_trace = begin_trace
        self.lines = AccessLog(config.access_log, "router")
        self.metrics = RouterMetrics(fleet, self.edge.refused)
        self.is_draining = False
        self.exchanges = exchanges
        self._keys = Keys(config.api_keys)
        self._hosts = Hosts(config.allowed_hosts, config.host, has_keys=bool(config.api_keys))
        self._admin_keys = Keys(config.admin_api_keys)
        self._started_s = int(time.time())
        self._watch = watch

    # Admission.

    def admit(self, request: ClientRequest) -> HttpError | None:
        """Check host, key, route, method, drain and load, before the body is read."""
        error = self._refusal(request)
        if error is not None:
            self._log(request, error.status)
        return error

    def _refusal(self, request: ClientRequest) -> HttpError | None:
        path = request.path
        if (wrong_host := self._hosts.refusal(request.host)) is not None:
            return wrong_host
        if not path.startswith("/"):
            return HttpError(400, "the request target must begin with '/'")
        if not self._is_allowed(request, path):
            return NO_KEY
        if routes.is_proxied(path):
            return self._objection(request)
        method = request.method.decode("latin-1")
        if path not in routes.OWN and not path.startswith(routes.MODEL):
            return HttpError(404, f"{method[:16]} {clip(path)}: there is no such route")
        if request.method not in routes.METHODS.get(path, (b"GET", b"HEAD")):
            return HttpError(405, f"{method[:16]}: not a method of this route")
        return None

    def _is_allowed(self, request: ClientRequest, path: str) -> bool:
        if not self._keys or (request.method, path) in routes.OPEN:
            return True
        keys = [self._keys, self._admin_keys] if path == "/replicas" else [self._keys]
        return any(each.number(request.authorization) is not None for each in keys)

    def _objection(self, request: ClientRequest) -> HttpError | None:
        """Return the error with which a request for a replica is refused, or None."""
        method = request.method
        if method != b"POST" and (request.path in routes.PROXIED or method not in (b"GET", b"DELETE")):
            return HttpError(405, f"{method.decode('latin-1')[:16]}: not a method of this route")
        kind = request.content_type if method == b"POST" else b"application/json"
        is_bare = request.path not in routes.PROXIED and not kind  # as clients cancel a stored response
        if is_bare and b"\norigin:" not in b"\n" + request.lines:  # a web page's request has an origin
            kind = b"application/json"
        if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
            return HttpError(415, "content-type: 'application/json' is expected", param="content-type")
        if self.is_draining:
            return HttpError(503, "the router is shutting down", headers={"retry-after": "1"})
        limit = self.config.max_requests * max(len(self.fleet.replicas), 1)
        if len(self.exchanges) >= limit:
            message = f"{limit} requests are in flight, which is the limit (--max-requests)"
            return HttpError(429, message, headers={"retry-after": "1"})
        return None

    def handle(self, request: ClientRequest, connection: ClientConnection) -> None:
        try:
            if routes.is_proxied(request.path):
                self._proxy(request, connection)
                return
            status, headers, body = self._own(request)
        except Exception as error:  # a request must not end without an answer
            refusal = as_refusal(error)
            status, headers, body = refusal.status, headers_of(refusal), refusal.body()
        self._log(request, status)
        self.metrics.count(request, status)
        connection.answer(status, headers, body)

    def _log(self, request: ClientRequest, status: int, exchange: Exchange | None = None) -> None:
        """Write the request's access line, if the access log is on."""
        if (level := self.lines.level(request.path in routes.PROBED)) is not None:
            key = self._keys.number(request.authorization)
            self.lines.write(level, _line(request, status, key, exchange))

    # Requests for a replica.

    def _proxy(self, request: ClientRequest, connection: ClientConnection) -> None:
        has_body = bool(request.body) or request.path in routes.PROXIED
        parsed = decode(RequestFields, request.body) if has_body else RequestFields()
        if parsed.kv_transfer_params not in (NOTHING, NULL) and any(each.peer for each in self.fleet.replicas.values()):
            message = "kv_transfer_params: where the prompt is computed is chosen here; leave the field out"
            raise HttpError(400, message, param="kv_transfer_params")
        request.lines += self._owner_line(request)
        exchange = Exchange(self.fleet, self.metrics, request, connection, self.begin_trace(request), self._ended)
        connection.reader = exchange
        self.exchanges.add(exchange)
        try:
            response_id = routes.stored_id(request.path, parsed)
            group = self.fleet.group_of(parsed.model) if response_id is None else None
            if group is None or self.prompts.is_long(request.path, request.body):
                self.fleet.tasks.spawn(self._prepare_and_start(exchange, parsed, group, response_id))
                return
            exchange.start(group, self._prepare(request, parsed, group))
        except Exception as error:  # as in `handle`
            exchange.fail(error)

    async def _prepare_and_start(
        self, exchange: Exchange, parsed: RequestFields, group: ReplicaGroup | None, response_id: str | None
    ) -> None:
        """Prepare a request that is long, or that names a stored response, which only the replica that made it knows."""
        request, holder = exchange.request, None
        try:
            if group is None:
                group, holder = await self._home_of(response_id or "", parsed, request)
            # In a thread, because it would block the event loop for too long.
            loop, threads = asyncio.get_running_loop(), self.prompts.threads
            prepared = await loop.run_in_executor(threads, self._prepare, request, parsed, group)
            if exchange.state == "preparing":  # the client has not left meanwhile
                exchange.start(group, prepared, holder)
        except Exception as error:  # as in `handle`
            exchange.fail(error)

    def _ended(self, exchange: Exchange, status: int) -> None:
        self.exchanges.discard(exchange)
        self._log(exchange.request, status, exchange)

    async def _home_of(
        self, response_id: str, parsed: RequestFields, request: ClientRequest
    ) -> tuple[ReplicaGroup, Replica | None]:
        """Return the group and the replica that stores the response. If no replica stores it, return no replica: any replica of
        the group then answers that it does not know the previous response."""
        replica = await self._holder_of(response_id, parsed.model, request)
        if replica is not None and (group := self.fleet.group_with(replica)) is not None:
            return group, replica
        if parsed.previous_response_id is None:
            raise HttpError(404, f"response_id: {clip(response_id)!r} is stored at no replica", param="response_id")
        return self.fleet.group_of(parsed.model), None

    async def _holder_of(self, response_id: str, model: str | None, request: ClientRequest) -> Replica | None:
        """Ask the replicas which of them stores the response; None if none of them does. Raise HttpError if that is not known,
        because a client takes a 404 for the end of the response."""
        is_open = model is None and self.fleet.groups  # without any group, `group_of` raises a 503
        groups = self.fleet.groups.values() if is_open else (self.fleet.group_of(model),)
        replicas = [each for group in groups for each in group.replicas.values()]
        replicas += [each for each in self.fleet.replicas.values() if each.root is None and each.peer is None]
        if len(replicas) == 1:
            return replicas[0]
        if not ID.fullmatch(response_id):
            return None
        client_key, owner_line = self._client_key(request), self._owner_line(request)

        async def ask(replica: Replica) -> int:
            lines, timeout_s = owner_line + (replica.key_line or client_key), self.config.timeouts.probe_timeout_s
            try:
                return (await fetch(replica.pool, f"{routes.STORED}{response_id}", lines, timeout_s))[0]
            except (ConnectFailed, TimeoutError):
                return 0

        candidates = [each for each in replicas if each.root is not None and not each.is_down]
        statuses = await asyncio.gather(*map(ask, candidates))
        for status in (200, 401, 403):  # a replica that refuses the key says so itself
            if status in statuses:
                return candidates[statuses.index(status)]
        if num_unknown := len(replicas) - sum(map(NOT_STORED.__contains__, statuses)):
            message = f"response_id: {clip(response_id)!r} may be at {num_unknown} of {len(replicas)} replicas, which cannot say so now"
            raise HttpError(503, message, headers={"retry-after": "1"})
        return None

    def _prepare(self, request: ClientRequest, parsed: RequestFields, group: ReplicaGroup) -> PreparedRequest:
        """Prepare the request for the replicas of the group. Safe in any thread."""
        adapter, client_key = group.adapters.get(parsed.model or ""), self._client_key(request)
        return self.prompts.prepare(request, parsed, group.placement, adapter, client_key=client_key)

    def _client_key(self, request: ClientRequest) -> bytes:
        """Return the header line with the client's key. It is forwarded only if the router itself requires no keys, and only to
        replicas without a key of their own."""
        if request.authorization and not self._keys:
            return b"authorization: %b\r\n" % request.authorization[-1]
        return b""

    def _owner_line(self, request: ClientRequest) -> bytes:
        """Return the header line that names the client's key to the replica, whose clients take turns, and which stores a
        response for this key alone."""
        number = self._keys.number(request.authorization) if self._keys else None
        return b"" if number is None else b"%b: %b\r\n" % (OWNER_HEADER, self._keys.identity(number))

    async def watch_requests(self) -> None:
        """Look at all running requests and idle connections, and at the loop's lag, again and again."""
        while True:
            due_s = time.monotonic() + LOOK_S
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self.metrics.loop_lag.observe(max(now_s - due_s, 0.0))
            for exchange in list(self.exchanges):
                exchange.check_progress(now_s, self.config.timeouts.response_s)
            for replica in self.fleet.replicas.values():
                replica.pool.sweep()

    # The router's own routes.

    def _own(self, request: ClientRequest) -> tuple[int, Headers, bytes]:
        path = request.path
        if path == "/metrics":
            return 200, TEXT, self.metrics.text()
        if path == "/":
            return 200, PLAIN, ROOT
        is_change = path == "/replicas" and request.method in (b"POST", b"DELETE")
        status, reply = (200, self._change(request)) if is_change else self._status(path)
        return status, JSON, msgspec.json.encode(reply)

    def _status(self, path: str) -> tuple[int, Any]:
        if path in ("/health", "/ping"):
            return 200, {"status": "ok"}
        if path == "/ready":
            if self.is_draining:
                return 503, {"status": "the router is shutting down"}
            replicas = [each for group in self.fleet.groups.values() for each in group.replicas.values()]
            is_ready = any(map(self.fleet.is_available, replicas))
            return (200, {"status": "ok"}) if is_ready else (503, {"status": "no replica is available"})
        if path == "/version":
            return 200, {"version": __version__}
        if path == "/replicas":
            return 200, {"replicas": list(self.fleet.views())}
        if path.startswith(routes.MODEL):
            name = unquote(path.removeprefix(routes.MODEL))
            return 200, model_entry(name, self._started_s) | {"root": self.fleet.group_of(name).root}
        models = [(name, group.root) for group in self.fleet.groups.values() for name in group.names]
        return 200, model_list([model_entry(name, self._started_s) | {"root": root} for name, root in models])

    def _change(self, request: ClientRequest) -> dict[str, Any]:
        if not self._admin_keys:
            raise HttpError(403, "the fleet can be changed only where the router was started with --admin-api-key")
        if self._admin_keys.number(request.authorization) is None:
            raise HttpError(403, "changing the fleet needs the admin key")
        change = decode(ReplicaChange, request.body)
        try:
            backend = Backend.of(change.url, "url")
        except RouteError as error:
            raise HttpError(400, str(error), param="url") from None
        self.apply(request.method.decode(), backend)
        return {"replicas": list(self.fleet.views())}

    def apply(self, method: str, backend: Backend) -> None:
        """Add or remove a replica. A removed replica finishes the requests that it has started."""
        url = backend.url
        replica = self.fleet.replicas.get(url)
        if method == "POST":
            if replica is not None and replica.state != "removing":
                raise HttpError(400, f"url: {url} is already a replica", param="url")
            if replica is not None:
                self.fleet.detach(replica)
            self._watch(self.fleet.add(backend))
        elif replica is None:
            raise HttpError(404, f"url: {clip(url)} is not a replica", param="url")
        else:
            with self.fleet.observing(replica):
                replica.remove()
            replica.probe_due.set()

    def check(self) -> None:
        self.fleet.check()
        for exchange in self.exchanges:
            exchange.check()
            assert exchange.state != "over", "an exchange is over and still listed"
        num_legs = sum(len(exchange.legs()) for exchange in self.exchanges)
        assert self.fleet.num_in_flight == num_legs, f"{self.fleet.num_in_flight} in flight, {num_legs} known"


def _line(request: ClientRequest, status: int, key: int | None, exchange: Exchange | None) -> AccessLine:
    """Return the request's line in the access log: which replica answered it, and how long it took."""
    line = AccessLine(
        route=routes.route_of(request), status=status, total_ms=0.0, key=key, client_id=_id_in(request.lines)
    )
    if exchange is not None:
        line.total_ms = round((time.monotonic() - exchange.begun_s) * 1000, 3)
        line.model = clean_id(exchange.model or "")
        line.replica, line.attempts = exchange.replica or None, exchange.num_attempts
        line.trace_id = exchange.trace.trace_id
        if exchange.answer is not None and exchange.first_byte_s is not None:
            line.id, line.cached_tokens = _id_in(exchange.answer.lines), exchange.answer.cached_tokens
            line.first_byte_ms = round(exchange.first_byte_s * 1000, 3)
    return line


def _id_in(lines: bytes) -> str | None:
    found = _REQUEST_ID.search(lines)
    return None if found is None else clean_id(found[1].decode("latin-1"))

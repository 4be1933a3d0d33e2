"""What the router answers itself, and what it hands to a replica. Sits between the edge and the fleet.

Deny by default, as the engine's server does: with a key every route needs it but `GET /health` and `GET /`. Who
may change the fleet holds another key, for a replica that a tenant could add would read the others' prompts.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from penstock.engine.http.access_line import AccessLog
from penstock.engine.http.auth import NO_KEY, Keys
from penstock.engine.http.body import decode
from penstock.engine.http.errors import HttpError, clip
from penstock.engine.http.token_form import CONTENT_TYPE, REPORT_HEADER
from penstock.router.backend import Backend, RouteError
from penstock.router.config import Prefill, RouterConfig
from penstock.router.exchange import Exchange, Outgoing, as_refusal
from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Outcome, Replica
from penstock.router.http.edge import ClientConnection, Edge
from penstock.router.http.heads import ClientRequest, Headers
from penstock.router.http.upstream import ConnectFailed, fetch
from penstock.router.lines import line_of
from penstock.router.metrics import STORED, RouterMetrics, route_of
from penstock.router.placement.prompts import Asked, Routable, Texts
from penstock.router.preview import preview
from penstock.router.tokenizing import tokens_at_replica

if TYPE_CHECKING:
    from penstock.router.spans import ExchangeSpans

log = logging.getLogger("penstock.router")

PROXIED = frozenset(
    {
        *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/tokenize", "/detokenize", "/v1/responses"),
        *("/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"),
        *("/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
    }
)
OWN = frozenset({"/", "/health", "/ping", "/ready", "/metrics", "/version", "/replicas", "/route", "/v1/models"})
METHODS = {"/replicas": (b"GET", b"HEAD", b"POST", b"DELETE"), "/route": (b"POST",)}  # where not to be read only
PROBED = OWN - {"/", "/replicas", "/route", "/v1/models"}
OPEN = frozenset({(b"GET", "/health"), (b"HEAD", "/health"), (b"GET", "/"), (b"HEAD", "/")})
LOOK_S = 0.5  # how often running requests and the loop's lag are looked at
JSON = [(b"content-type", b"application/json")]
TEXT = [(b"content-type", CONTENT_TYPE_LATEST.encode())]
PLAIN = [(b"content-type", b"text/plain; charset=utf-8")]
ROOT = b"This is a Penstock router. The API is under /v1, the fleet at /replicas; every replica has a page of its own at /.\n"

RESPONSES = "/v1/responses"
ID = re.compile(r"[\w.-]{1,256}", re.ASCII)  # of a stored response

WITH_IDS = b"content-type: %b\r\n" % CONTENT_TYPE


class ReplicaChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST and DELETE /replicas; `peer` of one that only computes prompts."""

    url: str
    peer: str | None = None


class RouterApp:
    def __init__(self, config: RouterConfig, fleet: Fleet, texts: Texts, version: str) -> None:
        self.config = config
        self.fleet = fleet
        self.texts = texts
        self.version = version
        self.edge = Edge(self, config.limits)
        self.spans: ExchangeSpans | None = None
        if config.telemetry.otlp_traces_endpoint is not None:  # else nothing of it is even imported
            from penstock.router import spans

            self.spans = spans.ExchangeSpans(config.telemetry)
        self.lines = AccessLog(form, "router") if (form := config.access_log) != "off" else None
        self.metrics = RouterMetrics(fleet, self.edge.refused)
        self.is_draining = False
        self.exchanges: set[Exchange] = set()
        self.probe_now: Callable[[Replica], None] = lambda _replica: None  # set by the owner of the probes
        self._keys = Keys(config.api_keys)
        self._admin_keys = Keys(config.admin_api_keys)
        # What replicas get beside the client's headers.
        self._own_lines = REPORT_HEADER + b": cached-tokens\r\n"
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._started_s = int(time.time())
        fleet.on_down = self._move_from

    def start(self) -> None:
        self.edge.start()
        self._look(asyncio.get_running_loop().time())

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.edge.close()
        for task in self._tasks:
            task.cancel()

    # The edge asks.

    def admit(self, request: ClientRequest) -> HttpError | None:
        """Before the body is read: key, route, method, drain and load."""
        error = self._refusal(request)
        if error is not None:
            self.note(request, error.status)
        return error

    def _refusal(self, request: ClientRequest) -> HttpError | None:
        path = request.path
        if not path.startswith("/"):
            return HttpError(400, "the request target must begin with '/'")
        if not self._may(request, path):
            return NO_KEY
        if is_proxied(path):
            return self._objection(request)
        allowed = METHODS.get(path, (b"GET", b"HEAD"))
        method = request.method.decode("latin-1")
        if path not in OWN:
            return HttpError(404, f"{method[:16]} {clip(path)}: there is no such route")
        if request.method not in allowed:
            return HttpError(405, f"{method[:16]}: not a method of this route")
        return None

    def handle(self, request: ClientRequest, connection: ClientConnection) -> None:
        path = request.path
        try:
            if is_proxied(path):
                self._proxy(request, connection)
                return
            if path == "/route":
                self.spawn(self._preview(request, connection))
                return
            answer = self._own(request, path)
        except Exception as error:  # the top of a request: it must not end without an answer
            self._refuse_here(request, connection, error)
        else:
            self._answer(request, connection, *answer)

    def _answer(
        self, request: ClientRequest, connection: ClientConnection, status: int, headers: Headers, body: bytes
    ) -> None:
        self.note(request, status)
        self.metrics.count(request, status)
        connection.answer(status, headers, body)

    def _refuse_here(self, request: ClientRequest, connection: ClientConnection, error: Exception) -> None:
        """What never became an exchange, which would have a line of its own."""
        refusal = as_refusal(error)
        self.note(request, refusal.status)
        self.refuse(request, connection, refusal)

    def refuse(self, request: ClientRequest, connection: ClientConnection, error: HttpError) -> None:
        self.metrics.count(request, error.status)
        connection.refuse(error)

    def note(self, request: ClientRequest, status: int, exchange: Exchange | None = None) -> None:
        """A line of the log, where there are any."""
        if self.lines is not None and (level := self.lines.level(request.path in PROBED)) is not None:
            known = request.path in OWN or is_proxied(request.path)
            key = self._keys.number((b"authorization", value) for value in request.authorization)
            self.lines.write(
                level, line_of(request, route_of(request) if known else "unmatched", status, key, exchange)
            )

    def _may(self, request: ClientRequest, path: str) -> bool:
        if not self._keys or (request.method, path) in OPEN or _admits(self._keys, request):
            return True
        return path == "/replicas" and bool(self._admin_keys) and _admits(self._admin_keys, request)

    def _objection(self, request: ClientRequest) -> HttpError | None:
        if request.method != b"POST" and (request.path in PROXIED or request.method not in (b"GET", b"DELETE")):
            return HttpError(405, f"{request.method.decode('latin-1')[:16]}: not a method of this route")
        kind = request.content_type if request.method == b"POST" else b"application/json"
        if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
            return HttpError(415, "content-type: 'application/json' is expected", param="content-type")
        if self.is_draining:
            return HttpError(503, "the router is shutting down", headers={"retry-after": "1"})
        limit = self.config.max_requests * max(len(self.fleet.replicas), 1)
        if len(self.exchanges) >= limit:
            return HttpError(
                429,
                f"{limit} requests are in flight, which is the limit (--max-requests)",
                headers={"retry-after": "1"},
            )
        return None

    # A request for a replica.

    def _proxy(self, request: ClientRequest, connection: ClientConnection) -> None:
        asked = decode(Asked, request.body) if request.body or request.path in PROXIED else Asked()
        if bytes(asked.kv_transfer_params) not in (b"", b"null") and self.fleet.has_prefills:
            message = "kv_transfer_params: where the prompt is computed is chosen here; leave the field out"
            raise HttpError(400, message, param="kv_transfer_params")
        exchange = Exchange(self, request, connection)
        if (response_id := stored_id(request.path, asked)) is not None:
            exchange.open()
            self.spawn(self._prepare_stored(exchange, asked, response_id))
            return
        group = self.fleet.group_of(asked.model)
        if not self.config.tokenize_at_replica and not self.texts.is_long(request.path, request.body):
            adapter = group.adapters.get(asked.model or "")
            prepared = self.texts.prepare(request.path, request.body, asked, group.placement, adapter)
            exchange.open()
            self._begin(exchange, group, asked, prepared)
        else:
            exchange.open()
            self.spawn(self._prepare_aside(exchange, group, asked))

    async def _prepare_aside(self, exchange: Exchange, group: ReplicaGroup, asked: Asked) -> None:
        request = exchange.request
        try:
            prepared = await self.prepare(request.path, request.body, asked, group)
        except Exception as error:  # as in `handle`
            exchange.fail(error)
            return
        if exchange.state == "preparing":  # the client has not left meanwhile
            self._begin(exchange, group, asked, prepared)

    async def _prepare_stored(self, exchange: Exchange, asked: Asked, response_id: str) -> None:
        """Prepare a request that names a stored response, which only the replica that made it knows."""
        request = exchange.request
        try:
            replica = await self._holder_of(response_id, asked.model, request)
            group = None if replica is None else self.fleet.home(replica)
            if replica is not None and group is not None:
                exchange.restrict_to(group, replica)
            elif asked.previous_response_id is None:
                raise HttpError(404, f"response_id: {clip(response_id)!r} is stored at no replica", param="response_id")
            else:  # any replica says in its own words that it does not know the previous response
                group = self.fleet.group_of(asked.model)
            prepared = await self.prepare(request.path, request.body, asked, group)
        except Exception as error:  # as in `handle`
            exchange.fail(error)
            return
        if exchange.state == "preparing":  # the client has not left meanwhile
            self._begin(exchange, group, asked, prepared)

    async def _holder_of(self, response_id: str, model: str | None, request: ClientRequest) -> Replica | None:
        """Ask the replicas which of them stores the response; None if no replica says so."""
        groups = self.fleet.groups.values() if model is None else (self.fleet.group_of(model),)
        replicas = [each for group in groups for each in group.replicas.values() if self.fleet.is_available(each)]
        if len(replicas) == 1:
            return replicas[0]
        if not ID.fullmatch(response_id):
            return None
        path = f"{STORED}{response_id}"
        client_key = self._client_key(request)

        async def has(replica: Replica) -> bool:
            try:
                lines = replica.key_line or client_key
                status, _ = await fetch(replica.pool, path, lines, self.config.patience.probe_timeout_s)
            except (ConnectFailed, TimeoutError):
                return False
            return status == 200

        found = await asyncio.gather(*map(has, replicas))
        return next((replica for replica, is_here in zip(replicas, found, strict=True) if is_here), None)

    async def prepare(self, path: str, body: bytes, asked: Asked, group: ReplicaGroup) -> Routable:
        """Where that takes longer than an event loop should be held up."""
        adapter = group.adapters.get(asked.model or "")
        if self.config.tokenize_at_replica:
            packed = await tokens_at_replica(self.fleet, group, path, body)
            self.metrics.counts["tokenized", "no" if packed is None else "yes"] += 1
            if packed is not None:
                return Routable(group.placement.prepare(packed, asked.cache_salt, adapter), len(packed) // 4)
        return await self.texts.prepare_aside(path, body, asked, group.placement, adapter)

    async def _preview(self, request: ClientRequest, connection: ClientConnection) -> None:
        try:
            reply = await preview(self, request)
        except Exception as error:  # as in `handle`
            self._refuse_here(request, connection, error)
        else:
            self._answer(request, connection, 200, JSON, msgspec.json.encode(reply))

    def _begin(self, exchange: Exchange, group: ReplicaGroup, asked: Asked, prepared: Routable) -> None:
        request = exchange.request
        lines = request.lines + self._own_lines
        with_ids = None
        if prepared.body_with_ids is not None:
            with_ids = (lines + WITH_IDS, prepared.body_with_ids)
        outgoing = Outgoing(
            request.target,
            lines + b"content-type: application/json\r\n",
            request.body,
            with_ids,
            self.texts.digest,
            asked.model,
            request.session.decode("latin-1")[:256] if request.session else asked.session,
            prepared.prompt,
            prepared.num_tokens,
            self._client_key(request),
            prepared.fields,
            is_repeatable(request, asked),
        )
        try:
            exchange.start(group, outgoing)
        except Exception as error:  # as in `handle`
            exchange.fail(error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """A task that is kept until it is done; what it dies of is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request failed in the router", exc_info=error)

    def _client_key(self, request: ClientRequest) -> bytes:
        """Its header, written: it passes only where the router has no keys of its own, and to replicas without one."""
        if request.authorization and not self._keys:
            return b"authorization: %b\r\n" % request.authorization[-1]
        return b""

    def _move_from(self, replica: Replica) -> None:
        for exchange in list(self.exchanges):
            exchange.replica_down(replica, f"{replica.url} is down: {replica.reason}")

    def judge(self, replica: Replica, outcome: Outcome, status: int, reason: str) -> None:
        """What came of asking a replica, and what that says about it."""
        is_well = outcome == "answered" and (status < 500 or status in (501, 505))
        if is_well and replica.is_sound:
            return
        now_s = time.monotonic()
        with self.fleet.observing(replica):
            if is_well:
                replica.answered()
            elif outcome == "answered":
                replica.failed(f"it answered {status}", now_s)
            elif outcome in ("unreachable", "lost"):
                replica.connection_broke(reason, now_s)
            elif outcome == "late":
                replica.failed(reason, now_s)
            elif outcome == "busy" and status == 503:
                replica.said_it_drains()
        if outcome in ("unreachable", "lost") or (outcome == "busy" and status == 503):
            self.probe_now(replica)

    def _look(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.metrics.loop_lag.observe(max(loop.time() - due_s, 0.0))
        now_s = time.monotonic()
        for exchange in list(self.exchanges):
            exchange.look(now_s, self.config.patience.response_s)
        for replica in self.fleet.replicas.values():
            replica.pool.sweep()
        due_s = loop.time() + LOOK_S
        self._timer = loop.call_at(due_s, self._look, due_s)

    # The router's own routes.

    def _own(self, request: ClientRequest, path: str) -> tuple[int, Headers, bytes]:
        if path == "/replicas" and request.method in (b"POST", b"DELETE"):
            return self._change(request)
        if path == "/metrics":
            return 200, TEXT, self.metrics.text()
        if path == "/":
            return 200, PLAIN, ROOT
        status, reply = self._status(path)
        return status, JSON, msgspec.json.encode(reply)

    def _status(self, path: str) -> tuple[int, Any]:
        if path in ("/health", "/ping"):
            return 200, {"status": "ok"}
        if path == "/ready":
            if self.is_draining:
                return 503, {"status": "the router is shutting down"}
            is_ready = any(
                self.fleet.is_available(each)
                for group in self.fleet.groups.values()
                for each in group.replicas.values()
            )
            return (200, {"status": "ok"}) if is_ready else (503, {"status": "no replica is available"})
        if path == "/version":
            return 200, {"version": self.version}
        if path == "/replicas":
            return 200, {"replicas": list(self.fleet.views())}
        return 200, {"object": "list", "data": self._models()}

    def _models(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "object": "model", "created": self._started_s, "owned_by": "penstock", "root": group.root}
            for group in self.fleet.groups.values()
            for name in group.names
        ]

    def _change(self, request: ClientRequest) -> tuple[int, Headers, bytes]:
        if not self._admin_keys:
            raise HttpError(403, "the fleet can be changed only where the router was started with --admin-api-key")
        if not _admits(self._admin_keys, request):
            raise HttpError(403, "changing the fleet needs the admin key")
        change = decode(ReplicaChange, request.body)
        try:
            backend = Backend.of(change.url, "url")
            self.fleet.key_line(backend)
            if change.peer is not None:
                Prefill(change.url, change.peer).check()
        except RouteError as error:
            raise HttpError(400, str(error), param="url") from None
        self.apply(request.method.decode(), backend.text, change.peer)
        return 200, JSON, msgspec.json.encode({"replicas": list(self.fleet.views())})

    def apply(self, method: str, text: str, peer: str | None) -> None:
        """Add or take out a replica. One that is taken out finishes what it has begun."""
        url = Backend.of(text).url
        replica = self.fleet.replicas.get(url)
        if method == "POST":
            if replica is not None and replica.state != "removing":
                raise HttpError(400, f"url: {url} is already a replica", param="url")
            if replica is not None:
                self.fleet.detach(replica)
            self.probe_now(self.fleet.add(text, peer))
        elif replica is None:
            raise HttpError(404, f"url: {clip(url)} is not a replica", param="url")
        else:
            with self.fleet.observing(replica):
                replica.remove()
            self.probe_now(replica)

    def check(self) -> None:
        self.fleet.check()
        attempts = []
        for exchange in self.exchanges:
            exchange.check()
            attempts += [
                leg.attempt for leg in (exchange, exchange.prefill) if leg is not None and leg.attempt is not None
            ]
        assert self.fleet.num_in_flight == len(attempts), f"{self.fleet.num_in_flight} in flight, {len(attempts)} known"


def is_proxied(path: str) -> bool:
    return path in PROXIED or path.startswith(STORED)


def is_repeatable(request: ClientRequest, asked: Asked) -> bool:
    """Whether the request may be sent again after it may have reached a replica. It may not where that would store another
    response, or delete or cancel one twice."""
    if request.path in PROXIED:
        return request.path != RESPONSES or asked.store is False
    return request.method == b"GET"


def stored_id(path: str, asked: Asked) -> str | None:
    """The id of the stored response that a request names, in its path or as the one that it continues; None: it names
    none."""
    if path not in PROXIED:
        return path.removeprefix(STORED).partition("/")[0]
    given = asked.previous_response_id
    return given if isinstance(given, str) else None


def _admits(keys: Keys, request: ClientRequest) -> bool:
    return keys.admit((b"authorization", value) for value in request.authorization)

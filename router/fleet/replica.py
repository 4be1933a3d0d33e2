"""One replica: its address, its health state and its requests in flight.

The state follows from two sources. Probes of `/ready`, sent twice a second: a replica that is not ready or does not answer
is *down*. And requests: consecutive failures of a replica that reports itself ready *eject* it for a while, then one
request is admitted as a trial. A broken or refused connection makes it *suspect* until the next probe, which is sent at
once, so a killed process is out of rotation within milliseconds.
"""

import asyncio
from typing import Literal
from urllib.parse import urlsplit

from penstock.router.backend import Backend
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.http.upstream import ConnectFailed, Pool, fetch
from penstock.router.placement.placement import ReplicaInfo

# The outcome of a request to a replica. "exhausted": the router had no file descriptor or memory left to connect.
Outcome = Literal["answered", "gone", "busy", "lost", "unreachable", "exhausted", "moved", "late"]
State = Literal["starting", "up", "suspect", "down", "draining", "ejected", "trial", "removing"]

FAILURES_TO_EJECT = 5  # consecutive failures of a replica that is up
EJECTION_S = 1.0  # the first time; doubled each time until a trial succeeds
MAX_EJECTION_S = 30.0
MAX_SILENT_PROBES = 2  # consecutive unanswered probes until the replica is down; a busy replica may miss one


class Replica:
    """One replica, identified by `url`. The fleet derives its availability from `state` and the share of ejected ones."""

    def __init__(self, backend: Backend, connect_timeout_s: float, key_line: bytes = b"") -> None:
        parts = urlsplit(backend.url)
        self.backend = backend
        self.url = backend.url
        self.key_line = key_line  # the header line with its API key
        self.peer = backend.prefill  # for a prefill replica: the address from which decode engines load its blocks
        self.pool = Pool(parts.hostname or "", parts.port or 80, parts.netloc.encode(), connect_timeout_s)
        self.state: State = "starting"
        self.reason = "not probed yet"
        self.is_down = False  # in the state "down"; a removed replica that still has requests can be down as well
        self.models: tuple[str, ...] = ()  # the names it serves; the first model's root names its group
        self.adapters: dict[str, str] = {}  # adapter name → its identifier in block keys
        self.root: str | None = None
        self.info = ReplicaInfo()  # its block size and count
        self.link: EngineSource | None = None  # the event subscription of a vLLM or SGLang engine
        self.probe_due = asyncio.Event()  # set: the replica's probe task sends the next probe at once
        self.text_digest: str | None = None  # digest of tokenizer and template; see router/placement/prompts.py
        self.num_in_flight = 0
        self.num_requests = 0
        self.num_failures = 0  # since it started
        self.num_ejections = 0
        self._failures_in_row = 0
        self._silent_probes = 0
        self._ejection_s = EJECTION_S
        self._ejected_until_s = 0.0
        self._health_request: asyncio.Task[bool] | None = None  # shared by concurrent calls of `has_died`

    @property
    def is_up(self) -> bool:
        return self.state in ("up", "trial")

    @property
    def is_healthy(self) -> bool:
        """Return whether the replica is up without recent failures, so that another success changes nothing."""
        return self.state == "up" and self._failures_in_row == 0

    async def has_died(self, timeout_s: float) -> bool:
        """Request `/health` to find out whether the process has died; concurrent calls share one request.

        A successful connection does not prove that it is alive: the kernel closes the sockets of a killed process one
        after the other, and the listening socket may be the last."""
        if self._health_request is None or self._health_request.done():
            self._health_request = asyncio.get_running_loop().create_task(self._fetch_health(timeout_s))
        return await asyncio.shield(self._health_request)

    async def _fetch_health(self, timeout_s: float) -> bool:
        try:
            await fetch(self.pool, "/health", self.key_line, timeout_s)
        except ConnectFailed as error:
            return error.is_dead
        except TimeoutError:
            pass
        return False

    # Results of probes.

    def probe_passed(self, now_s: float) -> None:
        self._silent_probes = 0
        if self.state == "ejected":
            if now_s >= self._ejected_until_s:
                self._set("trial", "one request on trial")
        elif self.state != "trial":
            self._set("up", "ready")

    def probe_refused(self, reason: str, *, is_draining: bool) -> None:
        """Record a probe that was answered with an error or whose connection was refused."""
        self._silent_probes = 0
        self._set("draining" if is_draining else "down", reason)

    def probe_timed_out(self) -> None:
        self._silent_probes += 1
        if self._silent_probes >= MAX_SILENT_PROBES:
            self._set("down", f"{self._silent_probes} probes in a row were not answered")

    # Outcomes of requests.

    def answered(self) -> None:
        self._failures_in_row = 0
        if self.state == "trial":
            self._ejection_s = EJECTION_S
            self._set("up", "the trial succeeded")

    def connection_broke(self, reason: str, now_s: float) -> None:
        """Record a broken or refused connection: a failure, and `suspect` until a probe shows whether the process died."""
        self.failed(reason, now_s)
        if self.state == "up":
            self._set("suspect", reason)

    def failed(self, reason: str, now_s: float) -> None:
        self.num_failures += 1
        self._failures_in_row += 1
        if self.state == "trial" or (self.state == "up" and self._failures_in_row >= FAILURES_TO_EJECT):
            self._ejected_until_s = now_s + self._ejection_s
            self._ejection_s = min(2 * self._ejection_s, MAX_EJECTION_S)
            self._failures_in_row = 0
            self.num_ejections += 1
            self._set("ejected", reason)

    def reported_draining(self) -> None:
        if self.state in ("up", "suspect", "trial"):
            self._set("draining", "the replica answered that it is shutting down")

    def remove(self) -> None:
        self._set("removing", "removed by the operator")

    def _set(self, state: State, reason: str) -> None:
        if state != "removing":
            self.is_down = state == "down"
        if self.state != "removing":  # which is the last one
            self.state, self.reason = state, reason

    def check(self) -> None:
        assert self.num_in_flight >= 0
        self.pool.check()

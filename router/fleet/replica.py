"""One replica as the router knows it: its address, its state, and the number of its requests in flight.

The state has two sources. Probes ask `/ready` twice a second: a replica that is not ready or does not answer is *down*. The
outcomes of requests are the other: several failures in a row *eject* a replica that is ready for a while, and then one request
is let through as a trial. A connection that breaks or cannot be made makes the replica *suspect* until the next probe, which is
sent at once, so a killed process gets no more requests within milliseconds.
"""

import asyncio
from typing import Literal
from urllib.parse import urlsplit

from penstock.router.backend import Backend
from penstock.router.fleet.engine_feed import EngineSource
from penstock.router.fleet.engine_load import EngineLoad
from penstock.router.http.upstream import ConnectFailed, Pool, fetch
from penstock.router.placement.placement import ReplicaInfo

# How an attempt at a replica ended. "exhausted": the router had no file descriptor or memory left to connect with.
Outcome = Literal["answered", "gone", "busy", "lost", "unreachable", "exhausted", "moved", "late"]
State = Literal["starting", "up", "suspect", "down", "draining", "ejected", "trial", "removing"]

FAILURES_TO_EJECT = 5  # in a row, of answers by a replica that says it is ready
EJECTION_S = 1.0  # the first time; doubled each time until a trial succeeds
MAX_EJECTION_S = 30.0
SILENT_PROBES = 2  # unanswered in a row: down. One may be a busy moment


class Replica:
    """`url` is its name. The fleet decides from `state` and the share of ejected replicas whether it gets requests."""

    def __init__(
        self, backend: Backend, connect_timeout_s: float, key_line: bytes = b"", peer: str | None = None
    ) -> None:
        parts = urlsplit(backend.url)
        self.backend = backend
        self.url = backend.url
        self.key_line = key_line  # the header with the key that it asks for, written
        self.peer = peer  # for a prefill replica: where decode engines read its blocks
        self.pool = Pool(parts.hostname or "", parts.port or 80, parts.netloc.encode(), connect_timeout_s)
        self.state: State = "starting"
        self.reason = "not probed yet"
        self.models: tuple[str, ...] = ()  # the names that it serves; the root of the first is its group
        self.adapters: dict[str, str] = {}  # names of adapters → what the keys of their blocks contain
        self.root: str | None = None
        self.info = ReplicaInfo()  # of its blocks
        self.link: EngineSource | None = None  # the source of its cache events, for vLLM and SGLang
        self.load: EngineLoad | None = None  # as such an engine reports it
        self.text_digest: str | None = None  # of its tokenizer and template; see router/placement/prompts.py
        self.num_in_flight = 0
        self.num_requests = 0
        self.num_failures = 0  # since it started
        self.num_ejections = 0
        self._failures_in_row = 0
        self._silent_probes = 0
        self._ejection_s = EJECTION_S
        self._ejected_until_s = 0.0
        self._question: asyncio.Task[bool] | None = None  # whether it has died

    @property
    def is_up(self) -> bool:
        return self.state in ("up", "trial")

    @property
    def is_sound(self) -> bool:
        """Return whether a good answer would change nothing."""
        return self.state == "up" and self._failures_in_row == 0

    def begin(self) -> None:
        self.num_in_flight += 1
        self.num_requests += 1

    def end(self) -> None:
        self.num_in_flight -= 1
        assert self.num_in_flight >= 0, f"{self.url}: a request ended twice"

    async def has_died(self, timeout_s: float) -> bool:
        """Ask whether the process has died; concurrent callers share one question.

        A connection that can be made does not prove that it lives: the kernel closes the sockets of a killed process one
        after the other, and the listening one may be the last."""
        if self._question is None or self._question.done():
            self._question = asyncio.get_running_loop().create_task(self._ask_health(timeout_s))
        return await asyncio.shield(self._question)

    async def _ask_health(self, timeout_s: float) -> bool:
        try:
            await fetch(self.pool, "/health", self.key_line, timeout_s)
        except ConnectFailed as error:
            return error.is_dead
        except TimeoutError:
            pass
        return False

    # Probes.

    def probe_passed(self, now_s: float) -> None:
        self._silent_probes = 0
        if self.state == "removing":
            return
        if self.state == "ejected":
            if now_s >= self._ejected_until_s:
                self._set("trial", "one request on trial")
        elif self.state != "trial":
            self._set("up", "ready")

    def probe_refused(self, reason: str, *, is_draining: bool) -> None:
        """Record that it answered that it is not ready, or refused the connection."""
        self._silent_probes = 0
        if self.state != "removing":
            self._set("draining" if is_draining else "down", reason)

    def probe_silent(self) -> None:
        self._silent_probes += 1
        if self.state != "removing" and self._silent_probes >= SILENT_PROBES:
            self._set("down", f"{self._silent_probes} probes in a row were not answered")

    # Outcomes of requests.

    def answered(self) -> None:
        self._failures_in_row = 0
        if self.state == "trial":
            self._ejection_s = EJECTION_S
            self._set("up", "the trial went well")

    def connection_broke(self, reason: str, now_s: float) -> None:
        """Record a connection that broke or could not be made. Perhaps the process died; the next probe shows it."""
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

    def said_it_drains(self) -> None:
        if self.state in ("up", "suspect", "trial"):
            self._set("draining", "it answered that it is shutting down")

    def remove(self) -> None:
        self._set("removing", "taken out by the operator")

    def _set(self, state: State, reason: str) -> None:
        self.state = state
        self.reason = reason

    def check(self) -> None:
        assert self.num_in_flight >= 0
        self.pool.check()

"""One replica asked once: connect, send, and give back the load when it is over. Knows nothing of what is asked.

The asker is the upstream's leg: it hears the answer. Load is charged when a replica is chosen, and `end` is the one
place that releases it, exactly once, whatever happens.
"""

from typing import TYPE_CHECKING, Literal

from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import request_head
from penstock.router.http.upstream import ConnectFailed, Leg, Upstream
from penstock.router.placement.load import Charge

if TYPE_CHECKING:
    from penstock.router.app import RouterApp
    from penstock.router.spans import AttemptSpan


class Attempt:
    """connecting → sent → over; a kept connection that turns out to be closed leads from sent to connecting, once."""

    __slots__ = (
        "_app",
        "_asker",
        "_body",
        "_head",
        "_is_exhausted",
        "_is_kept",
        "_span",
        "charge",
        "replica",
        "state",
        "upstream",
    )

    def __init__(self, app: "RouterApp", charge: Charge, asker: Leg, span: "AttemptSpan | None" = None) -> None:
        self.replica = app.fleet.replicas[charge.replica]
        self.charge = charge
        self.state: Literal["connecting", "sent", "over"] = "connecting"
        self.upstream: Upstream | None = None  # once sent
        self._app = app
        self._asker = asker
        self._span = span
        self._head = self._body = b""
        self._is_kept = False  # the connection has served others before
        self._is_exhausted = False  # the router had no resources left to connect
        app.fleet.begin(self.replica)

    def start(
        self, target: bytes, lines: bytes, body: bytes, method: bytes = b"POST", *, is_repeatable: bool = True
    ) -> None:
        """Send the request. One that must not be repeated gets a fresh connection: when a kept connection breaks, it is not
        known whether the replica has read the request or had closed the connection before."""
        if self._span is not None:
            lines += self._span.lines(method)
        self._head, self._body = request_head(method, target, self.replica.pool.host_header, lines, len(body)), body
        upstream = self.replica.pool.take_idle() if is_repeatable else None
        if upstream is None:
            self._app.spawn(self._connect())
        else:
            self._is_kept = True
            self._send(upstream)

    def loss(self) -> Outcome | None:
        """What it comes to that the connection is lost, or that none could be had.

        None: a kept connection that the replica had closed meanwhile says nothing about the replica, and a new one is
        tried. It costs a retry all the same, for perhaps the request was read and is why it closed."""
        if self.upstream is None:
            return "exhausted" if self._is_exhausted else "unreachable"
        if not self._is_kept or self.upstream.has_heard or not self._app.fleet.budget.take():
            return "lost"
        self.state, self.upstream, self._is_kept = "connecting", None, False
        self._app.spawn(self._connect())
        return None

    def end(self, outcome: Outcome, status: int, reason: str, *, is_ok: bool) -> None:
        """A replica whose answer is not complete sees us leave, and aborts."""
        assert self.state != "over", f"{self.replica.url}: an attempt ended twice"
        self.state = "over"
        if self.upstream is not None:
            self.upstream.drop(self._asker)
        if self._span is not None:
            self._span.end(outcome, status)
        self.charge.release(is_ok)
        self._app.fleet.end(self.replica)
        self._app.judge(self.replica, outcome, status, reason)

    async def _connect(self) -> None:
        try:
            upstream = await self.replica.pool.connect()
        except ConnectFailed as error:
            if self.state != "over":
                self._is_exhausted = error.is_local
                self._asker.lost(str(error))
            return
        if self.state == "over":
            upstream.transport.abort()  # the client left, or the replica went down, meanwhile
        else:
            self._send(upstream)

    def drop_body(self) -> None:
        """Forget the request, which will not be sent again."""
        self._head = self._body = b""

    def _send(self, upstream: Upstream) -> None:
        self.state, self.upstream = "sent", upstream
        upstream.send(self._head, self._body, self._asker)

    def check(self) -> None:
        assert (self.state == "connecting") <= (self.upstream is None), "connecting, with a connection"
        assert (self.state == "sent") <= (self.upstream is not None), "sent, without a connection"
        assert self.charge.is_released == (self.state == "over"), "the load of an attempt is released at its end"

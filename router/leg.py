"""One request sent to one replica: connects, sends, and releases the replica's load at the end.

The exchange chooses the replica and decides what follows from a failure. The sink receives the answer straight from the
connection. `end` is the one place that releases the load, exactly once.
"""

from penstock.router.fleet.fleet import Fleet
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import request_head
from penstock.router.http.upstream import ConnectFailed, Sink, Upstream
from penstock.router.placement.load import Charge


class LegSpan:
    """The span of a leg if tracing is off; spans.py has the recording one."""

    def lines(self, method: bytes) -> bytes:  # noqa: ARG002
        """Return the headers that make the replica's span a child of this one."""
        return b""

    def end(self, outcome: Outcome, status: int) -> None: ...


NO_SPAN = LegSpan()


class Leg:
    """Without an `upstream` it is connecting, with one the request was sent. A kept connection that turns out to be closed
    leads back to connecting, once."""

    def __init__(self, fleet: Fleet, charge: Charge, sink: Sink, span: LegSpan) -> None:
        self.replica = fleet.replicas[charge.replica]
        self.charge = charge
        self.upstream: Upstream | None = None
        self._fleet, self._sink, self._span = fleet, sink, span
        self._head = self._body = b""
        self._is_kept = False  # the connection has served other requests before
        self._is_exhausted = False  # the router had no resources left to connect
        fleet.begin(self.replica)

    @property
    def is_over(self) -> bool:
        return self.charge.is_released

    def start(
        self, target: bytes, lines: bytes, body: bytes, method: bytes = b"POST", *, is_repeatable: bool = True
    ) -> None:
        """Send the request. A request that must not be repeated gets a new connection: if a kept connection breaks, the replica
        may have read the request, or may have closed the connection before."""
        lines += self._span.lines(method)
        self._head, self._body = request_head(method, target, self.replica.pool.host_header, lines, body), body
        upstream = self.replica.pool.take_idle() if is_repeatable else None
        if upstream is None:
            self._fleet.tasks.spawn(self._connect())
        else:
            self._is_kept = True
            self._send(upstream)

    def loss(self) -> Outcome | None:
        """Return the outcome of a lost or failed connection; None if the leg tries again.

        A kept connection that the replica had closed meanwhile says nothing about the replica, so the leg connects anew. That
        costs a retry all the same: perhaps the replica read the request and closed the connection because of it."""
        if self.upstream is None:
            return "exhausted" if self._is_exhausted else "unreachable"
        if not self._is_kept or self.upstream.has_heard or not self._fleet.budget.take():
            return "lost"
        self.upstream, self._is_kept = None, False
        self._fleet.tasks.spawn(self._connect())
        return None

    def end(self, outcome: Outcome, status: int, reason: str, *, is_ok: bool) -> None:
        """Release the connection and the load. If the answer is not complete, the replica sees the connection close and aborts."""
        assert not self.is_over, f"{self.replica.url}: a leg ended twice"
        if self.upstream is not None:
            self.upstream.drop(self._sink)
        self._span.end(outcome, status)
        self.charge.release(is_ok)
        self._fleet.end(self.replica)
        self._fleet.record_outcome(self.replica, outcome, status, reason)

    def drop_body(self) -> None:
        """Free the request, which will not be sent again."""
        self._head = self._body = b""

    async def _connect(self) -> None:
        try:
            upstream = await self.replica.pool.connect()
        except ConnectFailed as error:
            if not self.is_over:
                self._is_exhausted = error.is_local
                self._sink.lost(str(error))
            return
        if self.is_over:
            upstream.transport.abort()  # the client left, or the replica went down, meanwhile
        else:
            self._send(upstream)

    def _send(self, upstream: Upstream) -> None:
        self.upstream = upstream
        upstream.send(self._head, self._body, self._sink)

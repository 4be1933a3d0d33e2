"""One proxied request: choose a replica, send, relay; and until the first byte is out, another replica if one fails.

The answer's head is held back until its first byte of body: up to then the client has seen nothing, so the request
can go elsewhere. Afterwards never, for half an answer cannot be taken back: a stream that breaks ends with an
error event. Load is charged when a replica is chosen and released exactly once, whatever happens.

Where others compute long prompts there are two legs: this one answers, and router/prefill.py beside it computes the
prompt, until the first byte. Either failing ends the other, and the request begins again.

Callbacks, not tasks: on the way through a healthy fleet nothing here waits, and a task and a future for each request
cost as much as all of its parsing.
"""

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from penstock.engine.http.errors import HttpError, error_body
from penstock.router.fleet.fleet import NOBODY, Group
from penstock.router.fleet.replica import Outcome, Replica
from penstock.router.http.edge import ClientConnection
from penstock.router.http.heads import AnswerHead, Request, answer_head, request_head
from penstock.router.http.upstream import ConnectFailed, Dechunker, Upstream
from penstock.router.placement.placement import Charge, Prompt
from penstock.router.prefill import PrefillLeg, place

if TYPE_CHECKING:
    from penstock.router.app import App

MAX_HELD_BYTES = 64 * 1024  # of an answer that may yet be replaced by another replica's
MAX_LOST = 2  # replicas that may break on one request: it may be the reason
STALLED_S = 10.0  # how long a stream may stand still when its replica is down
BUSY = frozenset({429, 503})  # answers that another replica may better


class Plan(msgspec.Struct, frozen=True, gc=False):
    """What is sent, and by what a replica is chosen. The body is the client's; `with_ids` has the token ids in it."""

    target: bytes
    lines: bytes  # the headers, written
    body: bytes
    with_ids: tuple[bytes, bytes] | None
    text_digest: str | None  # of the tokenizer that made the ids: only a replica with the same may take them
    model: str | None
    session: str | None
    prompt: Prompt | None
    num_tokens: int


class Exchange:
    """Reads an answer (it is the connection's reader and the upstream's leg) and carries it to the client."""

    # How it begins stands on the class: to set twenty attributes of each request costs as much as choosing its replica.
    replica: Replica | None = None  # the one that is being asked
    prefill: PrefillLeg | None = None  # who computes the prompt for it; None: it does so itself
    has_begun = False
    _group: Group
    _plan: Plan
    _tried: frozenset[str] = NOBODY
    _prefills_tried: frozenset[str] = NOBODY
    _is_whole = False  # nobody shall compute the prompt but who answers
    _num_lost = 0
    _upstream: Upstream | None = None
    _is_kept = False  # the connection has served others before
    _was_stale = False
    _charge: Charge | None = None
    _is_gone = False
    _reason = ""
    _status = 0
    _head: AnswerHead
    _plain: Dechunker | None = None  # a client of HTTP/1.0 knows no chunks
    _held: tuple[bytes, ...] = ()  # the body of a busy answer
    _num_data = _num_reported = 0
    _num_data_then = 0

    def __init__(self, app: "App", request: Request, connection: ClientConnection) -> None:
        self.app = app
        self.request = request
        self.connection = connection
        self.begun_s = self._quiet_since_s = time.monotonic()

    def start(self, group: Group, plan: Plan) -> None:
        self._group, self._plan = group, plan
        self.app.fleet.budget.deposit(self.app.fleet.num_under_way)
        self._next()

    def refuse(self, error: HttpError) -> None:
        """End without an answer of a replica."""
        self.app.exchanges.discard(self)
        if not self._is_gone:
            self.connection.reader = None
            self.app.refuse(self.request, self.connection, error)

    # One replica after the other.

    def _next(self) -> None:
        fleet, plan = self.app.fleet, self._plan
        charge = fleet.choose(
            self._group,
            plan.model,
            plan.prompt,
            num_tokens=plan.num_tokens,
            session=plan.session,
            tried=self._tried,
            expects=self._group.prefills is None,
        )
        if charge is None:
            self._give_up(fleet.refusal(self._group, plan.model))
            return
        self._charge = charge
        self.replica = fleet.replicas[charge.replica]
        fleet.begin(self.replica)
        if self._group.prefills is not None:
            self._split(self._group.prefills, charge)
        upstream = self.replica.pool.take_idle()
        if upstream is not None:
            self._send(upstream, is_kept=True)
        else:
            self.app.spawn(self._connect(self.replica, charge))

    async def _connect(self, replica: Replica, charge: Charge) -> None:
        try:
            upstream = await replica.pool.connect()
        except ConnectFailed as error:
            if self._charge is charge:
                self._reason = str(error)
                self._settle("unreachable")
            return
        if self._charge is charge:
            self._send(upstream, is_kept=False)
        else:
            upstream.abandon()  # the client left, or the replica went down, meanwhile

    def _send(self, upstream: Upstream, *, is_kept: bool) -> None:
        plan, replica = self._plan, self.replica
        assert replica is not None
        lines, body = plan.lines, plan.body
        if plan.with_ids is not None and replica.text_digest == plan.text_digest:
            lines, body = plan.with_ids
        if self.prefill is not None:
            body = self.prefill.told(body, is_form=body is not plan.body)
        head = request_head(plan.target, replica.host_header, lines, len(body))
        self._upstream, self._is_kept = upstream, is_kept
        upstream.send(head, body, self)

    def _split(self, prefills: Group, charge: Charge) -> None:
        """Have the prompt computed elsewhere, if enough of it is missing here and somebody is there to do it."""
        path, plan = self.request.path, self._plan
        num_missing = charge.num_tokens - charge.predicted_cached_tokens
        if not self._is_whole and num_missing >= self.app.config.prefill_threshold:
            self.prefill = place(self.app, prefills, path, plan, self._prefills_tried, self._prefill_failed)
        if self.prefill is not None:
            charge.hand_over(self.prefill.predicted_ttft_s)
        elif plan.prompt is not None:
            self._group.placement.expect(charge, plan.prompt)

    def _blocks_came(self, leg: PrefillLeg) -> None:
        """Or the time was over; in either case who answers needs nobody any more, and has the prompt in its cache.

        Not expected before: another request with this prompt would be sent there to find nothing, and compute it."""
        self.app.metrics.split_requests["split"] += 1
        leg.drop()
        if self._status < 400 and self._plan.prompt is not None and self._charge is not None:
            self._group.placement.expect(self._charge, self._plan.prompt)

    def _prefill_failed(self, leg: PrefillLeg, outcome: Outcome) -> None:
        """Nothing is out yet: withdraw the question from who answers, and begin again, with another to compute the
        prompt or without. Never an error: who answers can do without."""
        assert self.replica is not None and not self.has_begun
        self._prefills_tried |= {leg.replica.url}
        self._num_lost += outcome == "lost"
        is_over = self._num_lost >= MAX_LOST or (outcome != "unreachable" and not self.app.fleet.budget.take())
        self._is_whole = leg.is_refused or is_over
        if self._upstream is not None:
            self._upstream.drop(self)
        self._let_go(is_ok=False)
        asyncio.get_running_loop().call_soon(self._retry)

    def _settle(self, outcome: Outcome) -> None:
        """The replica has done what it will do."""
        replica = self.replica
        if replica is None:
            return
        if self._num_data > 1:
            self._report_progress()
        self._let_go(is_ok=outcome == "answered" and self._status < 500)
        self.app.judge(replica, outcome, self._status, self._reason)
        if outcome in ("answered", "gone"):
            self.app.exchanges.discard(self)
        else:
            self._go_on(replica, outcome)

    def _let_go(self, *, is_ok: bool) -> None:
        """The one place where load is given back; who computes the prompt need not go on."""
        charge, replica, leg = self._charge, self.replica, self.prefill
        assert charge is not None and replica is not None
        charge.release(is_ok)
        self.replica = self.prefill = self._upstream = self._charge = None
        self.app.fleet.end(replica)
        if leg is not None:
            leg.drop()

    def _go_on(self, replica: Replica, outcome: Outcome) -> None:
        """Nothing is out yet: ask another replica, within reason."""
        self._tried |= {replica.url}
        self._num_lost += outcome == "lost"
        metrics = self.app.metrics
        if outcome == "late":
            self._give_up(HttpError(504, f"the replica did not answer: {self._reason}"))
        elif self._num_lost < MAX_LOST and (outcome == "unreachable" or self.app.fleet.budget.take()):
            metrics.retries[outcome] += 1
            # Not from here: this may be the callback of a connection that is being closed.
            asyncio.get_running_loop().call_soon(self._retry)
        elif self._num_lost < MAX_LOST and outcome == "lost":
            self.app.spawn(self._go_on_if_dead(replica))
        else:
            self._fail(outcome)

    async def _go_on_if_dead(self, replica: Replica) -> None:
        """No retry is left. But who takes no connection any more has died, and its requests with it: to send this one
        again is no more work than there was."""
        try:
            (await replica.pool.connect()).abandon()
        except ConnectFailed:
            self.app.metrics.retries["lost"] += 1
            self._retry()
        else:
            self._fail("lost")

    def _fail(self, outcome: Outcome) -> None:
        self.app.metrics.not_retried[outcome] += 1
        self._give_up(HttpError(502, f"the replica failed: {self._reason}", headers={"retry-after": "1"}))

    def _retry(self) -> None:
        if not self._is_gone:
            self._next()

    def _give_up(self, error: HttpError) -> None:
        """Nobody else can be asked: a busy replica's own answer, if there was one, or an error."""
        if not self._is_gone and self._held and self._status in BUSY:
            self.app.exchanges.discard(self)
            self.app.metrics.count(self.request, self._status)
            self._write_first(b"".join(self._held))
            self.connection.finish(self._keeps())
        else:
            self.refuse(error)

    # What comes from the replica.

    def head(self, head: AnswerHead) -> None:
        self._head, self._status, self._held = head, head.status, ()
        self._plain = Dechunker() if head.is_chunked and self.request.is_http10 else None

    def data(self, data: bytes) -> None:
        self._num_data += 1
        if self._plain is not None:
            data = self._plain.feed(data)
        if self.has_begun:
            self.connection.transport.write(data)
        elif self._status in BUSY and sum(map(len, self._held)) < MAX_HELD_BYTES:
            self._held += (data,)
        else:
            self._begin(data)

    def ended(self) -> None:
        self._upstream = None  # it may be serving somebody else by the time the client is slow
        if self._status in BUSY and not self.has_begun:
            self._held = self._held or (b"",)
            self._reason = f"it answered {self._status}"
            self._settle("busy")
            return
        if not self.has_begun:
            self._begin(b"")
        self.connection.finish(self._keeps())
        self._settle("answered")

    def lost(self, reason: str) -> None:
        self._reason = reason
        replica, upstream = self.replica, self._upstream
        if self.has_begun:
            self._break_off(reason)
        elif upstream is not None and replica is not None and self._may_be_stale(upstream):
            self._upstream = None
            assert self._charge is not None
            self.app.spawn(self._connect(replica, self._charge))
        else:
            self._settle("lost")

    def _may_be_stale(self, upstream: Upstream) -> bool:
        """A kept connection that the replica had closed meanwhile says nothing about the replica: once, a new one is
        tried. It costs a retry all the same, for perhaps the request was read and is why it closed."""
        is_stale = self._is_kept and not upstream.has_heard and not self._was_stale and self.app.fleet.budget.take()
        self._was_stale |= is_stale
        return is_stale

    def _begin(self, data: bytes) -> None:
        """The first byte: from here on nothing can be asked of another replica."""
        self.has_begun = True
        assert self._charge is not None
        self._charge.first_token(self._head.cached_tokens)
        metrics = self.app.metrics
        metrics.count(self.request, self._status)
        metrics.first_byte.observe(time.monotonic() - self.begun_s)
        if self.prefill is not None:
            self._blocks_came(self.prefill)
        elif self._group.prefills is not None:
            metrics.split_requests["direct"] += 1
        self._write_first(b"".join((*self._held, data)) if self._held else data)

    def _write_first(self, data: bytes) -> None:
        lines = self._head.lines
        if self._plain is None and self._head.is_chunked:
            lines += b"transfer-encoding: chunked\r\n"
        self.connection.transport.write(answer_head(self._status, lines, self._keeps()) + data)
        self._held = ()

    def _keeps(self) -> bool:
        return self._head.is_framed and self.request.keep_alive and not self.app.edge.is_closing

    def _break_off(self, reason: str) -> None:
        """Half an answer is out. A stream can still say so if its framing is whole; else the connection is cut."""
        self.app.metrics.broken_streams += 1
        upstream, replica = self._upstream, self.replica
        if upstream is not None and upstream.is_at_boundary and self._head.is_stream and self._plain is None:
            event = b"data: " + error_body(502, f"the replica failed: {reason}") + b"\n\ndata: [DONE]\n\n"
            self.connection.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
            self.connection.finish(keep_alive=False)
        else:
            self.connection.transport.abort()
        self._status = 502
        if replica is not None:
            self.app.probe_now(replica)
        self._settle("answered")

    # What comes from the client and the router.

    def pause(self) -> None:
        if self._upstream is not None and not self._upstream.is_closed:
            self._upstream.transport.pause_reading()

    def resume(self) -> None:
        if self._upstream is not None and not self._upstream.is_closed:
            self._upstream.transport.resume_reading()

    def client_gone(self) -> None:
        """Dropping the connection is how an engine learns that nobody reads any more."""
        self._is_gone = True
        self.app.metrics.num_client_gone += 1
        self.app.exchanges.discard(self)
        if self._upstream is not None:
            self._upstream.drop(self)
        self._settle("gone")

    def replica_down(self, replica: Replica, reason: str) -> None:
        """If it is one of ours and nothing is out yet, ask another."""
        if self.prefill is not None and self.prefill.replica is replica:
            self.prefill.move(reason)
        elif self.replica is replica and not self.has_begun:
            self._reason = reason
            if self._upstream is not None:
                self._upstream.drop(self)
            self._settle("moved")

    def look(self, now_s: float, response_s: float) -> None:
        """Called twice a second: tells the placement of the progress, and ends what has stood still for too long."""
        if self._num_data != self._num_data_then or self._upstream is None or self.connection.is_paused:
            self._num_data_then, self._quiet_since_s = self._num_data, now_s
            self._report_progress()
            return
        quiet_s = now_s - self._quiet_since_s
        is_down = self.replica is not None and self.replica.state == "down"
        if quiet_s > response_s or (is_down and self.has_begun and quiet_s > STALLED_S):
            self._reason = f"not a byte for {quiet_s:.0f} s"
            self._upstream.drop(self)
            if self.has_begun:
                self._break_off(self._reason)
            else:
                self._settle("late")

    def _report_progress(self) -> None:
        if self._charge is not None and self._num_data > self._num_reported:
            self._charge.tokens(self._num_data - self._num_reported)
            self._num_reported = self._num_data

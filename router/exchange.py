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
import logging
import re
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from penstock.engine.http.errors import CLIENT_CLOSED, HttpError, error_body
from penstock.router.attempt import Attempt
from penstock.router.fleet.fleet import ReplicaGroup
from penstock.router.fleet.replica import Outcome, Replica
from penstock.router.foreign_error import in_openais_form
from penstock.router.http.edge import ClientConnection
from penstock.router.http.heads import AnswerHead, ClientRequest, answer_head
from penstock.router.http.upstream import Dechunker
from penstock.router.placement.load import Charge
from penstock.router.placement.placement import NO_NAMES, Prompt
from penstock.router.prefill import PrefillLeg, place
from penstock.router.split import Fields

if TYPE_CHECKING:
    from penstock.router.app import RouterApp

log = logging.getLogger("penstock.router")

MAX_HELD_BYTES = 64 * 1024  # of an answer that may yet be replaced by another replica's
MAX_LOST = 2  # replicas that may break on one request: it may be the reason
STALLED_S = 10.0  # how long a stream may stand still when its replica is down
BUSY = frozenset({429, 503})  # answers that another replica may better

_CACHED = re.compile(rb'"cached_tokens": ?(\d{1,9})\b')


def cached_tokens_in(data: bytes) -> int | None:
    """What a piece of an answer's body says of its usage. (In a text of the model's the quotes would be escaped.)"""
    found = _CACHED.findall(data)
    return int(found[-1]) if found else None


def as_refusal(error: Exception) -> HttpError:
    """Of a bug of ours the traceback goes to the log, and nothing of it to the client."""
    if isinstance(error, HttpError):
        return error
    log.error("a request failed in the router", exc_info=error)
    return HttpError(500, "internal error")


class Outgoing(msgspec.Struct, frozen=True, gc=False):
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
    client_key: bytes  # the header with the client's own key, for replicas that have none
    fields: Fields | None = None  # the body's, if it was split to make the ids
    is_repeatable: bool = True  # False: it changes what a replica stores, so it is sent to one replica at most


SENT = Outgoing(b"", b"", b"", None, None, None, None, None, 0, b"")  # in place of one whose answer has begun


class Exchange:
    """Reads an answer (it is the connection's reader and the upstream's leg) and carries it to the client.

    preparing ──▶ asking ──▶ relaying ──▶ over      asking: a replica was chosen, nothing is out
                   │  ▲                             between: it failed, the next one is asked in a moment
                   ▼  │                             over: from any state, when the client leaves or an error is
                  between                           all there is to say
    """

    __slots__ = (
        "_cached", "_group", "_head", "_held", "_is_whole", "_num_data",
        "_num_data_then", "_num_lost", "_num_reported", "_outgoing", "_plain", "_prefills_tried", "_quiet_since_s", "_reason", "_status", "_tried",
        "app", "attempt", "begun_s", "connection", "first_byte_s", "model", "num_attempts", "prefill",
        "replica", "request", "state", "trace",
    )  # fmt: skip
    _group: ReplicaGroup
    _outgoing: Outgoing
    _head: AnswerHead

    def __init__(self, app: "RouterApp", request: ClientRequest, connection: ClientConnection) -> None:
        self.app = app
        self.request = request
        self.connection = connection
        self.state: Literal["preparing", "asking", "between", "relaying", "over"] = "preparing"
        self.attempt: Attempt | None = None  # at the replica that is being asked
        self.prefill: PrefillLeg | None = None  # who computes the prompt for it; None: it does so itself
        self.begun_s = self._quiet_since_s = time.monotonic()
        self.first_byte_s: float | None = None  # since then
        self.model: str | None = None
        self.replica = ""  # that was asked last
        self.num_attempts = 0
        self.trace = None if app.spans is None else app.spans.begin(request)
        self._tried = self._prefills_tried = NO_NAMES
        self._is_whole = False  # only who answers shall compute the prompt
        self._num_lost = 0
        self._reason = ""
        self._status = 0
        self._plain: Dechunker | None = None  # a client of HTTP/1.0 knows no chunks
        self._held: tuple[bytes, ...] = ()  # the body of a busy answer
        self._cached: int | None = -1  # in the body, of an engine that says it there; -1: not looked for
        self._num_data = self._num_reported = self._num_data_then = 0

    @property
    def answer(self) -> AnswerHead | None:
        """Of which the client has seen something."""
        return None if self.first_byte_s is None else self._head

    def open(self) -> None:
        """From now on it hears of its client and of replicas that go down."""
        self.connection.reader = self
        self.app.exchanges.add(self)

    def restrict_to(self, group: ReplicaGroup, replica: Replica) -> None:
        """Send the request to this replica of the group or to none, because only this one stores what it names."""
        self._tried = frozenset(group.replicas) - {replica.url}

    def start(self, group: ReplicaGroup, outgoing: Outgoing) -> None:
        self._group, self._outgoing, self.model = group, outgoing, outgoing.model or group.root
        self.app.fleet.budget.deposit(self.app.fleet.num_in_flight)
        self._next()

    def refuse(self, error: HttpError) -> None:
        """End without an answer of a replica."""
        if self.state != "over":
            self._close(error.status)
            self.connection.reader = None
            self.app.refuse(self.request, self.connection, error)

    def fail(self, error: Exception) -> None:
        """Something was raised: end with an answer, or it would count as in flight for ever."""
        if self.attempt is not None:
            self._let_go("gone", "")
        self.refuse(as_refusal(error))

    def _close(self, status: int) -> None:
        if self.state == "over":
            return
        self.state = "over"
        self.app.exchanges.discard(self)
        if self.trace is not None:
            self.trace.end(self, status)
        self.app.note(self.request, status, self)

    # One replica after the other.

    def _next(self) -> None:
        group, outgoing = self._group, self._outgoing
        charge = group.placement.choose(
            outgoing.prompt,
            num_tokens=outgoing.num_tokens,
            session=outgoing.session,
            exclude=group.not_for(outgoing.model, self._tried),
            expects=group.prefills is None,
        )
        if charge is None:
            self._give_up(self.app.fleet.refusal(group, outgoing.model))
            return
        self.state, self._status = "asking", 0
        self.replica, self.num_attempts = charge.replica, self.num_attempts + 1
        span = None if self.trace is None else self.trace.attempt(charge)
        attempt = self.attempt = Attempt(self.app, charge, self, span)
        if group.prefills is not None:
            self._split(group.prefills, charge)
        lines, body = outgoing.lines, outgoing.body
        if outgoing.with_ids is not None and attempt.replica.text_digest == outgoing.text_digest:
            lines, body = outgoing.with_ids
        if self.prefill is not None:
            body = self.prefill.hint(body, is_form=body is not outgoing.body)
        attempt.start(
            outgoing.target,
            lines + (attempt.replica.key_line or outgoing.client_key),
            body,
            self.request.method,
            is_repeatable=outgoing.is_repeatable,
        )

    def _split(self, prefills: ReplicaGroup, charge: Charge) -> None:
        """Have the prompt computed elsewhere, if enough of it is missing here and a replica is there to do it."""
        outgoing = self._outgoing
        num_missing = charge.num_tokens - charge.predicted_cached_tokens
        if not self._is_whole and num_missing >= self.app.config.prefill_threshold:
            self.prefill = place(self, prefills, outgoing, self._prefills_tried)
        if self.prefill is not None:
            charge.hand_over(self.prefill.predicted_ttft_s)
        elif outgoing.prompt is not None:
            self._group.placement.expect(charge, outgoing.prompt)

    def _blocks_came(self, leg: PrefillLeg, charge: Charge) -> None:
        """Or the time was over; in either case who answers needs no other any more, and has the prompt in its cache.

        Not expected before: another request with this prompt would be sent there to find nothing, and compute it."""
        self.app.metrics.counts["split_requests", "split"] += 1
        leg.leave()
        if self._status < 400 and self._outgoing.prompt is not None:
            self._group.placement.expect(charge, self._outgoing.prompt)

    def prefill_failed(self, leg: PrefillLeg, outcome: Outcome) -> None:
        """Nothing is out yet: withdraw the question from who answers, and begin again, with another to compute the
        prompt or without. Never an error: who answers can do without."""
        assert self.state == "asking"
        self._prefills_tried |= {leg.replica.url}
        self._num_lost += outcome == "lost"
        is_over = self._num_lost >= MAX_LOST or (outcome != "unreachable" and not self.app.fleet.budget.take())
        self._is_whole = leg.is_refused or is_over
        self._let_go("gone", "")
        self._retry()

    def _settle(self, outcome: Outcome, reason: str = "") -> None:
        """The replica has done what it will do."""
        if self._num_data > 1:
            self._report_progress()
        attempt = self._let_go(outcome, reason)
        if outcome in ("answered", "gone"):
            self._close(CLIENT_CLOSED if outcome == "gone" else self._status)
        else:
            self._go_on(attempt, outcome, reason)

    def _let_go(self, outcome: Outcome, reason: str) -> Attempt:
        """The attempt is over; who computes the prompt need not go on."""
        attempt, leg = self.attempt, self.prefill
        assert attempt is not None
        self.state, self.attempt, self.prefill = "between", None, None
        attempt.end(outcome, self._status, reason, is_ok=outcome == "answered" and self._status < 500)
        if leg is not None:
            leg.leave()
        return attempt

    def _go_on(self, attempt: Attempt, outcome: Outcome, reason: str) -> None:
        """Nothing is out yet: ask another replica, within reason."""
        replica = attempt.replica
        self._tried |= {replica.url}
        self._num_lost += outcome == "lost"
        self._reason = reason
        if outcome == "late":
            self._give_up(HttpError(504, f"the replica did not answer: {reason}"))
        elif outcome == "exhausted":  # every other replica would fail in the same way
            message = f"the router has no resources left for another connection: {reason}"
            self._give_up(HttpError(503, message, headers={"retry-after": "1"}))
        elif outcome in ("lost", "moved") and attempt.upstream is not None and not self._outgoing.is_repeatable:
            self._reason = f"{reason}; the request may have taken effect, so it is not sent again"
            self._fail(outcome)
        elif self._num_lost >= MAX_LOST:
            self._fail(outcome)
        elif outcome == "unreachable" or self.app.fleet.budget.take():
            self.app.metrics.counts["retries", outcome] += 1
            self._retry()
        elif outcome in ("lost", "moved"):
            self.app.spawn(self._go_on_if_dead(replica, outcome))
        else:
            self._fail(outcome)

    async def _go_on_if_dead(self, replica: Replica, outcome: Outcome) -> None:
        """No retry is left. But where the process has died, its requests have with it: to send this one again is no more
        work than there was."""
        if await replica.has_died(self.app.config.patience.probe_timeout_s):
            self.app.metrics.counts["retries", outcome] += 1
            self._retry()
        else:
            self._fail(outcome)

    def _fail(self, outcome: Outcome) -> None:
        self.app.metrics.counts["not_retried", outcome] += 1
        self._give_up(HttpError(502, f"the replica failed: {self._reason}", headers={"retry-after": "1"}))

    def _retry(self) -> None:
        """Not from here: this may be the callback of a connection that is being closed."""
        asyncio.get_running_loop().call_soon(self._retry_now)

    def _retry_now(self) -> None:
        if self.state == "between":
            try:
                self._next()
            except Exception as error:  # as at its beginning
                self.fail(error)

    def _give_up(self, error: HttpError) -> None:
        """No other can be asked: a busy replica's own answer, if there was one, or an error."""
        if self.state == "over" or not self._held or self._head.status not in BUSY:
            self.refuse(error)
            return
        self._status = self._head.status
        self._close(self._status)
        self.app.metrics.count(self.request, self._status)
        self._write_first(b"".join(self._held), is_whole=True)
        self.connection.finish(self._keeps())

    # What comes from the replica.

    def head(self, head: AnswerHead) -> None:
        self._head, self._status, self._held = head, head.status, ()
        if head.cached_tokens is None and self.attempt is not None and self.attempt.replica.text_digest is None:
            self._cached = None
        self._plain = Dechunker() if head.is_chunked and self.request.is_http10 else None

    def data(self, data: bytes) -> None:
        self._num_data += data.count(b"\n\n") or 1  # events of a stream; several may come at once
        # `in` would cost three times as much: on bytes it first tries its left side as a number, by an exception.
        if self._cached != -1 and data.rfind(b'"cached_tokens":') >= 0:
            self._cached = cached_tokens_in(data)
        if self._plain is not None:
            data = self._plain.feed(data)
        if self.state == "relaying":
            self.connection.transport.write(data)
        elif self._status >= 400 and not self._head.is_stream and sum(map(len, self._held)) < MAX_HELD_BYTES:
            self._held += (data,)  # of an error, to be replaced or put into its form
        else:
            self._begin(data)

    def ended(self) -> None:
        if self._status in BUSY and self.state == "asking":
            self._held = self._held or (b"",)
            self._settle("busy", f"it answered {self._status}")
            return
        if self.state == "asking":
            self._begin(b"", is_whole=True)
        self.connection.finish(self._keeps())
        if self.attempt is not None and self._head.is_stream:
            self.attempt.charge.streamed(self._num_data)
        if self._cached is not None and self._cached >= 0 and self.attempt is not None:
            self._group.placement.counted(self.attempt.charge, self._cached)
        self._settle("answered")

    def lost(self, reason: str) -> None:
        assert self.attempt is not None
        if self.state == "relaying":
            self._break_off(self.attempt, reason)
        elif (outcome := self.attempt.loss()) is not None:
            self._settle(outcome, reason)

    def _begin(self, data: bytes, is_whole: bool = False) -> None:
        """The first byte: from here on nothing can be asked of another replica."""
        assert self.attempt is not None
        self.state = "relaying"
        charge, metrics = self.attempt.charge, self.app.metrics
        charge.first_token(self._head.cached_tokens)
        metrics.count(self.request, self._status)
        self.first_byte_s = time.monotonic() - self.begun_s
        metrics.first_byte.observe(self.first_byte_s)
        if self.prefill is not None:
            self._blocks_came(self.prefill, charge)
            self.prefill = None
        elif self._group.prefills is not None:
            metrics.counts["split_requests", "direct"] += 1
        # The request is not sent again. A body of megabytes must not stay in memory as long as its answer streams.
        self.request.body = b""
        self._outgoing = SENT
        self.attempt.drop_body()
        self._write_first(b"".join((*self._held, data)) if self._held else data, is_whole)

    def _write_first(self, data: bytes, is_whole: bool) -> None:
        lines, is_chunked = self._head.lines, self._plain is None and self._head.is_chunked
        mapped = in_openais_form(self._head, data, is_chunked) if is_whole and self._status >= 400 else None
        if mapped is not None:
            lines, data = mapped
        elif is_chunked:
            lines += b"transfer-encoding: chunked\r\n"
        self.connection.transport.write(answer_head(self._status, lines, self._keeps()) + data)
        self._held = ()

    def _keeps(self) -> bool:
        return self._head.is_framed and self.request.keep_alive and not self.app.edge.is_closing

    def _break_off(self, attempt: Attempt, reason: str) -> None:
        """Half an answer is out. A stream can still say so if its framing is whole; else the connection is cut."""
        self.app.metrics.counts["broken_streams",] += 1
        upstream = attempt.upstream
        if upstream is not None and upstream.is_at_boundary and self._head.is_stream and self._plain is None:
            # By its name where Anthropic's clients look for it; others read the data alone.
            event = b"event: error\ndata: " + error_body(502, f"the replica failed: {reason}") + b"\n\ndata: [DONE]\n\n"
            self.connection.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
            self.connection.finish(keep_alive=False)
        else:
            self.connection.transport.abort()
        self._status = 502
        self.app.probe_now(attempt.replica)
        self._settle("answered")

    # What comes from the client and the router.

    def pause(self) -> None:
        if (transport := self._replica_transport()) is not None:
            transport.pause_reading()

    def resume(self) -> None:
        if (transport := self._replica_transport()) is not None:
            transport.resume_reading()

    def _replica_transport(self) -> asyncio.Transport | None:
        upstream = None if self.attempt is None else self.attempt.upstream
        return None if upstream is None or upstream.is_closed else upstream.transport

    def client_gone(self) -> None:
        """Dropping the connection is how an engine learns that its answer is not read any more."""
        if self.state == "over":  # it is we who cut the stream
            return
        self.app.metrics.counts["client_gone",] += 1
        if self.attempt is not None:
            self._settle("gone")
        self._close(CLIENT_CLOSED)

    def replica_down(self, replica: Replica, reason: str) -> None:
        """If it is one of ours and nothing is out yet, ask another."""
        if self.prefill is not None and self.prefill.replica is replica:
            self.prefill.leave("moved", reason)
        elif self.state == "asking" and self.attempt is not None and self.attempt.replica is replica:
            self._settle("moved", reason)

    def look(self, now_s: float, response_s: float) -> None:
        """Called twice a second: reports the progress to the placement, and ends what has stood still for too long."""
        attempt = self.attempt
        if (
            attempt is None
            or attempt.state != "sent"
            or self._num_data != self._num_data_then
            or self.connection.is_paused
        ):
            self._num_data_then, self._quiet_since_s = self._num_data, now_s
            self._report_progress()
            return
        quiet_s = now_s - self._quiet_since_s
        reason = f"not a byte for {quiet_s:.0f} s"
        if self.state == "relaying":
            if quiet_s > (min(response_s, STALLED_S) if attempt.replica.state == "down" else response_s):
                self._break_off(attempt, reason)
        elif quiet_s > response_s:
            self._settle("late", reason)

    def _report_progress(self) -> None:
        if self.attempt is not None and self._num_data > self._num_reported:
            self.attempt.charge.tokens(self._num_data - self._num_reported)
            self._num_reported = self._num_data

    def check(self) -> None:
        assert (self.attempt is not None) == (self.state in ("asking", "relaying")), f"{self.state}: {self.attempt}"
        assert self.prefill is None or self.attempt is not None, "a prompt is computed for no answer"
        assert (self in self.app.exchanges) == (self.state != "over"), f"{self.state}, and listed or not"
        if self.attempt is not None:
            self.attempt.check()
            assert self.attempt.state != "over", "an attempt is over and was kept"

"""One proxied request: chooses a replica, sends, and relays the answer; asks another replica if one fails early.

Until the first byte of an answer the client has seen nothing, so a request can go elsewhere. Where other replicas compute
long prompts there are two legs: the answer's, and beside it, until the first byte, the prompt's (prefill.py). If either
fails, the other ends too, and the request begins again.

This uses callbacks, not tasks: on the way through a healthy fleet nothing here waits, and a task and a future for each
request cost as much as all of its parsing.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from penstock.engine.http.errors import CLIENT_CLOSED, HttpError
from penstock.router.answer import BUSY, AnswerWriter, as_refusal, cached_tokens_in
from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Outcome, Replica
from penstock.router.http.edge import ClientConnection
from penstock.router.http.heads import AnswerHead, ClientRequest
from penstock.router.leg import NO_SPAN, Leg, LegSpan
from penstock.router.metrics import RouterMetrics
from penstock.router.placement.load import Charge
from penstock.router.placement.prompts import CHAT, COMPLETIONS, PreparedRequest
from penstock.router.prefill import PrefillLeg, start_prefill
from penstock.router.routes import is_repeatable

MAX_LOST = 2  # replicas that may break on one request: it may be the reason
STALLED_S = 10.0  # how long a stream may stand still when its replica is down


class RequestTrace:
    """The spans of an exchange if tracing is off; spans.py has the recording ones."""

    trace_id: str | None = None

    def leg(self, charge: Charge, name: str = "attempt") -> LegSpan:  # noqa: ARG002
        return NO_SPAN

    def end(self, exchange: "Exchange", status: int) -> None: ...


NO_TRACE = RequestTrace()
BeginTrace = Callable[[ClientRequest], RequestTrace]


class Exchange:
    """Chooses replicas for one request until one answers; the sink of the answer's leg. Ends exactly once, by `on_end`.

    preparing ──▶ asking ──▶ relaying ──▶ over      asking: a replica was chosen, the client has seen nothing
                   │  ▲                             between: it failed, the next one is asked in a moment
                   ▼  │                             over: from any state, when the client leaves or no replica is left
                  between
    """

    _group: ReplicaGroup
    _prepared: PreparedRequest  # until the first byte
    _only: Replica | None

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        request: ClientRequest,
        connection: ClientConnection,
        trace: RequestTrace,
        on_end: Callable[["Exchange", int], None],
    ) -> None:
        self.request, self.connection, self.trace = request, connection, trace
        self.state: Literal["preparing", "asking", "between", "relaying", "over"] = "preparing"
        self.leg: Leg | None = None  # at the replica that is being asked
        self.prefill: PrefillLeg | None = None  # computes the prompt for it; None: it does so itself
        self.begun_s = self._quiet_since_s = time.monotonic()
        self.first_byte_s: float | None = None  # after the beginning
        self.model: str | None = None
        self.replica = ""  # that was asked last
        self.num_attempts = 0
        self._fleet, self._metrics, self._on_end = fleet, metrics, on_end
        self._answer = AnswerWriter(request, connection)
        self._tried = self._prefills_tried = frozenset[str]()
        self._prefill_disabled = False  # no other replica computes the prompt any more
        self._num_lost = 0
        self._loss = ""  # why the last of them broke
        self._status = 0  # of the current leg's answer
        self._reads_usage = False  # the engine states in the body how much was cached
        self._cached: int | None = None  # as it says there
        self._num_data = self._num_reported = 0  # pieces of the answer; those that were there at the last look

    @property
    def answer(self) -> AnswerHead | None:
        """The head that the client has seen."""
        return None if self.first_byte_s is None else self._answer.head

    def start(self, group: ReplicaGroup, prepared: PreparedRequest, only: Replica | None = None) -> None:
        """Send the request to a replica of the group. `only`: the one replica that stores the response that it names."""
        self._group, self._prepared, self.model = group, prepared, prepared.parsed.model or group.root
        self._only = only
        self._fleet.budget.deposit(self._fleet.num_in_flight)
        self._next()

    def refuse(self, error: HttpError) -> None:
        """End with an error of the router."""
        if self.state != "over":
            self._close(error.status)
            self.connection.reader = None
            self._metrics.count(self.request, error.status)
            self.connection.refuse(error)

    def fail(self, error: Exception) -> None:
        """End with an error after an exception; otherwise the request would count as in flight for ever."""
        if self.leg is not None:
            self._end_legs("gone", "")
        self.refuse(as_refusal(error))

    def _close(self, status: int) -> None:
        if self.state != "over":
            self.state = "over"
            self.trace.end(self, status)
            self._on_end(self, status)

    # One replica after the other.

    def _next(self, failure: Outcome | None = None) -> None:
        """Ask a replica. `failure`: why the one before did not answer."""
        group, prepared = self._group, self._prepared
        model = prepared.parsed.model
        if self._only is not None:  # also none that has joined meanwhile
            self._tried |= group.replicas.keys() - {self._only.url}
        charge = group.placement.choose(
            prepared.prompt,
            num_tokens=prepared.num_tokens,
            session=prepared.session,
            exclude=group.excluded_for(model, self._tried),
            expects=group.prefills is None,
        )
        if failure is not None:
            self._metrics.counts["not_retried" if charge is None else "retries", failure] += 1
        if charge is None:
            self._give_up(self._failure(self._loss) if self._loss else self._fleet.refusal(group, model))
            return
        self.state = "asking"
        self.replica, self.num_attempts = charge.replica, self.num_attempts + 1
        leg = self.leg = Leg(self._fleet, charge, self, self.trace.leg(charge))
        self._status = 0
        self._num_data = self._num_reported = 0
        self._quiet_since_s = time.monotonic()  # of this attempt: the one before may have been quiet for minutes
        if group.prefills is not None:
            self._split(group.prefills, charge)
        digest = leg.replica.text_digest
        lines, body = prepared.form_for(digest, leg.replica.key_line)
        if self.prefill is not None:
            body = self.prefill.hint(body, is_form=prepared.has_ids_for(digest))
        request, may_repeat = self.request, is_repeatable(self.request, prepared.parsed)
        leg.start(request.target, lines, body, request.method, is_repeatable=may_repeat)

    def _split(self, prefills: ReplicaGroup, charge: Charge) -> None:
        """Start a prefill leg if enough of the prompt is not cached here and a prefill replica is available."""
        prompt = self._prepared.prompt
        num_missing = charge.num_tokens - charge.predicted_cached_tokens
        if not self._prefill_disabled and num_missing >= self._fleet.config.prefill_threshold:
            self.prefill = start_prefill(
                self._fleet, prefills, self._prepared, self._prefills_tried, self.trace.leg, self._prefill_ended
            )
        if self.prefill is not None:
            charge.hand_over(self.prefill.leg.charge.predicted_ttft_s)
        elif prompt is not None:
            self._group.placement.expect(charge, prompt)

    def _prefill_ended(self, prefill: PrefillLeg, outcome: Outcome) -> None:
        """If the prefill failed, withdraw the request from the decode replica and begin again, with another prefill replica or
        without. This is never an error: the decode replica can compute the prompt itself."""
        is_failed = outcome not in ("answered", "gone") or (outcome == "answered" and prefill.status >= 400)
        name = "dropped" if outcome == "gone" else outcome
        self._metrics.counts["prefills", ("failed" if is_failed else "computed") if name == "answered" else name] += 1
        if not is_failed:
            return
        assert self.state == "asking"
        self._prefills_tried |= {prefill.leg.replica.url}
        self._num_lost += outcome == "lost"
        is_over = self._num_lost >= MAX_LOST or (outcome != "unreachable" and not self._fleet.budget.take())
        self._prefill_disabled = prefill.is_refused or is_over
        self._end_legs("gone", "")
        self._retry()

    def _end_legs(self, outcome: Outcome, reason: str) -> Leg:
        leg, prefill, status = self.leg, self.prefill, self._status
        assert leg is not None
        self.state, self.leg, self.prefill = "between", None, None
        if status and outcome != "busy":
            self._answer.held.clear()  # a part of a busy replica's answer is no answer
        leg.end(outcome, status, reason, is_ok=outcome == "answered" and status < 500)
        if prefill is not None:
            prefill.end()
        return leg

    def _leg_failed(self, outcome: Outcome, reason: str) -> None:
        """Ask another replica, within the limits of the retry rules. The client has seen nothing."""
        leg = self._end_legs(outcome, reason)
        self._tried |= {leg.replica.url}
        if outcome == "lost":
            self._num_lost, self._loss = self._num_lost + 1, reason
        is_unclear = outcome in ("lost", "moved")  # the replica may have read the request
        # A request that may have run does not end with another replica's 429 or 503, which would invite the client to repeat it.
        if outcome == "late":
            self.refuse(HttpError(504, f"the replica did not answer: {reason}"))
        elif outcome == "exhausted":  # every other replica would fail in the same way
            message = f"the router has no resources left for another connection: {reason}"
            self._give_up(HttpError(503, message, headers={"retry-after": "1"}))
        elif is_unclear and leg.upstream is not None and not is_repeatable(self.request, self._prepared.parsed):
            self._answer.held.clear()
            self._do_not_retry(outcome, f"{reason}; the request may have taken effect, so it is not sent again")
        elif self._num_lost >= MAX_LOST:
            self._do_not_retry(outcome, reason)
        elif outcome == "unreachable" or self._fleet.budget.take():
            self._retry(outcome)
        elif is_unclear:
            self._fleet.tasks.spawn(self._retry_if_dead(leg.replica, outcome, reason))
        else:
            self._do_not_retry(outcome, reason)

    async def _retry_if_dead(self, replica: Replica, outcome: Outcome, reason: str) -> None:
        """Retry without retry budget if the process has died: its requests have ended with it, so this adds no load."""
        if await replica.has_died(self._fleet.config.timeouts.probe_timeout_s):
            self._retry(outcome)
        else:
            self._do_not_retry(outcome, reason)

    def _do_not_retry(self, outcome: Outcome, reason: str) -> None:
        self._metrics.counts["not_retried", outcome] += 1
        self._give_up(self._failure(reason))

    def _failure(self, reason: str) -> HttpError:
        return HttpError(502, f"the replica failed: {reason}", headers={"retry-after": "1"})

    def _retry(self, failure: Outcome | None = None) -> None:
        """Ask the next replica from the event loop, because this may run in the callback of a closing connection."""
        asyncio.get_running_loop().call_soon(self._retry_now, failure)

    def _retry_now(self, failure: Outcome | None) -> None:
        if self.state == "between":
            try:
                self._next(failure)
            except Exception as error:  # a bug must not leave the client without an answer
                self.fail(error)

    def _give_up(self, error: HttpError) -> None:
        """End without another attempt: with a busy replica's own answer if there was one, otherwise with `error`."""
        status = self._answer.head.status
        if self.state == "over" or status not in BUSY or not self._answer.held:
            self.refuse(error)
            return
        self._close(status)
        self._metrics.count(self.request, status)
        self._answer.begin()
        self._answer.finish()

    # Events from the replica.

    def head(self, head: AnswerHead) -> None:
        self._status = head.status
        self._answer.expect(head)
        self._cached = None
        self._reads_usage = head.cached_tokens is None and self.leg is not None and self.leg.replica.text_digest is None

    def data(self, data: bytes) -> None:
        # A piece of a stream may have several events.
        self._num_data += (data.count(b"\n\n") or 1) if self._answer.head.is_stream else 1
        # `in` would cost three times as much: on bytes it first tries its left side as a number, by an exception.
        if self._reads_usage and data.rfind(b'"cached_tokens":') >= 0:
            self._cached = cached_tokens_in(data)
        if self.state == "relaying":
            self._answer.write(data)
        elif not self._answer.hold(data):
            self._begin(data)

    def ended(self) -> None:
        if self.state == "asking" and self._status in BUSY:
            self._answer.hold(b"")  # the answer is whole
            self._leg_failed("busy", f"it answered {self._status}")
            return
        if self.state == "asking":
            self._begin(b"")
        self._answer.finish()
        assert self.leg is not None
        if self._shows_tokens:
            self.leg.charge.streamed(self._num_data)
        if self._cached is not None:
            self.leg.charge.counted(self._cached)
        self._end_legs("answered", "")
        self._close(self._status)

    def lost(self, reason: str) -> None:
        assert self.leg is not None
        if self.state == "relaying":
            self._break_off(self.leg, reason)
        elif (outcome := self.leg.loss()) is not None:
            self._leg_failed(outcome, reason)
        else:  # it is sent once more, to the same replica
            self._quiet_since_s = time.monotonic()

    @property
    def _shows_tokens(self) -> bool:
        """Tell whether the answer's times say how fast the replica is; a whole answer begins after its last token, and other
        engines begin the streams of agents' APIs before the prefill (with response.created)."""
        if self._status >= 400 or not self._answer.head.is_stream or self.leg is None:
            return False
        return self.leg.replica.text_digest is not None or self.request.path in (CHAT, COMPLETIONS)

    def _begin(self, data: bytes) -> None:
        """Write the first byte. From here on no other replica can be asked."""
        assert self.leg is not None
        self.state = "relaying"
        charge, prompt = self.leg.charge, self._prepared.prompt
        begin = charge.first_token if self._shows_tokens else charge.answered
        begin(self._answer.head.cached_tokens)
        self._metrics.count(self.request, self._status)
        self.first_byte_s = time.monotonic() - self.begun_s
        self._metrics.first_byte.observe(self.first_byte_s)
        if self.prefill is not None:
            # Either the blocks came or the wait for them is over. The prompt is expected in the cache only now: another request
            # with this prompt would have found nothing there, and computed it.
            self._metrics.counts["split_requests", "split"] += 1
            prefill, self.prefill = self.prefill, None
            prefill.end()
            if self._status < 400 and prompt is not None:
                self._group.placement.expect(charge, prompt)
        elif self._group.prefills is not None:
            self._metrics.counts["split_requests", "direct"] += 1
        # The request is not sent again. A body of megabytes must not stay in memory as long as its answer streams.
        del self._prepared
        self.request.body = b""
        self.leg.drop_body()
        self._answer.begin(data)

    def _break_off(self, leg: Leg, reason: str) -> None:
        """End an answer early, after its first byte."""
        self._metrics.counts["broken_streams",] += 1
        self._answer.break_off(reason, is_at_boundary=leg.upstream is not None and leg.upstream.is_at_boundary)
        self._status = 502
        leg.replica.probe_due.set()
        self._end_legs("answered", "")
        self._close(502)

    # Events from the client and the router.

    def pause(self) -> None:
        if (transport := self._replica_transport()) is not None:
            transport.pause_reading()

    def resume(self) -> None:
        if (transport := self._replica_transport()) is not None:
            transport.resume_reading()

    def _replica_transport(self) -> asyncio.Transport | None:
        upstream = None if self.leg is None else self.leg.upstream
        if upstream is None or upstream.sink is not self or upstream.transport.is_closing():
            return None  # the answer may be complete, and the connection in the pool, before all of it is written
        return upstream.transport

    def client_gone(self) -> None:
        """End the exchange. The replica sees its connection close and aborts the request."""
        if self.state == "over":  # the router itself cut the stream
            return
        self._metrics.counts["client_gone",] += 1
        if self.leg is not None:
            self._end_legs("gone", "")
        self._close(CLIENT_CLOSED)

    def replica_down(self, replica: Replica, reason: str) -> None:
        """Ask another replica if a leg is at this replica and the client has received nothing yet."""
        if self.prefill is not None and self.prefill.leg.replica is replica:
            self.prefill.end("moved", reason)
        elif self.state == "asking" and self.leg is not None and self.leg.replica is replica:
            self._leg_failed("moved", reason)

    def check_progress(self, now_s: float, response_s: float) -> None:
        """Report the progress to the placement, and end an answer that has stood still for too long. Called twice a second."""
        leg, num_new = self.leg, self._num_data - self._num_reported
        if leg is None or leg.upstream is None or num_new or self.connection.is_paused:
            self._num_reported, self._quiet_since_s = self._num_data, now_s
            if leg is not None and num_new:
                leg.charge.tokens(num_new)
            return
        quiet_s = now_s - self._quiet_since_s
        reason = f"not a byte for {quiet_s:.0f} s"
        if self.state == "relaying":
            if quiet_s > (min(response_s, STALLED_S) if leg.replica.is_down else response_s):
                self._break_off(leg, reason)
        elif quiet_s > response_s:
            self._leg_failed("late", reason)

    def check(self) -> None:
        assert (self.leg is not None) == (self.state in ("asking", "relaying")), f"{self.state}: {self.leg}"
        assert self.prefill is None or self.leg is not None, "a prompt is computed for no answer"
        for leg in self.legs():
            assert not leg.is_over, "a leg is over and was kept"

    def legs(self) -> list[Leg]:
        prompt_leg = None if self.prefill is None else self.prefill.leg
        return [each for each in (self.leg, prompt_leg) if each is not None]


def move_requests(exchanges: set[Exchange], replica: Replica) -> None:
    """Let the requests that wait at this replica, which is down, ask others."""
    for exchange in list(exchanges):
        exchange.replica_down(replica, f"{replica.url} is down: {replica.reason}")

"""The prompt's half of a split request: a prefill replica computes it while the decode replica takes its blocks.

Both are asked at once. The decode replica waits for the blocks and reads each as it comes, so that moving a long prompt
takes place while the rest of it is computed. This leg lives beside the exchange's own and never longer: it ends by
itself, or is dropped when the other has its first byte, fails, or loses its client.
"""

from typing import TYPE_CHECKING

from penstock.router.attempt import Attempt
from penstock.router.fleet.fleet import ReplicaGroup
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import AnswerHead
from penstock.router.placement.load import Charge
from penstock.router.placement.prompts import COMPLETIONS
from penstock.router.split import Fields, form_with_hint, ids_of, prompt_of, splittable, with_hint

if TYPE_CHECKING:
    from penstock.router.exchange import Exchange, Outgoing

LEAST_WAIT_S = 2.0
MOST_WAIT_S = 60.0


class PrefillLeg:
    """The exchange hears at most once that it failed (`prefill_failed`), and not after `leave`."""

    def __init__(self, exchange: "Exchange", charge: Charge, fields: Fields) -> None:
        trace = exchange.trace
        self.attempt = Attempt(exchange.app, charge, self, None if trace is None else trace.attempt(charge, "prefill"))
        self.replica = self.attempt.replica
        self.predicted_ttft_s = charge.predicted_ttft_s
        self._exchange, self._fields = exchange, fields
        self._status = 0
        self._cached_tokens: int | None = None

    @property
    def is_refused(self) -> bool:
        """It would not compute this prompt, and no other will."""
        return 400 <= self._status < 500 and self._status != 429

    def hint(self, body: bytes, *, is_form: bool) -> bytes:
        """What the decode replica is sent: the client's body, and where the blocks will be.

        It waits for twice as long as we expect this to take, for the queue may be longer than we know; then it
        computes what has not come.
        """
        assert self.replica.peer is not None
        wait_s = min(LEAST_WAIT_S + 2 * self.predicted_ttft_s, MOST_WAIT_S)
        hint = {"peer": self.replica.peer, "wait_s": round(wait_s, 3)}
        return form_with_hint(body, hint) if is_form else with_hint(self._fields, hint)

    def leave(self, outcome: Outcome = "gone", reason: str = "") -> None:
        """It is not needed any more, or has failed."""
        if self.attempt.state == "over":
            return
        is_computed = outcome == "answered" and self._status < 400
        self.attempt.end(outcome, self._status, reason, is_ok=is_computed or outcome == "gone")
        self._exchange.app.metrics.counts["prefills", _name(outcome, self._status)] += 1
        if not is_computed and outcome != "gone":
            self._exchange.prefill_failed(self, outcome)

    # What comes from the replica.

    def head(self, head: AnswerHead) -> None:
        self._status, self._cached_tokens = head.status, head.cached_tokens

    def data(self, data: bytes) -> None:
        """A token that the decode replica makes too, or an error that it will put into its own words."""

    def ended(self) -> None:
        if self._status < 400:
            self.attempt.charge.first_token(self._cached_tokens)
        self.leave("busy" if self._status in (429, 503) else "answered", f"it answered {self._status}")

    def lost(self, reason: str) -> None:
        if (outcome := self.attempt.loss()) is not None:
            self.leave(outcome, reason)


def place(
    exchange: "Exchange", prefills: ReplicaGroup, outgoing: "Outgoing", tried: frozenset[str]
) -> PrefillLeg | None:
    """The leg, in flight; None where the prompt has to be computed with the answer, or no other can do it soon."""
    path = exchange.request.path
    fields = splittable(path, outgoing.body, outgoing.fields)
    if outgoing.prompt is None or fields is None:
        return None
    charge = prefills.placement.choose(
        outgoing.prompt,
        num_tokens=outgoing.num_tokens,
        session=outgoing.session,
        exclude=prefills.not_for(outgoing.model, tried),
    )
    if charge is None:
        return None
    if charge.predicted_ttft_s > MOST_WAIT_S:
        charge.release(ok=False)
        return None
    leg = PrefillLeg(exchange, charge, fields)
    key_line = leg.replica.key_line or outgoing.client_key
    is_form = outgoing.with_ids is not None and leg.replica.text_digest == outgoing.text_digest
    if is_form and outgoing.with_ids is not None:
        lines, form = outgoing.with_ids
        path, body = COMPLETIONS, ids_of(form)  # to ids it is all the same what made them
    else:
        lines, body = outgoing.lines, prompt_of(fields)
    leg.attempt.start(path.encode(), lines + key_line, body)
    return leg


def _name(outcome: Outcome, status: int) -> str:
    """For the metrics."""
    if outcome != "answered":
        return "dropped" if outcome == "gone" else outcome
    return "computed" if status < 400 else "failed"

"""The prompt's leg of a split request: a prefill replica computes the prompt while the decode replica takes its blocks.

Both are asked at once. The decode replica waits for the blocks and reads each as it comes, so that moving a long prompt
takes place while the rest of it is computed. This leg never lives longer than the answer's leg: it ends by itself, or the
exchange ends it when the answer's first byte comes, its leg fails, or the client leaves.
"""

from collections.abc import Callable

from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import AnswerHead
from penstock.router.leg import Leg, LegSpan
from penstock.router.placement.load import Charge
from penstock.router.placement.prompts import COMPLETIONS
from penstock.router.routed_request import RoutedRequest
from penstock.router.split import Fields, form_with_hint, ids_of, prompt_of, splittable, with_hint

LEAST_WAIT_S = 2.0
MAX_WAIT_S = 60.0


class PrefillLeg:
    """The sink of the leg, which discards the answer. It calls `on_end` once, with the outcome."""

    def __init__(
        self,
        fleet: Fleet,
        charge: Charge,
        fields: Fields,
        span: LegSpan,
        on_end: Callable[["PrefillLeg", Outcome], None],
    ) -> None:
        self.leg = Leg(fleet, charge, self, span)
        self.status = 0
        self.predicted_ttft_s = charge.predicted_ttft_s
        self._fields, self._on_end = fields, on_end
        self._cached_tokens: int | None = None

    @property
    def is_refused(self) -> bool:
        """Return whether the replica refused this prompt in a way that every other replica would."""
        return 400 <= self.status < 500 and self.status != 429

    def hint(self, body: bytes, *, is_form: bool) -> bytes:
        """Return the decode replica's request body: the client's body and the address of the prompt's blocks.

        The replica waits for twice as long as we expect this to take, for the queue may be longer than we know; then it
        computes what has not come.
        """
        peer = self.leg.replica.peer
        assert peer is not None
        wait_s = min(LEAST_WAIT_S + 2 * self.predicted_ttft_s, MAX_WAIT_S)
        hint = {"peer": peer, "wait_s": round(wait_s, 3)}
        return form_with_hint(body, hint) if is_form else with_hint(self._fields, hint)

    def end(self, outcome: Outcome = "gone", reason: str = "") -> None:
        """End the leg unless it has ended: it is no longer needed ("gone"), or it has failed."""
        if self.leg.state != "over":
            is_ok = outcome == "gone" or (outcome == "answered" and self.status < 400)
            self.leg.end(outcome, self.status, reason, is_ok=is_ok)
            self._on_end(self, outcome)

    def head(self, head: AnswerHead) -> None:
        self.status, self._cached_tokens = head.status, head.cached_tokens

    def data(self, data: bytes) -> None:
        """Discard the body: a token that the decode replica also generates, or an error that it also reports."""

    def ended(self) -> None:
        if self.status < 400:
            self.leg.charge.first_token(self._cached_tokens)
        self.end("busy" if self.status in (429, 503) else "answered", f"it answered {self.status}")

    def lost(self, reason: str) -> None:
        if (outcome := self.leg.loss()) is not None:
            self.end(outcome, reason)


def start_prefill(
    fleet: Fleet,
    prefills: ReplicaGroup,
    routed: RoutedRequest,
    tried: frozenset[str],
    span_of: Callable[[Charge, str], LegSpan],
    on_end: Callable[[PrefillLeg, Outcome], None],
) -> PrefillLeg | None:
    """Start the leg; return None if the decode replica must compute the prompt, or no prefill replica can do so soon."""
    request, routable = routed.request, routed.routable
    fields = splittable(request.path, request.body, routable.fields)
    if routable.prompt is None or fields is None:
        return None
    charge = prefills.placement.choose(
        routable.prompt,
        num_tokens=routable.num_tokens,
        session=routed.session,
        exclude=prefills.excluded_for(routed.parsed.model, tried),
    )
    if charge is None:
        return None
    if charge.predicted_ttft_s > MAX_WAIT_S:
        charge.release(ok=False)
        return None
    prefill = PrefillLeg(fleet, charge, fields, span_of(charge, "prefill"), on_end)
    path, (lines, body) = request.path, routed.form_for(prefill.leg.replica)
    if routed.has_ids_for(prefill.leg.replica):
        path, body = COMPLETIONS, ids_of(body)  # ids are the same whatever made them
    else:
        body = prompt_of(fields)
    prefill.leg.start(path.encode(), lines, body)
    return prefill

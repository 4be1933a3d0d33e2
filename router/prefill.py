"""The prompt's half of a split request: a prefill replica computes it while the decode replica takes its blocks.

Both are asked at once. The decode replica waits for the blocks and reads each as it comes, so that moving a long prompt
takes place while the rest of it is computed. This leg lives beside the exchange's own and never longer: it ends by
itself, or is dropped when the other has its first byte, fails, or loses its client.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.router.fleet.fleet import Group
from penstock.router.fleet.replica import Outcome, Replica
from penstock.router.http.heads import AnswerHead, request_head
from penstock.router.http.upstream import ConnectFailed, Upstream
from penstock.router.placement.placement import Charge
from penstock.router.placement.prompts import COMPLETIONS
from penstock.router.split import form_with_peer, ids_of, is_splittable, prompt_of, with_peer

if TYPE_CHECKING:
    from penstock.router.app import App
    from penstock.router.exchange import Plan

LEAST_WAIT_S = 2.0
MOST_WAIT_S = 60.0


class PrefillLeg:
    """`on_failure` is called at most once, and not after `drop`. The load is released exactly once."""

    def __init__(self, app: "App", charge: Charge, on_failure: Callable[["PrefillLeg", Outcome], None]) -> None:
        self.replica: Replica = app.fleet.replicas[charge.replica]
        self.predicted_ttft_s = charge.predicted_ttft_s
        self._app = app
        self._charge = charge
        self._on_failure = on_failure
        self._head = self._body = b""
        self._upstream: Upstream | None = None
        self._is_kept = self._was_stale = self._is_over = False
        self._status = 0
        self._cached_tokens: int | None = None

    @property
    def is_refused(self) -> bool:
        """It would not compute this prompt, and no other will."""
        return 400 <= self._status < 500 and self._status != 429

    def start(self, target: bytes, lines: bytes, body: bytes) -> None:
        self._head = request_head(target, self.replica.host_header, lines, len(body))
        self._body = body
        self._app.fleet.begin(self.replica)
        upstream = self.replica.pool.take_idle()
        if upstream is not None:
            self._send(upstream, is_kept=True)
        else:
            self._app.spawn(self._connect())

    def told(self, body: bytes, *, is_form: bool) -> bytes:
        """What the decode replica is sent: the client's body, and where the blocks will be.

        It waits for twice as long as we expect this to take, for the queue may be longer than we know; then it
        computes what has not come.
        """
        assert self.replica.peer is not None
        wait_s = min(LEAST_WAIT_S + 2 * self.predicted_ttft_s, MOST_WAIT_S)
        return (form_with_peer if is_form else with_peer)(body, self.replica.peer, wait_s)

    def drop(self) -> None:
        """Nobody needs it any more: the replica sees us leave and aborts."""
        self._leave("gone", "")

    def move(self, reason: str) -> None:
        """The replica is down."""
        self._leave("moved", reason)

    def _leave(self, outcome: Outcome, reason: str) -> None:
        if self._upstream is not None:
            self._upstream.drop(self)
        self._settle(outcome, reason)

    async def _connect(self) -> None:
        try:
            upstream = await self.replica.pool.connect()
        except ConnectFailed as error:
            self._settle("unreachable", str(error))
            return
        if self._is_over:
            upstream.abandon()
        else:
            self._send(upstream, is_kept=False)

    def _send(self, upstream: Upstream, *, is_kept: bool) -> None:
        self._upstream, self._is_kept = upstream, is_kept
        upstream.send(self._head, self._body, self)

    def _settle(self, outcome: Outcome, reason: str) -> None:
        if self._is_over:
            return
        self._is_over, self._upstream = True, None
        is_computed = outcome == "answered" and self._status < 400
        self._charge.release(is_computed or outcome == "gone")
        self._app.fleet.end(self.replica)
        self._app.metrics.prefills[_name(outcome, self._status)] += 1
        self._app.judge(self.replica, outcome, self._status, reason)
        if not is_computed and outcome != "gone":
            self._on_failure(self, outcome)

    # What comes from the replica.

    def head(self, head: AnswerHead) -> None:
        self._status, self._cached_tokens = head.status, head.cached_tokens

    def data(self, data: bytes) -> None:
        """A token that the decode replica makes too, or an error that it will put into its own words."""

    def ended(self) -> None:
        if self._status < 400:
            self._charge.first_token(self._cached_tokens)
        self._settle("busy" if self._status in (429, 503) else "answered", f"it answered {self._status}")

    def lost(self, reason: str) -> None:
        upstream, self._upstream = self._upstream, None
        assert upstream is not None
        # As in Exchange: a kept connection that had been closed says nothing about the replica.
        if self._is_kept and not upstream.has_heard and not self._was_stale and self._app.fleet.budget.take():
            self._was_stale = True
            self._app.spawn(self._connect())
        else:
            self._settle("lost", reason)


def place(
    app: "App",
    prefills: Group,
    path: str,
    plan: "Plan",
    tried: frozenset[str],
    on_failure: Callable[[PrefillLeg, Outcome], None],
) -> PrefillLeg | None:
    """The leg, under way; None where the prompt has to be computed with the answer, or nobody else can do it soon."""
    if plan.prompt is None or not is_splittable(path, plan.body):
        return None
    charge = app.fleet.choose(
        prefills,
        plan.model,
        prefills.placement.adopt(plan.prompt),
        num_tokens=plan.num_tokens,
        session=plan.session,
        tried=tried,
    )
    if charge is None:
        return None
    if charge.predicted_ttft_s > MOST_WAIT_S:
        charge.release(ok=False)
        return None
    leg = PrefillLeg(app, charge, on_failure)
    if plan.with_ids is not None and leg.replica.text_digest == plan.text_digest:
        lines, form = plan.with_ids
        leg.start(COMPLETIONS.encode(), lines, ids_of(form))  # to ids it is all the same what they were made of
    else:
        leg.start(path.encode(), plan.lines, prompt_of(plan.body))
    return leg


def _name(outcome: Outcome, status: int) -> str:
    """For the metrics."""
    if outcome != "answered":
        return "dropped" if outcome == "gone" else outcome
    return "computed" if status < 400 else "failed"

"""The prompt's leg of a split request: a prefill replica computes the prompt while the decode replica takes its blocks.

Both are asked at once. The decode replica waits for the blocks and loads each as it comes, so that moving a long prompt
takes place while the rest of it is computed. This leg never lives longer than the answer's leg: it ends by itself, or the
exchange ends it when the answer's first byte comes, its leg fails, or the client leaves.

The client's body decides what is answered; the decode replica gets it with the address of the prompt's blocks in it. The
prefill replica's body is built from those fields alone that make the prompt, and requests one token. A field that is
missing there costs a hit in the cache and nothing else, because blocks are found by their content.
"""

from collections.abc import Callable

import msgspec
from msgspec import Raw

from penstock.engine.http import token_form
from penstock.engine.http.body import split_object
from penstock.engine.http.errors import HttpError
from penstock.router.fleet.fleet import Fleet, ReplicaGroup
from penstock.router.fleet.replica import Outcome
from penstock.router.http.heads import AnswerHead
from penstock.router.leg import Leg, LegSpan
from penstock.router.placement.load import Charge
from penstock.router.placement.prompts import CHAT, COMPLETIONS, RENDERED, PreparedRequest

HINT = "kv_transfer_params"
KEPT_WITH_IDS = frozenset({"model", "cache_salt", "priority"})
MAKES_THE_PROMPT = KEPT_WITH_IDS | RENDERED | {"prompt", "tools", "documents", "truncate_prompt_tokens"}
ONE_TOKEN = {"max_tokens": Raw(b"1"), "temperature": Raw(b"0")}
NEEDS_EVERY_POSITION = ("prompt_logprobs", "echo")  # computed where they are answered; such a prompt skips the cache
ABSENT = Raw(b"null")

Fields = dict[str, Raw]  # of a request's body

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
        wait_s = min(LEAST_WAIT_S + 2 * self.leg.charge.predicted_ttft_s, MAX_WAIT_S)
        hint = {"peer": peer, "wait_s": round(wait_s, 3)}
        return form_with_hint(body, hint) if is_form else with_hint(self._fields, hint)

    def end(self, outcome: Outcome = "gone", reason: str = "") -> None:
        """End the leg unless it has ended: it is no longer needed ("gone"), or it has failed."""
        if not self.leg.is_over:
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
    prepared: PreparedRequest,
    tried: frozenset[str],
    span_of: Callable[[Charge, str], LegSpan],
    on_end: Callable[[PrefillLeg, Outcome], None],
) -> PrefillLeg | None:
    """Start the leg; return None if the decode replica must compute the prompt, or no prefill replica can do so soon."""
    path = prepared.request.path
    fields = splittable(path, prepared.request.body, prepared.fields)
    if prepared.prompt is None or fields is None:
        return None
    charge = prefills.placement.choose(
        prepared.prompt,
        num_tokens=prepared.num_tokens,
        session=prepared.session,
        exclude=prefills.excluded_for(prepared.parsed.model, tried),
        expects=False,
    )
    if charge is None:
        return None
    if charge.predicted_ttft_s > MAX_WAIT_S:
        charge.release(ok=None)
        return None
    prefills.placement.expect(charge, prepared.prompt)
    prefill = PrefillLeg(fleet, charge, fields, span_of(charge, "prefill"), on_end)
    replica = prefill.leg.replica
    lines, body = prepared.form_for(replica.text_digest, replica.key_line)
    if prepared.has_ids_for(replica.text_digest):
        path, body = COMPLETIONS, ids_of(body)  # ids are the same whatever made them
    else:
        body = prompt_of(fields)
    prefill.leg.start(path.encode(), lines, body)
    return prefill


# The bodies of both requests.


def splittable(path: str, body: bytes, fields: Fields | None) -> Fields | None:
    """Return the request's fields if another replica may compute its prompt, else None. `fields`: the body's fields if they
    are known already."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        fields = split_object(body) if fields is None else fields
    except HttpError:  # the replica says what is wrong
        return None
    needs_all = any(bytes(fields.get(name, ABSENT)) not in (b"null", b"false") for name in NEEDS_EVERY_POSITION)
    return None if needs_all else fields


def prompt_of(fields: Fields) -> bytes:
    """Return the body of a prefill request for a text prompt."""
    kept = {name: raw for name, raw in fields.items() if name in MAKES_THE_PROMPT}
    if bytes(fields.get("tool_choice", ABSENT)) == b'"none"':  # then the template is given no tools
        kept.pop("tools", None)
    return msgspec.json.encode({**kept, **ONE_TOKEN})


def ids_of(form: bytes) -> bytes:
    """Return the body of a prefill request for the token ids of `form`."""
    text, ids = token_form.cut(form)
    kept = {name: raw for name, raw in split_object(text).items() if name in KEPT_WITH_IDS}
    return token_form.join(msgspec.json.encode({**kept, "prompt": None, **ONE_TOKEN}), ids)


def with_hint(fields: Fields, hint: object) -> bytes:
    """Return the client's request with the address of its prompt's blocks in it."""
    return msgspec.json.encode({**fields, HINT: hint})


def form_with_hint(form: bytes, hint: object) -> bytes:
    """Return the same as `with_hint` for a body with token ids."""
    text, ids = token_form.cut(form)
    return token_form.join(with_hint(split_object(text), hint), ids)

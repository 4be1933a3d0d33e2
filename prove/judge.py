"""Compares an answer with its reference: the same tokens, or another token where the reference's own candidates were
closer together than the numerical error of the server.

The error is measured: it is the largest difference between the log-probabilities of one token when the same question is
asked alone and beside others, without reuse. Twice the error may change a choice. Reusing cached blocks sums in yet
another order, so four times the error is allowed, and never more than MAX_ERROR.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .answers import AskResult, TextChoice

MARGIN, LEAST_ERROR, MAX_ERROR = 4.0, 1e-3, 0.3  # nats


class Verdict(NamedTuple):
    """The outcome of a comparison, and the difference that was found."""

    outcome: str
    difference: str = ""


# The statuses with which a server says that it does not support a request.
REFUSALS = (400, 404, 405, 415, 422, 501)
# Outcomes that are no finding. "refused": the server was full, or does not support the request, even when asked alone;
# "ended": a fault is expected to end requests.
FINE = ("same", "tie", "left", "refused", "ended", "reset")
OUTCOMES = (*FINE[:-1], "wrong", "numbers", "foreign", "error", "hang", "no end", "left out")


def judge(reference: TextChoice, answer: AskResult, num_choices: int, error: float, is_fresh: bool) -> Verdict:
    """Judge a whole answer. `is_fresh`: it had a salt of its own, so nothing can be cached for it."""
    if answer.is_hung:
        return Verdict("hang", "no byte came in time")
    if answer.status == 429:
        return Verdict("refused", answer.error)
    if answer.error:
        return Verdict("error", answer.error)
    verdicts = [compare(reference, choice, error, answer.is_done) for choice in answer.choices.values()]
    worst = next((verdict for verdict in verdicts if verdict.outcome not in FINE), None)
    if worst is not None:
        return worst
    if answer.has_left:
        return Verdict("left")
    if not answer.is_done or len(answer.choices) != num_choices:
        return Verdict("no end", f"{len(answer.choices)} of {num_choices} choices began, and not all were ended")
    if is_fresh and answer.num_cached:
        return Verdict("foreign", f"{answer.num_cached} tokens were cached under a salt that was never used")
    return Verdict("tie") if any(verdict.outcome == "tie" for verdict in verdicts) else Verdict("same")


def compare(reference: TextChoice, choice: TextChoice, error: float, is_done: bool) -> Verdict:
    """Compare one choice, as far as it has arrived or to its end."""
    ours, theirs = _sequences(reference, choice)
    for at, (expected, got) in enumerate(zip(ours, theirs, strict=False)):
        if expected != got:
            return _differs(reference, choice, ours, at, error, f"{got!r} in place of {expected!r}")
    if len(theirs) > len(ours) or (is_done and len(theirs) < len(ours)):
        difference = f"{len(theirs)} of {len(ours)}"
        if "stop" not in (reference.finish, choice.finish):  # no token that ends the text may have been as likely
            return Verdict("wrong", difference)
        return _differs(reference, choice, ours, min(len(ours), len(theirs)), error, difference)
    if is_done and (choice.finish, choice.num_prompt) != (reference.finish, reference.num_prompt):
        difference = f"finish_reason {choice.finish!r}, {choice.num_prompt} prompt_logprobs; alone "
        return Verdict("wrong", f"{difference}{reference.finish!r}, {reference.num_prompt}")
    apart = farthest(reference, choice)
    if apart > error:
        difference = f"the same tokens, but a log-probability is {apart:.2g} nats off (allowed: {error:.2g})"
        return Verdict("numbers", difference)
    return Verdict("same")


def _sequences(reference: TextChoice, choice: TextChoice) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return the finest sequences that both have: ids, tokens that spell the text, or characters.

    llama.cpp's tokens may not spell the text at a stop string.
    """
    if reference.ids and choice.ids:
        return reference.ids, choice.ids
    if all(map(_has_all_tokens, (reference, choice))):
        return reference.tokens, choice.tokens
    return reference.text, choice.text


def _has_all_tokens(choice: TextChoice) -> bool:
    """Return whether the tokens are all that was generated: they spell the text, except for reasoning and tool calls."""
    return bool(choice.tokens and (choice.reasoning or choice.calls or "".join(choice.tokens) == choice.text))


def _differs(
    reference: TextChoice, choice: TextChoice, ours: Sequence[Any], at: int, error: float, difference: str
) -> Verdict:
    if ours is reference.text:  # convert the character's position to its token's
        lengths = [sum(map(len, reference.tokens[: index + 1])) for index in range(len(reference.tokens))]
        at += max(0, "".join(reference.tokens).find(reference.text))  # after reasoning
        at = next((index for index, length in enumerate(lengths) if length > at), len(lengths))
    if at >= len(reference.tops):
        return Verdict("wrong", f"token {at}: {difference}")
    top, chosen, penalty = reference.tops[at], reference.values[at], reference.penalty
    name = choice.tokens[at] if at < len(choice.tokens) else None
    others = [value for token, value in top.items() if token != reference.tokens[at] and name in (token, None)]
    # Servers differ in the tokens that a penalty counts as repeated: either candidate may have been lowered by it, also
    # one that is not shown.
    gaps = [abs(chosen - other + shift) for other in others for shift in (0.0, penalty, -penalty)]
    if penalty and top and name not in top:
        gaps.append(max(0.0, chosen - penalty - min(top.values())))
    gap = min(gaps, default=float("inf"))
    if error and gap <= 2 * error:
        return Verdict("tie", f"token {at}: {gap:.2g} nats apart")
    return Verdict("wrong", f"token {at}: {difference}, {gap:.2g} nats less likely")


def farthest(reference: TextChoice, choice: TextChoice) -> float:
    """Return the largest difference between the log-probabilities of equal tokens, up to the first that differs."""
    apart = 0.0
    for token, value, other, number in zip(
        reference.tokens, reference.values, choice.tokens, choice.values, strict=False
    ):
        if token != other:
            break
        difference = abs(value - number)
        apart = max(apart, float("inf") if math.isnan(difference) else difference)
    return apart


def allowed(apart: Iterable[float], is_exact: bool) -> float:
    """Return the allowed error, from the measured differences."""
    return 0.0 if is_exact else min(MAX_ERROR, max(LEAST_ERROR, MARGIN * max(apart, default=0.0)))

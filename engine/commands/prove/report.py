"""Reports the result of a proof: as a table, and as it is written as JSON."""

from collections import Counter
from typing import Any

from .judge import OUTCOMES
from .proof import Proof

NOT_ENOUGH = 3  # exit code: too few answers arrived in time to tell


def result_of(proof: Proof, name: str, seconds: float) -> dict[str, Any]:
    """Return the result as it is written as JSON."""
    answers: Counter[str] = Counter()
    for (by, _, outcome), count in proof.counts.items():
        answers[outcome] += count if by == "how" else 0
    num_cases = sum(outcome.endswith("findings") for outcome in proof.cases.values())
    return {
        "name": name,
        "model": proof.abilities.model,
        "seed": proof.options.seed,
        "seconds": round(seconds, 1),
        "bytes": proof.asker.num_bytes,
        "questions": len(proof.references),
        "compared": num_cases if proof.options.cases else proof.num_compared,
        "measured_error_nats": proof.measured,
        "allowed_error_nats": proof.error,
        "answers": answers,
        "cases": proof.cases,
        "reached": proof.reached,
        "findings": Counter(finding.kind for finding in proof.findings),
        "skipped": proof.abilities.skipped,
    }


def exit_code(result: dict[str, Any]) -> int:
    """Return 1 if there are findings, 3 if there were too few answers to tell, and 0 otherwise."""
    if result["findings"]:
        return 1
    return 0 if result["compared"] else NOT_ENOUGH


def table(proof: Proof, result: dict[str, Any]) -> str:
    shown = [outcome for outcome in OUTCOMES if outcome in result["answers"]]
    lines = [f"{result['name']}: {result['model']}, seed {result['seed']}, {result['questions']} questions"]
    lines.append("".join([f"{'':18}", *(f"{outcome:>10}" for outcome in shown)]))
    for by in ("how", "what"):
        for name in dict.fromkeys(name for each, name, _ in proof.counts if each == by):
            counts = [proof.counts[by, name, outcome] for outcome in shown]
            lines.append("".join([f"{name:18}", *(f"{count or '·':>10}" for count in counts)]))
        lines.append("")
    lines += [f"case {name:22} {outcome}" for name, outcome in proof.cases.items()]
    lines += [f"skipped: {skipped}" for skipped in proof.abilities.skipped]
    if proof.reached:
        lines.append("reached: " + ", ".join(f"{value:,.0f} {what}" for what, value in proof.reached.items()))
    error = "no log-probabilities: every difference counts as wrong"
    if "logprobs" in proof.abilities.known:
        error = f"log-probabilities are exact to {proof.measured:.2g} nats; {proof.error:.2g} are allowed"
    lines += [error, *(f"{finding.kind}: {finding.what}" for finding in proof.findings[:20])]
    if exit_code(result) == NOT_ENOUGH:
        lines.append(
            f"not enough answers: in {proof.options.duration:g} s {len(proof.references)} of {len(proof.questions)} "
            "questions were answered alone, and no answer could be compared with one of those; raise --duration or "
            "--max-bytes, or use a less busy machine"
        )
    lines.append(f"{len(proof.findings) or 'no'} findings in {result['seconds']} s")
    return "\n".join(lines)

"""Reports the result of a proof: a table, JSON, JUnit XML, a badge and a bug report for each finding."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from .judge import OUTCOMES
from .proof import Finding, Proof
from .tables import load_table

NOT_ENOUGH = 3  # exit code: too few answers arrived in time to tell
_TEXTS = load_table("texts")


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
        lines.append("reached: " + ", ".join(f"{value:,.0f} {event}" for event, value in proof.reached.items()))
    error = "no log-probabilities: every difference counts as wrong"
    if "logprobs" in proof.abilities.supported:
        error = f"log-probabilities are exact to {proof.measured:.2g} nats; {proof.error:.2g} are allowed"
    lines += [error, *(f"{finding.kind}: {finding.description}" for finding in proof.findings[:20])]
    if exit_code(result) == NOT_ENOUGH:
        numbers = {"answered": len(proof.references), "questions": len(proof.questions)}
        lines.append(_TEXTS["not enough"].format(seconds=proof.options.duration, **numbers))
    lines.append(f"{len(proof.findings) or 'no'} findings in {result['seconds']} s")
    return "\n".join(lines)


def write_reports(proof: Proof, result: dict[str, Any]) -> None:
    """Write the files that the options ask for."""
    options, num = proof.options, len(proof.findings)
    color, text = ("#c33", f"{num} findings") if num else ("#383", "no findings")
    if exit_code(result) == NOT_ENOUGH:
        color, text = "#777", "not enough answers"
    for path, content in [
        (options.json, json.dumps(result, indent=1) + "\n"),
        (options.junit, _junit(proof, result)),
        (options.badge, "\n".join([*_TEXTS["badge"], ""]).format(color=color, text=text)),
    ]:
        if path is not None:
            Path(path).write_text(content)


def _junit(proof: Proof, result: dict[str, Any]) -> str:
    """Return a test case for the load and for every case."""
    rows = []
    for name in (*([] if proof.options.cases else ["load"]), *proof.cases):
        found = [each for each in proof.findings if each.case == ("" if name == "load" else name)]
        inner = [f"<failure type={quoteattr(each.kind)}>{escape(each.description)}</failure>" for each in found]
        if not proof.cases.get(name, "findings").endswith("findings"):
            inner = [f"<skipped message={quoteattr(proof.cases[name])}/>"]
        rows.append(f"<testcase classname='penstock-prove' name={quoteattr(name)}>{''.join(inner)}</testcase>")
    head = f"<testsuite name={quoteattr(result['name'])} tests='{len(rows)}' time='{result['seconds']}'>"
    return "\n".join(["<?xml version='1.0' encoding='utf-8'?>", head, *rows, "</testsuite>", ""])


def bug_report(proof: Proof, finding: Finding, script: str) -> str:
    """Return one paragraph about a finding, ready to be pasted into a bug tracker."""
    found = f"the case `{finding.case}`" if finding.case else "requests under load"
    place = {"kind": finding.kind, "description": finding.description, "place": found, "script": script}
    error = f"{proof.error:.2g}"
    return str(_TEXTS["report"]).format(**place, model=proof.abilities.model, seed=proof.options.seed, error=error)

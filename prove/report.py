"""Reports the result of a proof: a table, JSON, JUnit XML, a badge and a bug report for each finding."""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from .judge import OUTCOMES
from .proof import Finding, Proof
from .questions import KINDS, MANNERS
from .tables import load_table

NOT_ENOUGH, INCOMPLETE = 3, 4  # exit codes: too few answers arrived in time to tell; a signal ended the run early
_TEXTS = load_table("texts")


def checks(proof: Proof) -> dict[str, str]:
    """Return how each check ended: every case, and every kind and manner of requests under load.

    A refusal is neither right nor wrong, so refusals are counted apart and never as a share.
    """
    ended = {}
    for by, rows in (("what", KINDS), ("how", MANNERS)) if not proof.options.cases else ():
        for name, row in rows.items():
            outcomes = {outcome for each, other, outcome in proof.counts if (each, other) == (by, name)}
            if row.needs and row.needs not in proof.abilities.supported:
                outcome = f"refused: the server lacks {row.needs}"
            elif outcomes - {"refused", "left out"}:
                outcome = "asked"
            else:
                outcome = f"{'refused' if 'refused' in outcomes else 'left out'}: no answer under load"
            ended[f"load: {name}"] = outcome
    return ended | proof.cases


def result_of(proof: Proof, name: str, seconds: float) -> dict[str, Any]:
    """Return the result as it is written as JSON."""
    answers: Counter[str] = Counter()
    for (by, _, outcome), count in proof.counts.items():
        answers[outcome] += count if by == "how" else 0
    ended = checks(proof)
    refused, left_out = (
        {check: text.partition(": ")[2] for check, text in ended.items() if text.startswith(why)}
        for why in ("refused", "left out")
    )
    num_asked = len(ended) - len(refused) - len(left_out)
    num_cases = sum(outcome.endswith("findings") for outcome in proof.cases.values())
    return {
        "name": name,
        "model": proof.abilities.model,
        "seed": proof.options.seed,
        "seconds": round(seconds, 1),
        "is_incomplete": proof.is_incomplete,
        "bytes": proof.asker.num_bytes,
        "questions": len(proof.references),
        "compared": num_cases if proof.options.cases else proof.num_compared,
        "measured_error_nats": proof.measured,
        "allowed_error_nats": proof.error,
        "answers": answers,
        "checks": len(ended),
        "asked": num_asked,
        "coverage": f"{num_asked} of {len(ended)} checks could be asked",
        "refused": refused,
        "left_out": left_out,
        "cases": proof.cases,
        "arms": proof.arms,
        "reached": proof.reached,
        "findings": Counter(finding.kind for finding in proof.findings),
        "skipped": proof.abilities.skipped,
    }


def exit_code(result: dict[str, Any]) -> int:
    """Return 4 if the run was ended early, 1 if there are findings, 3 if there were too few answers to tell, else 0."""
    if result["is_incomplete"]:
        return INCOMPLETE
    if result["findings"]:
        return 1
    return 0 if result["compared"] else NOT_ENOUGH


def report_of(proof: Proof, result: dict[str, Any]) -> str:
    shown = [outcome for outcome in OUTCOMES if outcome in result["answers"]]
    lines = [f"{result['name']}: {result['model']}, seed {result['seed']}, {result['questions']} questions"]
    lines.append("".join([f"{'':18}", *(f"{outcome:>10}" for outcome in shown)]))
    for by in ("how", "what"):
        for name in dict.fromkeys(name for each, name, _ in proof.counts if each == by):
            counts = [proof.counts[by, name, outcome] for outcome in shown]
            lines.append("".join([f"{name:18}", *(f"{count or '·':>10}" for count in counts)]))
        lines.append("")
    second = result.get("against", {})
    for name, outcome in proof.cases.items():
        there = f"   second server: {second['cases'].get(name, 'not asked')}" if second else ""
        lines.append(f"case {name:22} {outcome}{there}")
    lines += [f"skipped: {skipped}" for skipped in proof.abilities.skipped]
    if proof.reached:
        lines.append("reached: " + ", ".join(f"{value:,.0f} {event}" for event, value in proof.reached.items()))
    error = "no log-probabilities: every difference counts as wrong"
    if "logprobs" in proof.abilities.supported:
        error = f"log-probabilities are exact to {proof.measured:.2g} nats; {proof.error:.2g} are allowed"
    lines += [error, *(f"{finding.kind}: {finding.description}" for finding in proof.findings[:20])]
    if exit_code(result) == NOT_ENOUGH:
        lines.append(_TEXTS["not enough"].format(proof=proof, result=result, questions=len(proof.questions)))
    if proof.is_incomplete:
        lines.append("the run was ended early: this is what was found until then")
    if second:
        alike = ", ".join(f"{count} {outcome}" for outcome, count in second["answers_alone"].items()) or "none compared"
        lines.append(f"second server, {second['url']}: {sum(second['findings'].values()) or 'no'} findings")
        lines.append(f"answers of both servers, asked alone (a difference is no finding): {alike}")
    num_refused, num_left_out = len(result["refused"]), len(result["left_out"])
    lines.append(f"{result['coverage']}: {num_refused} refused by the server, {num_left_out} left out")
    lines.append(f"{len(proof.findings) or 'no'} findings in {result['seconds']} s")
    return "\n".join(lines)


def write_reports(proof: Proof, result: dict[str, Any]) -> None:
    """Write the files that the options ask for."""
    options, num = proof.options, len(proof.findings)
    color, text = ("#c33", f"{num} findings") if num else ("#383", "no findings")
    if exit_code(result) in (NOT_ENOUGH, INCOMPLETE):
        color, text = "#777", "ended early" if proof.is_incomplete else "not enough answers"
    text += f", {result['asked']} of {result['checks']} asked"
    for path, content in [
        (options.json, json.dumps(result, indent=1) + "\n"),
        (options.junit, _junit(proof, result)),
        (options.badge, "\n".join([*_TEXTS["badge"], ""]).format(color=color, text=text)),
    ]:
        if path is not None:
            Path(path).write_text(content)


def _junit(proof: Proof, result: dict[str, Any]) -> str:
    """Return a test case for every check, and one for all other findings under load. What was not asked is skipped, with
    `refused` or `left out` as its type."""
    rows, num_skipped = [], len(result["refused"]) + len(result["left_out"])
    for name, ended in {**({} if proof.options.cases else {"load": ""}), **checks(proof)}.items():
        found = [each for each in proof.findings if each.case == ("" if name == "load" else name)]
        inner = [f"<failure type={quoteattr(each.kind)}>{escape(each.description)}</failure>" for each in found]
        if ended.startswith(("refused", "left out")):
            inner = [f"<skipped type={quoteattr(ended.partition(':')[0])} message={quoteattr(ended)}/>"]
        rows.append(f"<testcase classname='penstock-prove' name={quoteattr(name)}>{''.join(inner)}</testcase>")
    counts = f"tests='{len(rows)}' failures='{len(proof.findings)}' skipped='{num_skipped}'"
    head = f"<testsuite name={quoteattr(result['name'])} {counts} time='{result['seconds']}'>"
    properties = f"<properties><property name='asked' value='{result['coverage']}'/></properties>"
    return "\n".join(["<?xml version='1.0' encoding='utf-8'?>", head, properties, *rows, "</testsuite>", ""])


def bug_report(proof: Proof, finding: Finding, script: str) -> str:
    """Return one paragraph about a finding, ready to be pasted into a bug tracker."""
    found = f"the case `{finding.case}`" if finding.case else "requests under load"
    place = {"kind": finding.kind, "description": finding.description, "place": found, "script": script}
    error = f"{proof.error:.2g}"
    return str(_TEXTS["report"]).format(**place, model=proof.abilities.model, seed=proof.options.seed, error=error)

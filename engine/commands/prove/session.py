"""Runs a proof of one server from the first request to the printed result."""

import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from .abilities import detect_abilities
from .asker import Asker
from .judge import OUTCOMES
from .options import ProveError, ProveOptions, request_headers
from .proof import Proof
from .repeat import write_scripts

Injection = Callable[[Proof], Coroutine[Any, Any, None]]
NOT_ENOUGH = 3  # exit code: too few answers arrived in time to tell


async def prove(url: str, name: str, options: ProveOptions, inject: Injection | None = None) -> dict[str, Any]:
    """Prove the server at `url`, print the table and the line of JSON, and return the result.

    `inject` replaces the load phase: it runs one with a fault in its middle.
    """
    started_s = time.monotonic()
    headers = request_headers(options)
    try:
        asker = Asker(url, headers, options.timeout, options.duration)
    except ValueError as error:
        raise ProveError(f"url: {error}") from None
    proof, scripts = Proof(asker, await detect_abilities(asker, options.seed), options), []
    await proof.ask_alone()
    await proof.measure_error()
    if inject is not None:
        await inject(proof)
    else:
        await proof.run_load()
        await proof.ask_again()
        if options.scripts:
            scripts = await write_scripts(proof, url, Path(options.scripts))
    asker.client.close()
    result = _result(proof, name, time.monotonic() - started_s)
    print(_table(proof, result), *scripts, json.dumps(result), sep="\n", flush=True)
    return result


def exit_code(result: dict[str, Any]) -> int:
    """Return 1 if there are findings, 3 if there were too few answers to tell, and 0 otherwise."""
    if result["findings"]:
        return 1
    return 0 if result["compared"] else NOT_ENOUGH


def _result(proof: Proof, name: str, seconds: float) -> dict[str, Any]:
    answers: Counter[str] = Counter()
    for (by, _, outcome), count in proof.counts.items():
        answers[outcome] += count if by == "how" else 0
    return {
        "name": name,
        "model": proof.abilities.model,
        "seed": proof.options.seed,
        "seconds": round(seconds, 1),
        "bytes": proof.asker.num_bytes,
        "questions": len(proof.references),
        "compared": proof.num_compared,
        "measured_error_nats": proof.measured,
        "allowed_error_nats": proof.error,
        "answers": answers,
        "reached": proof.reached,
        "findings": Counter(finding.kind for finding in proof.findings),
        "skipped": proof.abilities.skipped,
    }


def _table(proof: Proof, result: dict[str, Any]) -> str:
    shown = [outcome for outcome in OUTCOMES if outcome in result["answers"]]
    lines = [f"{result['name']}: {result['model']}, seed {result['seed']}, {result['questions']} questions"]
    lines.append("".join([f"{'':18}", *(f"{outcome:>10}" for outcome in shown)]))
    for by in ("how", "what"):
        for name in dict.fromkeys(name for each, name, _ in proof.counts if each == by):
            counts = [proof.counts[by, name, outcome] for outcome in shown]
            lines.append("".join([f"{name:18}", *(f"{count or '·':>10}" for count in counts)]))
        lines.append("")
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

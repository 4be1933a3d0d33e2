"""Runs a proof of one server from the first request to the printed result."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from .abilities import detect_abilities
from .api_cases import API_CASES
from .arms import ARM_CASES
from .asker import Asker
from .cases import run_case
from .journal import Journal
from .options import ProveError, ProveOptions, chosen, request_headers
from .proof import Proof
from .repeat import write_scripts
from .report import report_of, result_of, write_reports
from .reuse_cases import REUSE_CASES

Injection = Callable[[Proof], Coroutine[Any, Any, None]]
CASES = {**ARM_CASES, **API_CASES, **REUSE_CASES}  # first what an option asks for, the longest last
SLOW_S = 1.0  # for a typical answer
NUM_ANSWERS = 400  # of a whole run, one after the other


async def prove(url: str, name: str, options: ProveOptions, inject: Injection | None = None) -> dict[str, Any]:
    """Prove the server at `url`, print the table and the line of JSON, and return the result.

    `inject` replaces the load phase: it runs one with a fault in its middle. A task that is cancelled reports what was
    found until then.
    """
    journal, scripts = Journal(options.log), list[Path]()
    proof = await _begin(url, options, journal.say)
    try:
        if inject is not None:
            await _ask_alone(proof)
            await inject(proof)
        else:
            await _ask(proof, chosen("case", options.cases, CASES) or list(CASES), has_load=not options.cases)
        if options.scripts:
            scripts = await write_scripts(proof, url, Path(options.scripts))
    except asyncio.CancelledError:
        proof.is_incomplete = True
        planned = [] if inject is not None else chosen("case", options.cases, CASES) or CASES
        proof.cases |= {case: "left out: the run was ended early" for case in planned if case not in proof.cases}
    proof.asker.client.close()
    result = result_of(proof, name, journal.seconds)
    journal.write("\n".join([report_of(proof, result), *map(str, scripts)]))
    print(json.dumps(result), flush=True)
    write_reports(proof, result)
    return result


async def _begin(url: str, options: ProveOptions, say: Callable[[str], None]) -> Proof:
    """Detect what the server can do and how fast it is."""
    headers = request_headers(options)
    try:
        asker = Asker(url, headers, options.timeout, options.duration)
    except ValueError as error:
        raise ProveError(f"url: {error}") from None
    abilities = await detect_abilities(asker, options.seed, say)
    say(f"{len(abilities.supported)} abilities, {len(abilities.skipped)} are missing")
    abilities.supported |= {"--restart"} if options.restarts else set()
    paced = scaled(options, abilities.answer_s)
    if paced != options:
        abilities.longest, abilities.most_tokens = min(abilities.longest, 4 * abilities.block), 8
        say(
            f"slow: a typical answer takes {abilities.answer_s:.1f} s, so a whole run takes about --duration "
            f"{NUM_ANSWERS * abilities.answer_s:.0f}; in {options.duration:g} s there are {paced.requests} requests under "
            f"load, {paced.concurrency} at a time, and as many cases as fit"
        )
    return Proof(asker, abilities, paced, say)


def scaled(options: ProveOptions, answer_s: float) -> ProveOptions:
    """Return the options with as many requests as a server has time for that takes so long for a typical answer, and with
    no more of them at once than it can answer before they count as hung."""
    if answer_s <= SLOW_S:
        return options
    share = min(1.0, options.duration / (NUM_ANSWERS * answer_s))
    most = max(1, int(options.timeout / (2 * answer_s)))
    requests = min(options.requests, max(16, int(options.requests * share)))
    return replace(options, requests=requests, concurrency=min(options.concurrency, most))


async def _ask(proof: Proof, cases: list[str], has_load: bool) -> None:
    await _ask_alone(proof)
    if has_load:
        await proof.run_load()
        proof.say(f"under load: {proof.num_compared} answers compared, {len(proof.findings) or 'no'} findings")
        await proof.ask_again()
    proof.asker.until(0.95)
    for case in cases:
        await run_case(case, CASES[case], proof)
        proof.say(f"case {case}: {proof.cases[case]}")


async def _ask_alone(proof: Proof) -> None:
    await proof.ask_alone()
    proof.say(f"alone: {len(proof.references)} of {len(proof.questions)} questions answered")
    await proof.measure_error()
    proof.say(f"beside each other: log-probabilities are exact to {proof.measured:.2g} nats")


def list_cases() -> str:
    needs = {name: f" Needs {', '.join(case.needs)}." if case.needs else "" for name, case in CASES.items()}
    return "\n".join(f"{name:22} {case.run.__doc__}{needs[name]}" for name, case in CASES.items())

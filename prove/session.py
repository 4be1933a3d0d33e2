"""Runs a proof of one server from the first request to the printed result."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import api_cases, arms, reuse_cases, tool_cases
from .abilities import detect_abilities
from .asker import Asker
from .cases import Case, run_case
from .journal import Journal, Say
from .options import ProveError, ProveOptions, chosen, request_headers
from .proof import Proof
from .repeat import write_scripts
from .report import report_of, result_of, write_reports
from .second_server import SecondServer
from .tables import load_table

Injection = Callable[[Proof], Coroutine[Any, Any, None]]
_FUNCTIONS = {**vars(arms), **vars(api_cases), **vars(tool_cases), **vars(reuse_cases)}
# Each case is the function of its name. First come those that an option asks for; the longest is last.
CASES = {name: Case(_FUNCTIONS[name.replace("-", "_")], **row) for name, row in load_table("cases").items()}
SLOW_S = 1.0  # for a typical answer
NUM_ANSWERS = 400  # of a whole run, one after the other


async def prove(url: str, name: str, options: ProveOptions, inject: Injection | None = None) -> dict[str, Any]:
    """Prove the server at `url`, print the table and the line of JSON, and return the result.

    `inject` replaces the load phase: it runs one with a fault in its middle. A task that is cancelled reports what was
    found until then.
    """
    journal, scripts = Journal(options.log), list[Path]()
    cases = [] if inject is not None else chosen("case", options.cases, CASES) or list(CASES)
    proof = await _begin(url, options, journal.say)
    second = await _begin_second(options, journal.say)
    try:
        await _ask_all(proof, cases, inject)
        if second is not None:
            journal.say(f"now the second server, {second.url}")
            second.proof.asker.pause(time.monotonic() - journal.started_s)
            await _ask_all(second.proof, cases)
            await second.ask_same_alone(proof)
            second.mark(proof.findings)
        if options.scripts:
            scripts = await write_scripts(proof, url, Path(options.scripts))
    except asyncio.CancelledError:
        proof.is_incomplete = True
        proof.cases |= {case: "left out: the run was ended early" for case in cases if case not in proof.cases}
    for each in [proof, second.proof] if second else [proof]:
        each.asker.client.close()
    result = result_of(proof, name, time.monotonic() - journal.started_s)
    result |= {"against": second.result()} if second else {}
    journal.write("\n".join([report_of(proof, result), *map(str, scripts)]))
    print(json.dumps(result), flush=True)
    write_reports(proof, result)
    return result


async def _ask_all(proof: Proof, cases: Sequence[str], inject: Injection | None = None) -> None:
    """Run the phases and the cases against one server."""
    await proof.ask_alone()
    if inject is not None:
        await inject(proof)
    elif not proof.options.cases:
        await proof.run_load()
        proof.say(f"under load: {proof.num_compared} answers compared, {len(proof.findings) or 'no'} findings")
        await proof.ask_again()
    proof.asker.until(0.95)
    for case in cases:
        await run_case(case, CASES[case], proof)
        proof.say(f"case {case}: {proof.cases[case]}")


async def _begin_second(options: ProveOptions, say: Say) -> SecondServer | None:
    """Detect what the second server can do, if one is given. It is not restarted."""
    if options.against is None:
        return None
    try:
        alone = replace(options, restart=None, stop=None, start=None, expect_restored=False)
        proof = await _begin(options.against, alone, lambda text: say(f"second server: {text}"))
        return SecondServer(options.against, proof)
    except ProveError as error:
        raise ProveError(str(error).replace("url:", "against:", 1)) from None


async def _begin(url: str, options: ProveOptions, say: Say) -> Proof:
    """Detect what the server can do and how fast it is."""
    headers = request_headers(options)
    try:
        asker = Asker(url, headers, options.timeout, options.duration)
    except ValueError as error:
        raise ProveError(f"url: {error}") from None
    abilities = await detect_abilities(asker, options.seed, say)
    say(f"{len(abilities.supported)} abilities, {len(abilities.skipped)} are missing")
    given = {"--restart": options.restart or options.start, "--exact": options.exact}
    abilities.supported |= {name for name, value in given.items() if value}
    paced = scaled(options, abilities.answer_s)
    if paced != options:
        abilities.longest, abilities.most_tokens = min(abilities.longest, 4 * abilities.block), 8
        whole_s, text = NUM_ANSWERS * abilities.answer_s, load_table("texts")["slow"]
        say(text.format(abilities=abilities, options=options, paced=paced, whole_s=whole_s))
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


def list_cases() -> str:
    needs = (f" Needs {', '.join(case.needs)}." if case.needs else "" for case in CASES.values())
    return "\n".join(f"{name:22} {case.text}{need}" for (name, case), need in zip(CASES.items(), needs, strict=True))

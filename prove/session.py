"""Runs a proof of one server from the first request to the printed result."""

import json
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from .abilities import detect_abilities
from .api_cases import API_CASES
from .asker import Asker
from .cases import run_case
from .options import ProveError, ProveOptions, chosen, request_headers
from .proof import Proof
from .repeat import write_scripts
from .report import result_of, table, write_reports
from .reuse_cases import REUSE_CASES

Injection = Callable[[Proof], Coroutine[Any, Any, None]]
CASES = {**API_CASES, **REUSE_CASES}  # the longest is last


async def prove(url: str, name: str, options: ProveOptions, inject: Injection | None = None) -> dict[str, Any]:
    """Prove the server at `url`, print the table and the line of JSON, and return the result.

    `inject` replaces the load phase: it runs one with a fault in its middle.
    """
    started_s, scripts, headers = time.monotonic(), [], request_headers(options)
    try:
        asker = Asker(url, headers, options.timeout, options.duration)
    except ValueError as error:
        raise ProveError(f"url: {error}") from None
    proof = Proof(asker, await detect_abilities(asker, options.seed), options)
    await proof.ask_alone()
    await proof.measure_error()
    if inject is not None:
        await inject(proof)
    else:
        if not options.cases:
            await proof.run_load()
            await proof.ask_again()
        asker.until(0.95)
        for case in chosen("case", options.cases, CASES) or CASES:
            await run_case(case, CASES[case], proof)
        if options.scripts:
            scripts = await write_scripts(proof, url, Path(options.scripts))
    asker.client.close()
    result = result_of(proof, name, time.monotonic() - started_s)
    print(table(proof, result), *scripts, json.dumps(result), sep="\n", flush=True)
    write_reports(proof, result)
    return result


def list_cases() -> str:
    needs = {name: f" Needs {', '.join(case.needs)}." if case.needs else "" for name, case in CASES.items()}
    return "\n".join(f"{name:22} {case.run.__doc__}{needs[name]}" for name, case in CASES.items())

"""Starts servers and proves them: in each world, and with each fault in the world that it belongs to."""

import asyncio
import contextlib
import random
import shlex
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from ..journal import cancelled_by_signals
from ..options import FILES, ProveError, ProveOptions, chosen, request_headers
from ..proof import Proof
from ..report import INCOMPLETE, NOT_ENOUGH, exit_code
from ..session import prove
from .faults import FAULTS, FaultScene
from .server import WORLDS, OwnServer


def run_own(options: ProveOptions) -> int:
    """Prove all worlds and faults in turn; return the exit code that says the most: 4, 1, 3 or 0."""
    names = chosen("world", options.worlds, WORLDS) + chosen("fault", options.faults, FAULTS)
    if len(names) > 1 and any(getattr(options, name) for name in (*FILES, "scripts")):
        raise ProveError(
            "log, json, junit, badge, scripts: each has the result of one run; give one --world or --fault"
        )
    codes: list[int] = []
    for name in names or ["uniproc"]:
        codes.append(exit_code(asyncio.run(prove_own(name, options))))
        if codes[-1] == INCOMPLETE:
            break
    return next(code for code in (INCOMPLETE, 1, NOT_ENOUGH, 0) if code in codes)


async def prove_own(name: str, options: ProveOptions) -> dict[str, Any]:
    """Start the servers of a world, or of the world that a fault belongs to, and prove them."""
    world = FAULTS[name].world if name in FAULTS else name
    with tempfile.TemporaryDirectory(prefix="penstock-prove-") as folder:
        server = OwnServer(world, options.model, shlex.split(options.serve_options), Path(folder))
        with contextlib.closing(server), cancelled_by_signals():  # our processes do not outlive us
            await server.start(request_headers(options))
            return await prove(server.url, name, options, partial(_inject, server, name) if name in FAULTS else None)


async def _inject(server: OwnServer, name: str, proof: Proof) -> None:
    """Run the load with the fault in its middle, then ask all questions again, of a new server if the fault ends it."""
    fault, scene = FAULTS[name], FaultScene(server, proof.asker, random.Random(proof.options.seed))
    await proof.run_load(lambda: fault.inject_into(scene), fault.fails_requests)
    if fault.ends:
        server.close()
        await server.start(proof.asker.headers)
    proof.expects_errors = False
    await proof.ask_again("after it")

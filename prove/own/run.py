"""Starts servers and proves them: in each world, and with each fault in the world that it belongs to."""

import asyncio
import contextlib
import random
import shlex
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..options import ProveError, ProveOptions, chosen, request_headers
from ..proof import Proof
from ..report import NOT_ENOUGH, exit_code
from ..session import prove
from .faults import FAULTS, FaultScene
from .server import END_SIGNALS, WORLDS, OwnServer


def run_own(options: ProveOptions) -> int:
    """Prove all worlds and faults in turn; return 1 if any has findings, else 3 if any has too few answers."""
    names = chosen("world", options.worlds, WORLDS) + chosen("fault", options.faults, FAULTS)
    if len(names) > 1 and (options.json or options.junit or options.badge or options.scripts):
        raise ProveError("json, junit, badge, scripts: each has the result of one run; give one --world or --fault")
    try:
        codes = {exit_code(asyncio.run(prove_own(name, options))) for name in names or ["uniproc"]}
    except asyncio.CancelledError:
        return 130
    return next((code for code in (1, NOT_ENOUGH) if code in codes), 0)


async def prove_own(name: str, options: ProveOptions) -> dict[str, Any]:
    """Start the servers of a world, or of the world that a fault belongs to, and prove them."""
    world = FAULTS[name].world if name in FAULTS else name
    with tempfile.TemporaryDirectory(prefix="penstock-prove-") as folder:
        server = OwnServer(world, options.model, shlex.split(options.serve_options), Path(folder))
        task = asyncio.current_task()
        assert task is not None
        with contextlib.closing(server), _cancelling(task):  # our processes do not outlive us
            await server.start(request_headers(options))
            return await prove(server.url, name, options, partial(_inject, server, name) if name in FAULTS else None)


@contextlib.contextmanager
def _cancelling(task: asyncio.Task[Any]) -> Iterator[None]:
    """Cancel the task when a signal asks prove to end."""
    loop = asyncio.get_running_loop()
    for number in END_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in END_SIGNALS:
            loop.remove_signal_handler(number)


async def _inject(server: OwnServer, name: str, proof: Proof) -> None:
    """Run the load with the fault in its middle, then ask all questions again, of a new server if the fault ends it."""
    fault, scene = FAULTS[name], FaultScene(server, proof.asker, random.Random(proof.options.seed))
    await proof.run_load(lambda: fault.inject(scene), fault.fails_requests)
    if fault.ends:
        server.close()
        await server.start(proof.asker.headers)
    proof.expects_errors = False
    await proof.ask_again("after it")

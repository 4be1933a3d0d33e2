"""Faults that are injected into a server of our own while it is under load.

Each fault returns what it found broken, or an empty text. Wrong answers and hangs are found by the load itself. Only
faults with `fails_requests` may make requests in flight end with an error.
"""

import asyncio
import os
import random
import resource
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..asker import Asker
from ..tables import load_table
from .server import OwnServer, group_of

STOPPED_S, UNHEALTHY_S = 3.0, 20.0


class FaultScene(NamedTuple):
    """The server that a fault is injected into."""

    server: OwnServer
    asker: Asker
    rng: random.Random

    def files(self) -> list[Path]:
        """Return the files of the disk tier that hold blocks or the index; index.tmp is renamed at any time."""
        found = [path for path in (self.server.folder / "disk").rglob("*") if path.suffix != ".tmp"]
        return [path for path in found if path.is_file() and path.stat().st_size > 4096]


async def _kill_core(scene: FaultScene) -> str:
    scene.server.signal([scene.rng.choice(scene.server.children())], signal.SIGKILL)
    return await _end(scene, is_good=False)


async def _signal_server(scene: FaultScene, name: str) -> str:
    scene.server.signal([scene.server.leader()], signal.Signals[name])
    return await _end(scene, is_good=name == "SIGTERM")


async def _end(scene: FaultScene, is_good: bool) -> str:
    left = await scene.server.ended()
    code = scene.server.servers[0].poll()
    return left or ("" if (code == 0) == is_good else f"the server ended with code {code}")


async def _stop_core(scene: FaultScene) -> str:
    """Stop the core: it cannot report that itself, so /health of the server must fail."""
    stopped = scene.server.children()
    scene.server.signal(stopped, signal.SIGSTOP)
    try:
        async with asyncio.timeout(UNHEALTHY_S):
            while (await scene.asker.fetch("GET", "/health"))[0] == 200:
                await asyncio.sleep(0.1)
        return await _end(scene, is_good=False)
    except TimeoutError:
        return f"/health is 200 although the core has been stopped for {UNHEALTHY_S:g} s"
    finally:  # not before the server has given the core up: one that goes on in time keeps its server alive
        scene.server.signal(stopped, signal.SIGCONT)


async def _stop_server(scene: FaultScene) -> str:
    scene.server.signal([scene.server.leader()], signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)
    scene.server.signal([scene.server.leader()], signal.SIGCONT)
    return ""


async def _flip(scene: FaultScene) -> str:
    for _ in range(200):
        for path in scene.files():
            with path.open("r+b") as file:
                position = scene.rng.randrange(path.stat().st_size)
                byte = os.pread(file.fileno(), 1, position)
                os.pwrite(file.fileno(), bytes(each ^ 1 << scene.rng.randrange(8) for each in byte), position)
        await asyncio.sleep(0.02)
    return ""


async def _tear(scene: FaultScene) -> str:
    for path in scene.files():
        os.truncate(path, scene.rng.randrange(path.stat().st_size))
    return ""


async def _remove(scene: FaultScene) -> str:
    shutil.rmtree(scene.server.folder / "disk")
    return ""


async def _limit(scene: FaultScene, name: str, value: int) -> str:
    """Limit a resource of every process for some seconds, so that no file can grow or no descriptor can be opened."""
    kind = getattr(resource, name)
    before = {pid: resource.prlimit(pid, kind) for pid in group_of(scene.server.leader())}
    for pid, (_, most) in before.items():
        resource.prlimit(pid, kind, (value, most))
    await asyncio.sleep(STOPPED_S)
    for pid, limits in before.items():
        resource.prlimit(pid, kind, limits)
    return ""


async def _lose_replica(scene: FaultScene) -> str:
    scene.server.signal([scene.rng.choice(scene.server.servers[:2]).pid], signal.SIGKILL)
    return ""


class Fault(NamedTuple):
    """A fault, and the world that it is injected into."""

    world: str
    inject: str  # the function that injects it
    arguments: Sequence[Any] = ()
    fails_requests: bool = False  # requests in flight may end with an error
    ends: bool = False  # the server ends and is started again

    async def inject_into(self, scene: FaultScene) -> str:
        return str(await globals()[f"_{self.inject}"](scene, *self.arguments))


FAULTS = {name: Fault(**row) for name, row in load_table("own/faults").items()}

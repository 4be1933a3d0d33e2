"""Servers that `penstock prove` starts itself, so that it can inject faults into their processes.

Each has its own process group and temporary folder. A world defines how the servers are started. Their caches hold only
two or three prompts of the default model, so that evictions and preemptions never stop.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..http_client import Client, Target
from ..options import ProveError
from ..tables import load_table

START_S, END_S, STOP_GRACE_S = 300.0, 15.0, 10.0
PENSTOCK = (sys.executable, "-P", "-c", "import sys; from penstock.cli import main; sys.exit(main())")
DIE_WITH = (sys.executable, "-P", "-m", "penstock.executor.process_life")  # then the parent's PID, then the command
TINY = "--kv-cache-bytes 16MiB --max-model-len 320 --max-num-seqs 8"  # 21 blocks of the default model


class World(NamedTuple):
    """The options of each server, and of `penstock route` in front of them if there is a router. `OwnServer` fills in the
    names in braces after splitting the options into words, since a folder may contain spaces."""

    servers: Sequence[str]
    router: str = ""


# The number of ranks divides the default model's 9 heads.
WORLDS = {name: World(**row) for name, row in load_table("own/worlds").items()}


class OwnServer:
    """The processes of one world. `close` ends them whatever their state."""

    def __init__(self, world: str, model: str | None, more: Sequence[str], folder: Path) -> None:
        self.folder, self._log = folder, folder / "server.log"
        words = {"folder": str(folder), "peer": f"127.0.0.1:{free_port()}"}
        self._commands: list[list[str]] = []
        servers, router = WORLDS[world]
        rows = [(["serve", *([model] if model else [])], f"{TINY} {options}", more) for options in servers]
        rows += [(["route"], router, [])] if router else []
        for number, (command, options, last) in enumerate(rows):
            port = free_port()
            self.url = words[f"url{number}"] = f"http://127.0.0.1:{port}"
            filled = [word.format(**words) for word in options.split()]
            self._commands.append([*PENSTOCK, *command, "--port", str(port), *filled, *last])
        self.servers: list[subprocess.Popen[bytes]] = []

    async def start(self, headers: Mapping[str, str]) -> None:
        """Start the processes and wait until they are ready.

        `headers` are sent with the checks, because a server that inherits PENSTOCK_API_KEY requires it. Raises
        ProveError with the server's last log line if it ends early, or if it refuses the key.
        """
        self.servers = []
        # A router gets the key that its replicas inherit.
        key, null = os.environ.get("PENSTOCK_API_KEY"), subprocess.DEVNULL
        own = {**os.environ, **({"PENSTOCK_BACKEND_API_KEY": key} if key else {})}
        for command in self._commands:
            with self._log.open("ab") as log:
                command = [*DIE_WITH, str(os.getpid()), *command]
                server = subprocess.Popen(command, stdin=null, stdout=log, stderr=log, start_new_session=True, env=own)
                self.servers.append(server)
        client = Client(Target.of(self.url))
        try:
            async with asyncio.timeout(START_S):
                while True:
                    if any(server.poll() is not None for server in self.servers):
                        raise ProveError(f"world: the server ended; {_last_line(self._log)}")
                    try:
                        ready, _ = await client.fetch("GET", "/ready", headers=headers)
                        status, _ = await client.fetch("GET", "/v1/models", headers=headers)  # requires the key
                        if ready == status == 200:
                            return
                        if status == 401:
                            raise ProveError("header: the server requires another API key than the one sent")
                    except OSError:
                        pass
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise ProveError(f"world: not ready after {START_S:g} s; {_last_line(self._log)}") from None
        finally:
            client.close()

    def leader(self) -> int:
        return self.servers[0].pid

    def children(self) -> list[int]:
        """Return the processes that the first server has started: its core and the ranks."""
        return [pid for pid in group_of(self.leader()) if pid != self.leader()]

    def signal(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    async def ended(self) -> str:
        """Wait until every process of the first server has ended; return what is left, or an empty text."""
        server = self.servers[0]
        try:
            async with asyncio.timeout(END_S):
                while server.poll() is None or group_of(server.pid):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            return f"{END_S:g} s later there are still processes {group_of(server.pid) or [server.pid]}"
        return ""

    def close(self) -> None:
        for server in reversed(self.servers):
            self.signal(group_of(server.pid), signal.SIGCONT)
            stop(server)


def stop(server: "subprocess.Popen[bytes]") -> None:
    """End the server and every process that it started."""
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        try:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(STOP_GRACE_S)
        finally:  # even if a second signal to this process has ended the wait
            os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def group_of(leader: int) -> list[int]:
    """Return the living processes of a group; zombies do not count."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, _parent, group = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry))
    return found


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "its log is empty"

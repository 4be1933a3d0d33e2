"""Processes of the tests that are forked instead of started, with modules that were imported once.

A fork_server is a process without threads that has imported a module. It forks itself, and in the child the module's
`main()` runs with the requested arguments, environment and file descriptors. Importing torch is most of the cost of a
small rank. Tests of starting and dying with a parent need processes of the real kind.
"""

import atexit
import fcntl
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.executor.process_life import CHILD_MAIN

ROOT = Path(__file__).resolve().parents[2]
MAX_BYTES, MAX_FDS = 1 << 17, 16


@functools.cache
def fork_server(module: str) -> "ForkServer":
    made = ForkServer(module)
    atexit.register(made.close)
    return made


def forking(*modules: str) -> SimpleNamespace:
    """Return a stand-in for `subprocess` in process_life.py: children that run one of these modules are forked."""

    def start(command: list[str], **options: Any) -> "Child | subprocess.Popen[bytes]":
        *_, module, fd, _, is_tied = command
        if module not in modules:
            return subprocess.Popen(command, **options)
        server = fork_server(module)
        fds = {each: each for each in options["pass_fds"]}
        return server.start(module, fd, str(server.pid), is_tied, fds=fds, runs=CHILD_MAIN)

    return SimpleNamespace(**{**vars(subprocess), "Popen": start})


class ForkServer:
    def __init__(self, module: str) -> None:
        self._turn = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_server", module, str(theirs.fileno())],
                cwd=ROOT,
                env={**os.environ, "PYTEST_CURRENT_TEST": ""},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self.pid = self._process.pid

    def start(self, *arguments: str, fds: dict[int, int], runs: str = "") -> "Child":
        """`fds`: our descriptors, by the number that each has in the child. `runs`: another module than the imported one."""
        request = {"arguments": arguments, "environment": dict(os.environ), "numbers": list(fds), "runs": runs}
        return Child(self, self._ask(request, list(fds.values())))

    def reap(self, pid: int) -> int:
        """How the child ended that has ended, as `Popen` says it."""
        return self._ask({"reap": pid}, [])

    def _ask(self, request: dict[str, Any], fds: list[int]) -> int:
        with self._turn:
            socket.send_fds(self._socket, [json.dumps(request).encode()], fds)
            answer = self._socket.recv(64)
        assert answer, "the fork_server has died"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(60)


class Child:
    """A forked process, with the interface of `Popen`."""

    def __init__(self, fork_server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = fork_server
        self._fd = os.pidfd_open(pid)
        self._lock = threading.Lock()  # several threads may wait, and one reaps

    def __del__(self) -> None:
        os.close(self._fd)

    def poll(self) -> int | None:
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._fd, select.POLLIN)
            if ended.poll(None if timeout is None else timeout * 1000):
                with self._lock:
                    if self.returncode is None:
                        self.returncode = self._server.reap(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    name, fd = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then hang up
    module = importlib.import_module(name)
    ours = socket.socket(fileno=int(fd))
    living: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(ours, MAX_BYTES, MAX_FDS)
        if not data:
            break
        request = json.loads(data)
        if "reap" in request:
            living.discard(request["reap"])
            answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                ours.close()
                grow_up(module, dict(zip(request["numbers"], fds, strict=True)), request)
            living.add(answer)
            for each in fds:
                os.close(each)
        ours.send(str(answer).encode())
    for pid in living:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def grow_up(module: Any, fds: dict[int, int], request: dict[str, Any]) -> None:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        aside = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for number, fd in fds.items()}  # numbers may be swapped
        for fd in fds.values():
            os.close(fd)
        for number, fd in aside.items():
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv[1:] = request["arguments"]
        if "coverage" in sys.modules:  # tests/mutants.py measures which test executes a line
            sys.modules["coverage"].Coverage.current().switch_context(os.environ["PYTEST_CURRENT_TEST"])
        code = (importlib.import_module(request["runs"]) if request["runs"] else module).main()
        sys.stdout.flush()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()

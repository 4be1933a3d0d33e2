"""A command of ours as a process beneath an actor: started, watched, drained, ended. Knows nothing of Ray.

The process dies with the actor's. What it prints goes on to the actor's log; the address it announces is picked out,
and its last lines are kept to say what it died of.
"""

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence

import msgspec

from penstock.executor.process_life import ending

ANNOUNCED = re.compile(r"(?:Ready after|Routing to) .*: (http://\S+:\d+)$")  # by `serve` and by `route`
LAST_LINES = 12
# What Ray sets for its own workers; a program that joins the cluster by itself is a driver.
RAYS_OWN = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_NODE_ID", "RAY_CLIENT_MODE")


class Sight(msgspec.Struct, frozen=True):
    """What is known of a process that may be elsewhere."""

    is_gone: bool = False
    pid: int | None = None  # None: not started yet
    node: str = ""
    url: str | None = None  # once it listens
    last_words: str = ""


class Child:
    def __init__(self, words: Sequence[str], env: Mapping[str, str], node: str) -> None:
        self._command = [sys.executable, "-m", "penstock.executor.process_life", str(os.getpid()), sys.executable, "-m"]
        self._command += words
        self._env = {name: value for name, value in os.environ.items() if name not in RAYS_OWN} | dict(env)
        self._node = node
        self._process: subprocess.Popen[str] | None = None
        self._url: str | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def look(self) -> Sight:
        process, how = self._process, self._failure
        if process is not None and process.poll() is not None:
            how = ending(process.returncode)
        if how is not None:
            self._thread.join(0.5)  # what it said last may still be in the pipe, which others may hold open
            how = ": ".join([how, *list(self._lines)[-1:]])
        return Sight(how is not None, None if process is None else process.pid, self._node, self._url, how or "")

    def drain(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def _run(self) -> None:
        """The thread that starts it must live as long as it does: the kernel watches this thread."""
        try:
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # a Ctrl-C is for who started the deployment
            )
        except OSError as error:
            self._failure = f"could not be started: {error}"
            return
        assert self._process.stdout is not None
        with self._process.stdout as out:
            for line in out:
                print(line, end="", flush=True)
                self._lines.append(line.strip())
                if self._url is None and (found := ANNOUNCED.match(line.rstrip())):
                    self._url = found[1]
        self._process.wait()

"""Python programs of the tests as processes of their own, talked with line by line."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Program:
    """What `python ARGUMENTS…` has to say: lines of text, or of JSON."""

    def __init__(self, *arguments: str | Path, before: Sequence[str] = (), **environment: str) -> None:
        """`before`: the words of a command that runs it."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the program
        self.process = subprocess.Popen(
            [*before, sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path]), **environment},
        )

    def line(self, mark: str) -> str:
        """The next line that begins like this; Ray prints others in between."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(mark):
                return line.strip()
        self._errors.seek(0)
        raise AssertionError(f"the program ended before {mark!r}; it said last:\n{self._errors.read()[-4000:]}")

    def heard(self) -> dict[str, Any]:
        return dict(json.loads(self.line("{")))

    def send(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._errors.close()


def all_gone(pids: list[int], timeout_s: float = 120.0) -> bool:
    until = time.monotonic() + timeout_s
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(lives, pids))


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it ends while we read
        return False

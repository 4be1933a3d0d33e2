"""Python programs of the tests as processes of their own, talked with line by line."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


class Program:
    """What `python ARGUMENTS…` has to say: lines of text, or of JSON."""

    def __init__(self, *arguments: str | Path, before: Sequence[str] = (), **environment: str) -> None:
        """`before`: the words of a command that runs it."""
        self.process = subprocess.Popen(
            [*before, sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(["src", ".", *sys.path]), **environment},
        )

    def line(self, mark: str) -> str:
        """The next line that begins like this; Ray prints others in between."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            if line.startswith(mark):
                return line.strip()
        raise AssertionError("the program ended without a word")

    def heard(self) -> dict:
        return json.loads(self.line("{"))

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def all_gone(pids: list[int], timeout_s: float = 30.0) -> bool:
    until = time.monotonic() + timeout_s
    while any(map(lives, pids)) and time.monotonic() < until:
        time.sleep(0.1)
    return not any(map(lives, pids))


def lives(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

"""Python programs of the tests as processes of their own: those that are talked with line by line, and the commands."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]


def printed(code: str, *arguments: object, flags: Sequence[str] = (), **environment: str) -> str:
    """Run Python code in a fresh process; return what it prints."""
    return printed_by(*flags, "-c", code, *map(str, arguments), timeout_s=300, **environment)


def printed_by(*words: str, timeout_s: float, **environment: str) -> str:
    """Run Python with these words in a fresh process, which finds the modules that this one finds; return what it prints."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    done = subprocess.run([sys.executable, *words], env=variables, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Program:
    """The process `python ARGUMENTS…`, whose output is lines of text, or of JSON."""

    def __init__(self, *arguments: str | Path, before: Sequence[str] = (), **environment: str) -> None:
        """`before`: the words of a command that runs it."""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the program
        self.process = subprocess.Popen(
            [*before, sys.executable, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        )

    def line(self, mark: str) -> str:
        """Return the next line that begins like this; Ray prints others in between."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()


class EndlessProgram(Program):
    """A program that does not end by itself."""

    def end(self) -> None:
        self.process.kill()
        super().end()


class Command(contextlib.AbstractContextManager["Command"]):
    """`penstock ...` as its user runs it, with what it has printed so far."""

    def __init__(self, *words: object, max_files: tuple[int, int] | None = None, **environment: str) -> None:
        """Start it. `max_files`: its soft and its hard limit of open files."""

        def limit() -> None:
            if max_files is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, max_files)

        self.process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])} | environment,
            preexec_fn=limit,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, pattern: str) -> re.Match[str]:
        deadline_s = time.monotonic() + 300
        while (found := re.search(pattern, self.output)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.output
            time.sleep(0.01)
        return found

    def url(self) -> str:
        """Wait until it listens."""
        return self.wait_for(r"(?:Ready after|Routing to|Discovering) .*: (http://\S+)")[1]

    def stop(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.close()
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_files() -> Counter[str]:
    """Return what the descriptors of this process stand for. Subtracting an earlier result leaves what has come since: what
    other tests have left behind may go meanwhile."""
    found: Counter[str] = Counter()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the folder's own, and what other threads close
            found[os.readlink(each)] += 1
    return found


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

"""Tells what a run does while it runs, and lets a signal end it early with a report of what was found until then."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

Say = Callable[[str], None]
# The signals on which prove ends. nohup makes a process ignore one of them, a shell's background job two.
END_SIGNALS = [
    each
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    if signal.getsignal(each) != signal.SIG_IGN
]


class Journal:
    """Prints each line at once and appends it to a file, if one is given."""

    def __init__(self, path: str | None) -> None:
        self._path, self.started_s = path, time.monotonic()
        if path is not None:
            Path(path).write_text("")

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        self.write(f"[{time.monotonic() - self.started_s:6.1f} s] {text}")

    def write(self, text: str) -> None:
        print(text, flush=True)
        if self._path is not None:
            with open(self._path, "a") as file:
                file.write(text + "\n")


@contextlib.contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Cancel the current task when a signal asks prove to end."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in END_SIGNALS:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in END_SIGNALS:
            loop.remove_signal_handler(number)

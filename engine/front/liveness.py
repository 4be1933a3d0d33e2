"""Decides from heartbeat, process state and CPU time whether the engine core is lost or only starved of CPU.

A core that is stopped or dead is lost as soon as it is silent. One that is runnable or uses CPU counts as alive until a
far longer limit: on a busy machine heartbeats are late. `AsyncEngine` calls `heard` and `tick`.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from penstock.executor.process_life import HEARTBEAT_S

TICK_S = 0.25
SILENCE_S = 5 * HEARTBEAT_S  # silence after which the process is examined
STUCK_S = 30.0  # neither runnable nor using CPU for so long: it hangs in a lock or a system call
RUNAWAY_S = 300.0  # silence after which it is lost even if it uses CPU
# The minimum CPU use that counts as progress. A thread that waits for the interpreter's lock, held by a hung thread,
# wakes 200 times a second and uses up to 1 %.
PROGRESS_SHARE = 0.05
STOPPED_STATES = frozenset("Tt")  # stopped by a signal or a debugger
GONE_STATES = STOPPED_STATES | frozenset("ZXx")  # or zombie, dead
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")

Verdict = Literal["heard", "starved", "lost"]


class ProcessLook(NamedTuple):
    """The state of a process at one moment, read from /proc."""

    state: str  # of its main thread
    is_runnable: bool  # any of its threads
    cpu_s: float


def look_at(pid: int) -> ProcessLook | None:
    """Read the state of a process; None if it does not exist or there is no /proc."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}/stat"))
        threads = [_stat_fields(path)[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return None
    return ProcessLook(fields[0], "R" in threads, (int(fields[11]) + int(fields[12])) / CLOCK_TICKS)


def _stat_fields(path: Path) -> list[str]:
    """Return the fields after the command's name, which may contain spaces and parentheses."""
    return path.read_text().rpartition(")")[2].split()


class Liveness:
    def __init__(
        self, look: Callable[[int], ProcessLook | None] = look_at, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.pid: int | None = None  # None: there is no process to examine
        self._look, self._clock = look, clock
        self._ticked_s = clock()
        self._last: ProcessLook | None = None
        self.silent_s = 0.0
        self._stuck_s = 0.0
        self.verdict: Verdict = "heard"

    def heard(self) -> None:
        """Record that the core has sent a message."""
        self.silent_s = self._stuck_s = 0.0
        self._last = None
        self.verdict = "heard"

    def tick(self) -> None:
        """Examine the core; call every TICK_S. If calls are late, this process was delayed: that time is not counted,
        because messages of the core may be unread."""
        now_s = self._clock()
        passed_s = min(now_s - self._ticked_s, 2 * TICK_S)
        self._ticked_s = now_s
        self.silent_s += passed_s
        if self.pid is None or self.silent_s <= SILENCE_S:
            return
        look, before = self._look(self.pid), self._last
        self._last = look
        if look is None or look.state in GONE_STATES or self.silent_s > RUNAWAY_S:
            self.verdict = "lost"
            return
        has_progressed = before is None or look.cpu_s - before.cpu_s >= PROGRESS_SHARE * passed_s
        if not look.is_runnable and not has_progressed:
            self._stuck_s += passed_s
        self.verdict = "lost" if self._stuck_s > STUCK_S else "starved"

    @property
    def reason(self) -> str:
        """The verdict as text."""
        cause = "; its process is alive and gets too little CPU, or hangs" if self.verdict == "starved" else ""
        if self._last is not None and self._last.state in STOPPED_STATES:
            cause = "; its process is stopped"
        return f"the engine core has been silent for {self.silent_s:.0f} s{cause}"

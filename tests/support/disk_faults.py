"""Errors on purpose, in front of the disk tier's system calls.

Points have the names of the methods of `SystemCalls`. A fault is drawn by a seed with some probability, or strikes the
n-th call of all; the same seed over the same calls gives the same faults.
"""

import errno
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from penstock.cache.tiers.disk.calls import SystemCalls

POINTS = ("open", "writev", "readv", "allocate", "truncate", "sync", "rename", "unlink")


class Fault(NamedTuple):
    """A fault at `points`: wait, for a time or until an event, then fail with `error`, or move only a part (`short`), or
    flip a bit (`flip`)."""

    points: tuple[str, ...] = POINTS
    error: int = 0
    short: bool = False
    flip: bool = False
    delay_s: float = 0.0
    until: threading.Event | None = None
    probability: float = 1.0
    at: int | None = None  # only the call with this number, counted from 0 over all points together


class FaultyCalls(SystemCalls):
    """`SystemCalls` with faults. `is_on` can be switched at any time; calls are counted in both states."""

    def __init__(self, *faults: Fault, seed: int = 0) -> None:
        self.faults = list(faults)
        self.is_on = True
        self.num_calls = 0
        self.num_struck = 0
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        """Return a system call that meets the faults first."""
        method = super().__getattribute__(name)
        return partial(self._call, name, method) if name in POINTS else method

    def _call(self, point: str, method: Callable[..., Any], *arguments: Any) -> Any:
        fault = self._meet(point)
        if fault is not None and fault.short:  # the first of several parts is moved, or nothing
            file, parts, offset = arguments
            return method(file, parts[:1], offset) if len(parts) > 1 else 0
        result = method(*arguments)
        if fault is not None and fault.flip and result:
            part = memoryview(arguments[1][-1]).cast("B")
            with self._lock:
                at = self._random.randrange(8 * len(part))
            part[at // 8] ^= 1 << at % 8
        return result

    def _meet(self, point: str) -> Fault | None:
        """Return the fault that strikes this call, if any; raise its error."""
        with self._lock:
            number = self.num_calls
            self.num_calls += 1
            struck = [fault for fault in self.faults if self._strikes(fault, point, number)] if self.is_on else []
            self.num_struck += bool(struck)
        for fault in struck:
            if fault.delay_s:
                time.sleep(fault.delay_s)
            if fault.until is not None:
                fault.until.wait()
            if fault.error:
                raise OSError(fault.error, f"{os.strerror(fault.error)} (on purpose, at {point})")
            if fault.short or fault.flip:
                return fault
        return None

    def _strikes(self, fault: Fault, point: str, number: int) -> bool:
        if point not in fault.points or (fault.at is not None and fault.at != number):
            return False
        return fault.probability >= 1 or self._random.random() < fault.probability


ERRORS = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EMFILE)

"""A circuit breaker for a cache tier: decides when to bypass it and when to probe it again.

OPEN ──3 errors in a row, or a call that hangs──▶ BYPASSED ──pause over, nothing hangs──▶ PROBING ──▶ OPEN
                                                     ▲                                       │
                                                     └────────── failed: twice the pause ────┘
"""

import logging
from typing import NamedTuple

log = logging.getLogger("penstock.cache")

STALLED = "stalled"  # a reason for a bypass
REPORT_S = 60.0


class HealthLimits(NamedTuple):
    max_errors: int = 3  # in a row
    stall_s: float = 2.0  # a call that takes longer counts as hung
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0


class FailureLog:
    """Logs the failed loads of one tier: a line for the 1st, the 10th, the 100th … and at most one a minute besides."""

    def __init__(self, tier: str) -> None:
        self._tier, self._num, self._next_num, self._due_s = tier, 0, 1, 0.0

    def add(self, now_s: float, reason: str) -> None:
        """Record a failed load."""
        self._num += 1
        if self._num < self._next_num and now_s < self._due_s:
            return
        self._next_num *= 10 if self._num >= self._next_num else 1
        self._due_s = now_s + REPORT_S
        log.warning("%s: failed to load a block: %s (failed loads so far: %d)", self._tier, reason, self._num)


class TierHealth:
    """The state of the circuit breaker of one tier, `name` in the log. One thread calls it and passes the current time."""

    def __init__(self, limits: HealthLimits, name: str) -> None:
        self.is_open = True
        self.num_bypasses = 0
        self._limits, self._name = limits, name
        self._num_errors = 0
        self._pause_s = limits.first_pause_s
        self._until_s = 0.0
        self._opened_s = float("-inf")
        self._is_probing = False

    def record_success(self) -> None:
        """Record a successful call. It does not end a bypass: the call may have started before the bypass."""
        self._num_errors = 0

    def record_failure(self, now_s: float, reason: str) -> bool:
        """Record a failed call; return whether this starts a bypass."""
        self._num_errors += 1
        if not self.is_open or self._num_errors < self._limits.max_errors:
            return False
        self.bypass(now_s, reason)
        return True

    def check_stall(self, now_s: float, oldest_started_s: float | None) -> bool:
        """Detect a hung call, given the start time of the oldest call in flight; return whether this starts a bypass."""
        if oldest_started_s is None or now_s - oldest_started_s < self._limits.stall_s:
            return False
        if self.is_open:
            self.bypass(now_s, STALLED)
            return True
        self._until_s = max(self._until_s, now_s + self._pause_s)
        return False

    def start_probe(self, now_s: float) -> bool:
        """Return True once per pause: the caller then sends a probe and reports its result with `finish_probe`."""
        if self.is_open or self._is_probing or now_s < self._until_s:
            return False
        self._is_probing = True
        return True

    def finish_probe(self, now_s: float, ok: bool) -> None:
        self._is_probing = False
        self._num_errors = 0
        if ok:
            log.info("%s is in use again", self._name)
            self.is_open = True
            self._opened_s = now_s
        else:
            self._pause(now_s, self._pause_s * 2)

    def bypass(self, now_s: float, reason: str) -> None:
        if self.is_open:
            log.warning("%s is bypassed for a while: %s", self._name, reason)
        self.is_open = False
        self.num_bypasses += 1
        # A small probe may succeed on a broken disk, so the pause is reset only after the tier was open for a while.
        was_well = now_s - self._opened_s > self._limits.longest_pause_s
        self._pause(now_s, self._limits.first_pause_s if was_well else self._pause_s * 2)

    def _pause(self, now_s: float, pause_s: float) -> None:
        self._pause_s = min(pause_s, self._limits.longest_pause_s)
        self._until_s = now_s + self._pause_s

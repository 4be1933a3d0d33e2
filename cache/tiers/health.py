"""When a tier is left alone, and when it is asked again. Knows times and outcomes, nothing of files.

OPEN ──3 errors in a row, or a call that hangs──▶ BYPASSED ──pause over, nothing hangs──▶ PROBING ──▶ OPEN
                                                     ▲                                       │
                                                     └────────── failed: twice the pause ────┘
"""

import logging
from typing import NamedTuple

log = logging.getLogger("penstock.cache")

STALLED = "stalled"  # a reason


class HealthLimits(NamedTuple):
    max_errors: int = 3  # in a row
    stall_s: float = 2.0  # a call that takes longer hangs
    first_pause_s: float = 1.0
    longest_pause_s: float = 30.0


class TierHealth:
    """One thread calls it, with the time as it sees it."""

    def __init__(self, limits: HealthLimits) -> None:
        self.is_open = True
        self.num_bypasses = 0
        self.reason = ""  # of the bypass that is on, or was on last
        self._limits = limits
        self._num_errors = 0
        self._pause_s = limits.first_pause_s
        self._until_s = 0.0
        self._opened_s = float("-inf")
        self._is_probing = False

    def worked(self) -> None:
        """A call came back well. While bypassed that says little: it may be one from before."""
        self._num_errors = 0

    def failed(self, now_s: float, reason: str) -> bool:
        """Whether the tier is bypassed from now on."""
        self._num_errors += 1
        if not self.is_open or self._num_errors < self._limits.max_errors:
            return False
        self.bypass(now_s, reason)
        return True

    def watch(self, now_s: float, oldest_started_s: float | None) -> bool:
        """Whether the tier is bypassed from now on. `oldest_started_s`: when the oldest call in flight began."""
        if oldest_started_s is None or now_s - oldest_started_s < self._limits.stall_s:
            return False
        if self.is_open:
            self.bypass(now_s, STALLED)
            return True
        self._until_s = max(self._until_s, now_s + self._pause_s)
        return False

    def wants_probe(self, now_s: float) -> bool:
        """True once per pause: the caller then probes, and reports with `probed`."""
        if self.is_open or self._is_probing or now_s < self._until_s:
            return False
        self._is_probing = True
        return True

    def probed(self, now_s: float, ok: bool) -> None:
        self._is_probing = False
        self._num_errors = 0
        if ok:
            log.info("a cache tier is asked again")
            self.is_open = True
            self._opened_s = now_s
        else:
            self._pause(now_s, self._pause_s * 2)

    def bypass(self, now_s: float, reason: str) -> None:
        if self.is_open:
            log.warning("a cache tier is left alone for a while: %s", reason)
        self.is_open = False
        self.reason = reason
        self.num_bypasses += 1
        # A probe is small and may miss what is broken, so only time shows whether the disk is well again.
        was_well = now_s - self._opened_s > self._limits.longest_pause_s
        self._pause(now_s, self._limits.first_pause_s if was_well else self._pause_s * 2)

    def _pause(self, now_s: float, pause_s: float) -> None:
        self._pause_s = min(pause_s, self._limits.longest_pause_s)
        self._until_s = now_s + self._pause_s

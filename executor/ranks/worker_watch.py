"""Watches the workers of one executor: receives their reports, and diagnoses failures.

It does not know steps, nor how a worker is started or reached; `Worker` and `Reports` abstract that. After a failure,
at the start or later, the next call raises one ExecutorError that names the rank, its last activity and, if known, the
root cause: a rank that only lost its peers is not blamed if another one is known to have died.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks.wire import Beat, Done, Failed, FromWorker, ModelLoaded, RankAnswer, RankProgress

BEAT_LIMIT_S = 8.0  # a worker without a heartbeat for this long is stopped or starved; it sends one every second
START_BEAT_LIMIT_S = 60.0  # while a worker loads, long calls may hold the interpreter
CAUSE_GRACE_S = 3.0  # how long to wait for the cause after the first sign of a failure; Ray takes its time
CAUSE_CHECK_S = 0.2
STACKS_GRACE_S = 0.5  # time for the workers to print their stacks before they are ended
STOP_GRACE_S = 5.0


class Worker(Protocol):
    """The process of one rank, e.g. a ChildProcess (executor/process_life.py)."""

    name: str  # "rank 3 (process 4711)"
    pid: int

    def dump_stacks(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def death(self) -> str | None:
        """Return how it ended, e.g. "was killed by SIGKILL", or None as long as it seems to run."""

    def kill(self) -> None: ...


class Reports(Protocol):
    """The source of the workers' reports."""

    def receive(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        """Yield (rank, message) as they arrive, waiting for the first; None: the rank will send no more reports."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Watched:
    """The known state of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.last_report_s = math.inf  # none yet: from a disk, importing torch may take minutes, without a heartbeat
        self.doing = "starting"
        self.loaded: ModelLoaded | None = None
        self.failed: Failed | None = None
        self.is_gone = False

    @property
    def is_cause(self) -> bool:
        """Tell whether it failed or died on its own, not because the ranks lost each other."""
        return self.is_gone if self.failed is None else not self.failed.is_consequence

    def verdict(self) -> str:
        if self.failed is None:
            return f"{self.worker.name} {self.worker.death() or 'is gone'}; last it was {self.doing}"
        if self.failed.traceback is None:
            return self.failed.error
        return f"{self.worker.name} failed: {self.failed.error}\n{self.failed.traceback}"


class WorkerWatch:
    def __init__(self, workers: Sequence[Worker], reports: Reports) -> None:
        self.workers, self._reports = workers, reports
        self._watched = [_Watched(worker) for worker in workers]
        self.error: ExecutorError | None = None  # why it gave up

    def wait_loaded(self, progress: Callable[[str], None]) -> list[ModelLoaded]:
        while not all(each.loaded for each in self._watched):
            for message in self.receive(1.0, START_BEAT_LIMIT_S):
                if isinstance(message, RankProgress):
                    progress(message.line)
        for each in self._watched:
            each.doing = "waiting for a step"
        return [each.loaded for each in self._watched if each.loaded]

    def fileno(self) -> int:
        """Return a descriptor that is readable when a worker has reported something or has died."""
        return self._reports.fileno()

    def receive(self, timeout_s: float, beat_limit_s: float | None = None) -> list[Done | RankProgress | RankAnswer]:
        """Return reports that arrive within the time; the first one ends the wait. Raises if a worker has failed."""
        if self.error is not None:
            raise self.error
        reports = list(self._receive(timeout_s))
        if any(each.failed or each.is_gone for each in self._watched):
            self._end(self._cause())
        for each in self._watched:
            silent_s = time.monotonic() - each.last_report_s
            if silent_s > (beat_limit_s or BEAT_LIMIT_S):
                how = each.worker.death() or f"has sent no heartbeat for {silent_s:.0f} s"
                self.give_up(f"{each.worker.name} {how}; last it was {each.doing}")
        return reports

    def whereabouts(self) -> str:
        return "; ".join(f"{each.worker.name} was last {each.doing}" for each in self._watched)

    def give_up(self, why: str) -> None:
        """Make every worker print its stacks to standard error, end all workers, and raise."""
        for worker in self.workers:
            worker.dump_stacks()
        time.sleep(STACKS_GRACE_S)
        self._end(why)

    def stop(self) -> None:
        """Wait for workers that were asked to close, or killed; one in an uninterruptible call ends at neither."""
        until_s = time.monotonic() + STOP_GRACE_S
        for worker in self.workers:
            if not worker.wait(max(0.0, until_s - time.monotonic())):
                break

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self.stop()
        self._reports.close()

    def _end(self, why: str) -> None:
        self.error = ExecutorError(why)
        self.close()
        raise self.error

    def _receive(self, timeout_s: float) -> Iterator[Done | RankProgress | RankAnswer]:
        for rank, message in self._reports.receive(timeout_s):
            each = self._watched[rank]
            each.last_report_s = time.monotonic()
            match message:
                case None:
                    each.is_gone = True
                case Beat():
                    each.doing = message.doing
                case ModelLoaded():
                    each.loaded = message
                case Failed():  # keep the failure that is no consequence, from the Finisher or the main thread
                    if each.failed is None or each.failed.is_consequence:
                        each.failed = message
                case _:
                    yield message

    def _cause(self) -> str:
        """Return the cause of the failure, after waiting for related reports."""
        until_s = time.monotonic() + CAUSE_GRACE_S
        while (left_s := until_s - time.monotonic()) > 0 and not any(each.is_cause for each in self._watched):
            list(self._receive(min(left_s, CAUSE_CHECK_S)))
        # First a rank that reports what went wrong, then one that died, then one that lost its peers.
        ours = sorted(self._watched, key=lambda each: (not each.is_cause, each.failed is None))
        return next(each.verdict() for each in ours if each.failed or each.is_gone)

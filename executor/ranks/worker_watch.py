"""The workers of one executor, watched all the time: what they report, and what it means when one fails.

It knows neither steps nor how a worker is started or reached; `Worker` and `Reports` are that. Whatever goes wrong, at
the start or later, the first call after it raises one ExecutorError that names the rank, what it did last and, where
there is one, the root cause: a rank that merely lost its peers is never blamed while the one that died is known.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks.wire import Beat, Done, Failed, FromWorker, ModelLoaded, RankAnswer, RankProgress

BEAT_LIMIT_S = 8.0  # silent for so long, a worker is stopped or starved; it has a heartbeat every second
START_BEAT_LIMIT_S = 60.0  # while it loads, long calls may hold the interpreter
CAUSE_GRACE_S = 3.0  # how long to listen for the cause after the first sign of a failure; Ray takes its time
CAUSE_CHECK_S = 0.2
STACKS_GRACE_S = 0.5  # for the workers to print where they are, before they are ended
STOP_GRACE_S = 5.0


class Worker(Protocol):
    """The process of one rank; a ChildProcess (executor/process_life.py) is one."""

    name: str  # "rank 3 (process 4711)"
    pid: int

    def dump_stacks(self) -> None: ...

    def wait(self, timeout_s: float) -> bool: ...

    def death(self) -> str | None:
        """How it ended, as in "was killed by SIGKILL"; None while it lives, as far as can be seen."""
        ...

    def kill(self) -> None: ...


class Reports(Protocol):
    """Brings what the workers report."""

    def hear(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        """(rank, message) of what has arrived, waiting for the first; None: this rank will report no more."""
        ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _Watched:
    """What is known of one worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.heard_s = time.monotonic()
        self.doing = "starting"
        self.loaded: ModelLoaded | None = None
        self.failed: Failed | None = None
        self.is_gone = False

    @property
    def is_cause(self) -> bool:
        """Whether it failed or died by itself, and not because the ranks lost each other."""
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
        self._error: ExecutorError | None = None

    def wait_loaded(self, progress: Callable[[str], None]) -> list[ModelLoaded]:
        while not all(each.loaded for each in self._watched):
            for message in self.hear(1.0, START_BEAT_LIMIT_S):
                if isinstance(message, RankProgress):
                    progress(message.line)
        for each in self._watched:
            each.doing = "waiting for a step"
        return [each.loaded for each in self._watched if each.loaded]

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fileno(self) -> int:
        """Readable when a worker has reported something, or is gone."""
        return self._reports.fileno()

    def hear(self, timeout_s: float, beat_limit_s: float | None = None) -> list[Done | RankProgress | RankAnswer]:
        """What the workers report within the time, the first message ends the wait; raises when one has failed."""
        if self._error is not None:
            raise self._error
        heard = list(self._hear(timeout_s))
        if any(each.failed or each.is_gone for each in self._watched):
            self._end(self._cause())
        for each in self._watched:
            silent_s = time.monotonic() - each.heard_s
            if silent_s > (beat_limit_s or BEAT_LIMIT_S):
                how = each.worker.death() or f"has not been heard of for {silent_s:.0f} s"
                self.give_up(f"{each.worker.name} {how}; last it was {each.doing}")
        return heard

    def whereabouts(self) -> str:
        return "; ".join(f"{each.worker.name} was last {each.doing}" for each in self._watched)

    def give_up(self, why: str) -> None:
        """Have every worker print its stacks to standard error, end them all, and raise."""
        for worker in self.workers:
            worker.dump_stacks()
        time.sleep(STACKS_GRACE_S)
        self._end(why)

    def stop(self) -> None:
        """Wait for workers that were asked to close; `close` kills the others."""
        until_s = time.monotonic() + STOP_GRACE_S
        for worker in self.workers:
            if not worker.wait(max(0.0, until_s - time.monotonic())):
                break

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._reports.close()

    def _end(self, why: str) -> None:
        self._error = ExecutorError(why)
        self.close()
        raise self._error

    def _hear(self, timeout_s: float) -> Iterator[Done | RankProgress | RankAnswer]:
        for rank, message in self._reports.hear(timeout_s):
            each = self._watched[rank]
            each.heard_s = time.monotonic()
            match message:
                case None:
                    each.is_gone = True
                case Beat():
                    each.doing = message.doing
                case ModelLoaded():
                    each.loaded = message
                case Failed():  # of the Finisher's and the main thread's the one that is no consequence
                    if each.failed is None or each.failed.is_consequence:
                        each.failed = message
                case _:
                    yield message

    def _cause(self) -> str:
        """Why it failed, once all that belongs to the failure has had time to arrive."""
        until_s = time.monotonic() + CAUSE_GRACE_S
        while (left_s := until_s - time.monotonic()) > 0 and not any(each.is_cause for each in self._watched):
            list(self._hear(min(left_s, CAUSE_CHECK_S)))
        # A rank that says what went wrong, then one that died, then one that lost its peers.
        ours = sorted(self._watched, key=lambda each: (not each.is_cause, each.failed is None))
        return next(each.verdict() for each in ours if each.failed or each.is_gone)

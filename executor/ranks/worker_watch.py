"""The workers of one executor, watched all the time: what they say, and what it means when one fails.

It knows neither steps nor how a worker is started or reached; `Worker` and `Post` are that. Whatever goes wrong, at
the start or later, the first call after it raises one ExecutorError that names the rank, what it was last at and,
where there is one, the root cause: a rank that merely lost its peers is never blamed while the one that died is known.
"""

import time
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.executor.protocol import ExecutorError
from penstock.executor.ranks.wire import Beat, Done, Failed, FromWorker, LoadProgress, ModelLoaded

BEAT_LIMIT_S = 8.0  # silent for so long, a worker is stopped or starved; it says something every second
START_BEAT_LIMIT_S = 60.0  # while it loads, long calls may hold the interpreter
CAUSE_GRACE_S = 3.0  # how long to listen for the cause after the first sign of a failure; Ray takes its time
CAUSE_CHECK_S = 0.2
STACKS_GRACE_S = 0.5  # for the workers to print where they are, before they are ended
STOP_GRACE_S = 5.0


class Worker(Protocol):
    """The process of one rank, as whoever started it can touch it."""

    name: str  # "rank 3 (process 4711)"

    def dump_stacks(self) -> None:
        """Have it print where its threads are to its standard error."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended, within the time."""
        ...

    def death(self) -> str | None:
        """How it ended, as in "was killed by SIGKILL"; None while it lives, as far as can be told."""
        ...

    def kill(self) -> None:
        """End it if it lives; returns when it is gone."""
        ...


class Post(Protocol):
    """Brings what the workers say."""

    def pump(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        """(rank, message) of what has arrived, waiting for the first; None: this rank will say no more."""
        ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class _State:
    """What is known of one worker."""

    def __init__(self) -> None:
        self.heard_s = time.monotonic()
        self.doing = "starting"
        self.loaded: ModelLoaded | None = None
        self.failed: Failed | None = None
        self.is_gone = False


class WorkerWatch:
    def __init__(self, workers: list[Worker], post: Post) -> None:
        self.workers, self._post = workers, post
        self._states = [_State() for _ in workers]
        self._error: ExecutorError | None = None

    def wait_loaded(self, progress: Callable[[str], None]) -> list[ModelLoaded]:
        while not all(state.loaded for state in self._states):
            for message in self.hear(1.0, START_BEAT_LIMIT_S):
                if isinstance(message, LoadProgress):
                    progress(message.line)
        for state in self._states:
            state.doing = "waiting for a step"
        return [state.loaded for state in self._states if state.loaded]

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fileno(self) -> int:
        """Readable when a worker has said something, or is gone."""
        return self._post.fileno()

    def hear(self, timeout_s: float, beat_limit_s: float | None = None) -> list[Done | LoadProgress]:
        """What the workers say within the time, the first news ends the wait; raises when one has failed."""
        if self._error is not None:
            raise self._error
        heard = list(self._pump(timeout_s))
        if any(state.failed or state.is_gone for state in self._states):
            self._end(self._cause())
        now_s = time.monotonic()
        for worker, state in zip(self.workers, self._states, strict=True):
            if now_s - state.heard_s > (beat_limit_s or BEAT_LIMIT_S):
                how = worker.death() or f"has not been heard of for {now_s - state.heard_s:.0f} s"
                self.give_up(f"{worker.name} {how}; last it was {state.doing}")
        return heard

    def whereabouts(self) -> str:
        named = zip(self.workers, self._states, strict=True)
        return "; ".join(f"{worker.name} was last {state.doing}" for worker, state in named)

    def give_up(self, why: str) -> None:
        """Have every worker print its stacks to standard error, end them all, and raise."""
        for worker in self.workers:
            worker.dump_stacks()
        time.sleep(STACKS_GRACE_S)
        self._end(why)

    def stop(self) -> None:
        """Wait for workers that were told to close; whoever does not is killed."""
        until_s = time.monotonic() + STOP_GRACE_S
        for worker in self.workers:
            if not worker.wait(max(0.0, until_s - time.monotonic())):
                break
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        self._post.close()

    def _end(self, why: str) -> None:
        self._error = ExecutorError(why)
        self.close()
        raise self._error

    def _pump(self, timeout_s: float) -> Iterator[Done | LoadProgress]:
        for rank, message in self._post.pump(timeout_s):
            state = self._states[rank]
            state.heard_s = time.monotonic()
            if message is None:
                state.is_gone = True
            elif isinstance(message, Beat):
                state.doing = message.doing
            elif isinstance(message, ModelLoaded):
                state.loaded = message
            elif isinstance(message, Failed):
                state.failed = message
            else:
                yield message

    def _cause(self) -> str:
        """Why it failed, once all that belongs to the failure has had time to arrive."""
        until_s = time.monotonic() + CAUSE_GRACE_S
        while (left_s := until_s - time.monotonic()) > 0 and not self._knows_cause():
            list(self._pump(min(left_s, CAUSE_CHECK_S)))
        named = list(zip(self.workers, self._states, strict=True))
        for worker, state in named:
            if state.failed and not state.failed.is_consequence:
                return _told(worker, state.failed)
        for worker, state in named:
            if state.is_gone and not state.failed:
                return f"{worker.name} {worker.death() or 'is gone'}; last it was {state.doing}"
        return next(_told(worker, state.failed) for worker, state in named if state.failed)

    def _knows_cause(self) -> bool:
        return any(state.is_gone if state.failed is None else not state.failed.is_consequence for state in self._states)


def _told(worker: Worker, failed: Failed) -> str:
    if failed.traceback is None:
        return failed.error
    return f"{worker.name} failed: {failed.error}\n{failed.traceback}"

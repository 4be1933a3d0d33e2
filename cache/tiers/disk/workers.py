"""The I/O threads of the disk tier, with one queue for loads and one for stores.

Every queued job ends in exactly one place: in `done`, once no thread touches its buffer any more, or in the result of
`cancel`, if no thread has started it. Loads have priority over stores. Queues and `done` are deques, whose appends and
pops are atomic.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

import msgspec

STORE, LOAD, PROBE = "store", "load", "probe"


class DiskJob(msgspec.Struct, gc=False):
    """One store, load or probe. The tier's thread does not touch the job between `add` and `done`."""

    kind: str
    key: bytes = b""
    cell: int = -1
    sequence: int = 0
    buffer: memoryview = memoryview(b"")
    ticket: int = 0
    ok: bool = False
    reason: str = ""  # why the job failed
    started_s: float = 0.0
    seconds: float = 0.0


class Workers:
    """A pool of `count` threads that run `work(job)`, which sets `ok` or `reason` and does not raise."""

    def __init__(self, work: Callable[[DiskJob], None], count: int) -> None:
        self.done: deque[DiskJob] = deque()
        self._work = work
        self._loads: deque[DiskJob] = deque()
        self._stores: deque[DiskJob] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # True for each queued job; False ends a thread
        self._running: list[DiskJob | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"penstock-disk-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def add(self, job: DiskJob) -> None:
        """Queue a job; loads and probes have priority over stores."""
        (self._stores if job.kind is STORE else self._loads).append(job)
        self._tokens.put(True)

    def cancel(self) -> list[DiskJob]:
        """Remove and return all jobs that no thread has started."""
        return list(iter(self._next, None))

    def oldest_started_s(self) -> float | None:
        """Return the start time of the longest-running job."""
        return min((job.started_s for job in self._running if job is not None), default=None)

    def stop(self, timeout_s: float) -> bool:
        """End the threads after all queued jobs; return False if one still runs after `timeout_s`."""
        for _ in self._threads:
            self._tokens.put(False)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, index: int) -> None:
        while self._tokens.get():
            job = self._next()
            if job is not None:  # None if the job was cancelled
                self._run(index, job)

    def _run(self, index: int, job: DiskJob) -> None:
        job.started_s = time.monotonic()
        self._running[index] = job
        try:
            self._work(job)
        finally:
            job.seconds = time.monotonic() - job.started_s
            self._running[index] = None
            self.done.append(job)

    def _next(self) -> DiskJob | None:
        for queue in (self._loads, self._stores):
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None

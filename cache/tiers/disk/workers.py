"""The threads that do what takes time, and the two queues before them. They know jobs, nothing of index or health.

Every job that was queued ends in exactly one place: in `done`, when no thread touches its buffer any more, or in
what `cancel` returns, when none ever did. Reads go before writes. Queues and `done` are deques, whose appends and
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
    """One record's way to the disk or back. The tier does not touch it until it is back."""

    kind: str
    key: bytes = b""
    cell: int = -1
    sequence: int = 0
    buffer: memoryview = memoryview(b"")
    ticket: int = 0
    ok: bool = False
    reason: str = ""  # why not
    started_s: float = 0.0
    seconds: float = 0.0


class Workers:
    """`work(job)` runs on one of `count` threads, sets `ok` or `reason`, and does not raise."""

    def __init__(self, work: Callable[[DiskJob], None], count: int) -> None:
        self.done: deque[DiskJob] = deque()
        self._work = work
        self._reads: deque[DiskJob] = deque()
        self._writes: deque[DiskJob] = deque()
        self._tokens: SimpleQueue[bool] = SimpleQueue()  # True for each job that was queued; False: end
        self._running: list[DiskJob | None] = [None] * count
        self._threads = [
            threading.Thread(target=self._serve, args=(index,), name=f"penstock-disk-{index}", daemon=True)
            for index in range(count)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def add(self, job: DiskJob) -> None:
        """Queue a job. Loads and probes go before stores."""
        (self._writes if job.kind is STORE else self._reads).append(job)
        self._tokens.put(True)

    def cancel(self) -> list[DiskJob]:
        """Take back all that no thread has begun."""
        jobs = []
        while (job := self._next()) is not None:
            jobs.append(job)
        return jobs

    def oldest_started_s(self) -> float | None:
        """When the job that has been running longest began."""
        return min((job.started_s for job in self._running if job is not None), default=None)

    def stop(self, timeout_s: float) -> bool:
        """End the threads once they have done all that is queued; False if one still hangs."""
        for _ in self._threads:
            self._tokens.put(False)
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _serve(self, index: int) -> None:
        while self._tokens.get():
            job = self._next()
            if job is not None:  # else it was cancelled
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
        for queue in (self._reads, self._writes):
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None

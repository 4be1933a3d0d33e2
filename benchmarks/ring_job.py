"""One side of bench_ring.py: a writer and its readers, told on standard input what to measure. Runs in either
interpreter, so it needs numpy and the one library that is measured.

    python benchmarks/ring_job.py ours|ours-recv|ours-inband|theirs READERS
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe, Process, set_start_method
from typing import Any

import numpy as np

TIMEOUT_S = 120.0
NEVER = 1 << 40
# As each executor opens its own.
OUR_SLOTS, OUR_SLOT_BYTES = 8, 1 << 20
THEIR_CHUNKS, THEIR_CHUNK_BYTES = 10, 16 << 20


def answer(message: Any) -> int:
    """How many of the bytes are not what they were when they were sent."""
    content, expected = message
    if expected is None:
        return int(content[0] != content[-1])
    return int(np.count_nonzero(content != expected))


class Ours:
    def __init__(self, kind: str) -> None:
        from penstock.executor.ring import queue as ring

        self.queues, self.borrows = ring.MessageQueue, kind != "ours-recv"
        self.extra = {"out_of_band_bytes": NEVER} if kind == "ours-inband" else {}

    def open(self, readers: int) -> tuple[Any, Any]:
        queue = self.queues.create(readers, slots=OUR_SLOTS, slot_bytes=OUR_SLOT_BYTES, **self.extra)
        return queue, queue.handle()

    def join(self, handle: Any, reader: int) -> Any:
        return self.queues.attach(handle, reader)

    def ready(self, queue: Any) -> None: ...

    def send(self, queue: Any, message: Any) -> None:
        queue.send(message, TIMEOUT_S)

    def handle(self, queue: Any, use: Callable[[Any], int]) -> int:
        if not self.borrows:
            return use(queue.recv(TIMEOUT_S))
        with queue.borrow(TIMEOUT_S) as message:
            return use(message)


class Theirs:
    def __init__(self, kind: str) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self.queues = MessageQueue

    def open(self, readers: int) -> tuple[Any, Any]:
        queue = self.queues(readers, readers, max_chunk_bytes=THEIR_CHUNK_BYTES, max_chunks=THEIR_CHUNKS)
        return queue, queue.export_handle()

    def join(self, handle: Any, reader: int) -> Any:
        return self.queues.create_from_handle(handle, reader)

    def ready(self, queue: Any) -> None:
        queue.wait_until_ready()

    def send(self, queue: Any, message: Any) -> None:
        queue.enqueue(message, TIMEOUT_S)

    def handle(self, queue: Any, use: Callable[[Any], int]) -> int:
        return use(queue.dequeue(TIMEOUT_S))


def read(side: Any, reader: int, pipe: Any) -> None:
    back, handle = side.open(1)
    pipe.send(handle)
    queue = side.join(pipe.recv(), reader)
    side.ready(queue)
    side.ready(back)
    while True:
        side.send(back, side.handle(queue, answer))


class Bench:
    def __init__(self, kind: str, readers: int) -> None:
        set_start_method("fork")
        self.side = (Theirs if kind == "theirs" else Ours)(kind)
        pipes = [Pipe() for _ in range(readers)]
        processes = [
            Process(target=read, args=(self.side, reader, theirs), daemon=True)
            for reader, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        self.pids = [process.pid or 0 for process in processes]
        self.queue, handle = self.side.open(readers)
        handles = [ours.recv() for ours, _ in pipes]
        self.backs = [self.side.join(back, 0) for back in handles]
        for ours, _ in pipes:
            ours.send(handle)
        for queue in (self.queue, *self.backs):
            self.side.ready(queue)

    def round_trip(self, message: Any, after: Callable[[], None] = lambda: None) -> int:
        self.side.send(self.queue, message)
        after()
        return max(self.side.handle(back, int) for back in self.backs)

    def time(self, size: int, count: int) -> float:
        """The median round trip, in microseconds; the first few are not counted."""
        content, times = np.ones(size, np.uint8), []
        for _ in range(count + 3):
            start = time.perf_counter()
            self.round_trip((content, None))
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:]) * 1e6

    def cpu(self, size: int, count: int) -> float:
        """CPU time of all processes per round trip, in microseconds: what a busy machine does not blur."""
        content = np.ones(size, np.uint8)
        for _ in range(3):
            self.round_trip((content, None))
        before = self.used_s()
        for _ in range(count):
            self.round_trip((content, None))
        return (self.used_s() - before) / count * 1e6

    def used_s(self) -> float:
        clocks = [~pid << 3 | 2 for pid in (os.getpid(), *self.pids)]  # the process clock of a process id on Linux
        return sum(map(time.clock_gettime, clocks))

    def corrupted(self, size: int, count: int) -> int:
        """Messages that arrive changed when the sender refills the buffer right after sending."""
        content, bad = np.empty(size, np.uint8), 0
        for number in range(count):
            content[:] = number % 200
            bad += self.round_trip((content, number % 200), after=lambda: content.fill(255)) > 0
        return bad


def main() -> None:
    bench = Bench(sys.argv[1], int(sys.argv[2]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        what, size, count = json.loads(line)
        print(json.dumps(getattr(bench, what)(size, count)), file=answers, flush=True)
    os.killpg(0, 9)  # the readers wait for more


if __name__ == "__main__":
    main()

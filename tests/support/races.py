"""Finds accesses to memory that nothing puts into order: threads of the host and streams of a device, by vector clocks.

The pretended GPU (tests/support/pretended_gpu.py) reports which stream or thread read or wrote which bytes, and which
waited for which. Of two accesses to the same bytes, one of them a write, one must have happened before the other: by program
order, or along waits. It does not matter which came first in this run; a race is found even where it did no harm.
"""

import bisect
import sys
from collections.abc import Sequence
from types import CodeType, FrameType

import numpy as np

GRAIN = 4  # bytes that count as one
MAX_ACTORS = 32
WATCHERS = ("/races.py", "/pretended_gpu.py", "/pretended_ops.py", "/pretended_streams.py")

Clock = np.ndarray  # int64 [actors]: the last moment of each that has happened before
Place = tuple[tuple[CodeType, int], ...]  # code and line, innermost first


class Race(AssertionError):
    pass


class Memory:
    """Some bytes, and the last accesses to them."""

    def __init__(self, name: str, base: int, size: int) -> None:
        self.name, self.base, self.end = name, base, base + size
        self.num_cells = -(-size // GRAIN)
        self.writes = np.zeros(self.num_cells, np.int32)  # the last access, by number
        self.reads: dict[int, np.ndarray] = {}  # by actor, likewise

    def reads_of(self, actor: int) -> np.ndarray:
        if actor not in self.reads:
            self.reads[actor] = np.zeros(self.num_cells, np.int32)
        return self.reads[actor]


class Races:
    def __init__(self) -> None:
        self._names: list[str] = []
        self._clocks: list[Clock] = []
        self._memories: list[Memory] = []  # by address
        self._bases: list[int] = []
        self._times, self._actors = np.zeros(1 << 16, np.int64), np.zeros(1 << 16, np.int8)  # of accesses, by number
        self._places: list[Place] = [()]

    def actor(self, name: str) -> int:
        assert len(self._names) < MAX_ACTORS
        self._names.append(name)
        self._clocks.append(np.zeros(MAX_ACTORS, np.int64))
        return len(self._names) - 1

    def now(self, actor: int) -> Clock:
        """Return the clock of all that has happened before the actor's next operation."""
        return self._clocks[actor].copy()

    def wait(self, actor: int, moment: Clock) -> None:
        np.maximum(self._clocks[actor], moment, out=self._clocks[actor])

    def watch(self, name: str, base: int, size: int) -> Memory:
        memory = Memory(name, base, size)
        at = bisect.bisect(self._bases, base)
        self._memories.insert(at, memory)
        self._bases.insert(at, base)
        return memory

    def forget(self, base: int) -> None:
        """Watch the memory that begins there no longer."""
        at = self._bases.index(base)
        del self._memories[at], self._bases[at]

    def memory(self, address: int) -> Memory | None:
        at = bisect.bisect(self._bases, address) - 1
        return self._memories[at] if at >= 0 and address < self._memories[at].end else None

    def access(self, actor: int, origin: Place) -> int:
        """Return a number for the actor's next operation, which may touch several pieces of memory."""
        number = len(self._places)
        self._places.append(origin)
        if number == len(self._times):
            self._times = np.concatenate([self._times, np.zeros_like(self._times)])
            self._actors = np.concatenate([self._actors, np.zeros_like(self._actors)])
        self._clocks[actor][actor] += 1
        self._times[number], self._actors[number] = self._clocks[actor][actor], actor
        return number

    def read(self, access: int, memory: Memory, cells: slice | np.ndarray) -> None:
        self._check(access, memory, memory.writes[cells], "writes", "reads")
        memory.reads_of(int(self._actors[access]))[cells] = access

    def write(self, access: int, memory: Memory, cells: slice | np.ndarray) -> None:
        self._check(access, memory, memory.writes[cells], "writes", "writes")
        for actor, reads in memory.reads.items():
            if actor != self._actors[access]:
                self._check(access, memory, reads[cells], "reads", "writes")
        memory.writes[cells] = access

    def last_uses(self, memory: Memory, actors: Sequence[int]) -> Clock:
        """Return the clock of the last accesses of these actors."""
        moment = np.zeros(MAX_ACTORS, np.int64)
        for last in (memory.writes, *memory.reads.values()):
            used = np.unique(last)
            np.maximum.at(moment, self._actors[used], self._times[used])
        moment[[actor for actor in range(MAX_ACTORS) if actor not in actors]] = 0
        return moment

    def _check(self, access: int, memory: Memory, before: np.ndarray, did: str, does: str) -> None:
        late = self._times[before] > self._clocks[self._actors[access]][self._actors[before]]
        if late.any():
            other = int(before[late][0])
            raise Race(
                f"{memory.name}: {self._who(access)} {does} what {self._who(other)} {did}, and neither waits for the "
                f"other\n  {self._where(access)}\n  {self._where(other)}"
            )

    def _who(self, access: int) -> str:
        return str(self._names[self._actors[access]])

    def _where(self, access: int) -> str:
        lines = [f"{code.co_filename.rpartition('/')[2]}:{line} {code.co_name}" for code, line in self._places[access]]
        return f"{self._who(access)}: " + ", from ".join(lines)


def here() -> Place:
    """Return the innermost lines of ours that are being run."""
    lines: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(lines) < 4:
        name = frame.f_code.co_filename
        if ("/penstock/" in name or "/tests/" in name) and not name.endswith(WATCHERS):
            lines.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def cells(
    memory: Memory, address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int
) -> slice | np.ndarray:
    """Return the cells that a strided piece of memory takes; strides in bytes."""
    run, starts = itemsize, np.array([address - memory.base])
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1 or stride == 0:
            continue
        if stride == run:
            run *= size
        else:
            starts = (starts[:, None] + np.arange(size) * stride).ravel()
    return runs(starts, run)


def runs(starts: np.ndarray, size: int) -> slice | np.ndarray:
    """Return the cells of runs of `size` bytes each."""
    if len(starts) == 1:
        return slice(int(starts[0]) // GRAIN, -(-(int(starts[0]) + size) // GRAIN))
    is_even = size % GRAIN == 0 and not (starts % GRAIN).any()
    return (starts[:, None] // GRAIN + np.arange(size // GRAIN if is_even else size // GRAIN + 2)).ravel()

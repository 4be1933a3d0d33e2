"""A shared-memory queue through which one writer sends N readers on the same machine all messages in the same order.

The engine core sends steps to its workers with it. The parts of a message are out-of-band buffers: bytes that are sent
as they are, such as a kind, an encoded step, or the rows of a mask. They lie in memory that all processes map
(memory_segment.py). A buffer is copied once, by the writer; readers borrow it in place.

    line WRITER    count: messages published · pid, start · bell: futex that readers wait on
    line FREED     bell: futex that the writer waits on until readers have finished
    line reader r  count: messages finished · busy: the message being read · pid, start
    ───────────────────────────────────────────────────────────────────────────────────── only the writer writes below
    slot 0         header 64 bytes: number · area · number of buffers · their sizes
                   buffer 0 · buffer 1 · … (each begins at a multiple of 64 bytes)
    slot 1         …
    spill 0, 1     the buffers of a message that is larger than a slot; its header is in a slot, too.
                   Addresses for 1 GiB each, memory only as messages have needed it

Message n lies in slot (n - 1) mod slots. It is written when every reader has finished message n - slots. Then a single
store sets the writer's count to n, so a writer that dies has sent a message either completely or not at all. The same
holds for a reader's count. Counts only grow and each has one owner, so no crash leaves a lock held or a slot half
owned; csrc/ring.c documents the order of the stores. `send` returns when the last byte is copied, on every path, so the
sent buffers may be overwritten at once.

A ring connects a parent with workers of the same user that have its handle; the memory has no name that others could
open, and readers cannot write messages. Messages have no checksum, because they never leave the machine's memory.
"""

import contextlib
import math
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Self

from penstock._csrc import ffi, lib
from penstock.executor.ring.memory_segment import (
    ATTACHED,
    FIRST_READER,
    FREED,
    LEFT,
    LINE,
    MAX_MESSAGE_BYTES,
    MAX_READERS,
    NUM_SPILLS,
    WRITER,
    RingHandle,
    Segment,
    padded,
)  # fmt: skip

MAX_PARTS = 5
HEADER = struct.Struct(f"<{3 + MAX_PARTS}Q")  # number, area (0: behind the header, else 1 + spill), parts, part sizes
assert HEADER.size == LINE
CHECK_S = 0.25  # how often a waiting process checks that the others are alive
LONGEST_SPIN_NS = 1_000_000  # while messages arrive at short intervals
SHORTEST_SPIN_NS = 20_000  # otherwise: about the cost of sleeping and waking up
CLOSE_WAIT_S = 1.0  # for the thread that close() has interrupted


class RingClosed(ConnectionError):
    """Raised when this end was closed, or the other end closed in good order."""


class PeerDied(ConnectionError):
    """Raised when the process at the other end has died."""


class MessageQueue:
    """One end of the ring: the writer's from `create`, a reader's from `attach`. Threads call it one at a time."""

    def __init__(self, segment: Segment, reader: int | None) -> None:
        self._segment, self._reader = segment, reader
        self._line = WRITER if reader is None else FIRST_READER + reader
        self._count = 0  # messages that this end has sent or finished reading
        self._lock = threading.RLock()
        self._is_borrowed = False
        self._closed = ffi.new("int *")  # read by the C code while it waits
        self._spilled = [0] * NUM_SPILLS  # the last message in each spill area
        self._checked_s = time.monotonic()
        self._spin_ns = SHORTEST_SPIN_NS

    @classmethod
    def create(cls, num_readers: int, *, slots: int, slot_bytes: int) -> "MessageQueue":
        assert 1 <= num_readers <= MAX_READERS and slots >= 1 and 1 <= slot_bytes <= MAX_MESSAGE_BYTES
        return cls(Segment.create(num_readers, slots, slot_bytes), None)

    @classmethod
    def attach(cls, handle: RingHandle, reader: int) -> "MessageQueue":
        """Open the ring as reader number `reader`, which can be claimed once. Earlier messages are still available."""
        if not 0 <= reader < handle.num_readers:
            raise ValueError(f"reader: {reader} given, the ring has readers 0 to {handle.num_readers - 1}")
        segment = Segment.attach(handle)
        if not segment.claim(FIRST_READER + reader):
            owner = segment.owner(FIRST_READER + reader)
            segment.close()
            raise ValueError(f"reader: {reader} is or was process {owner.pid} already")
        return cls(segment, reader)

    def handle(self) -> RingHandle:
        return self._segment.handle

    def send(self, parts: Sequence[Any], timeout_s: float | None = None) -> None:
        """Send the parts as out-of-band buffers, waiting for a free slot: bytes, memoryviews or contiguous arrays.

        Everything has been copied when this returns.
        """
        assert self._reader is None, "readers do not send"
        deadline = Deadline(timeout_s)
        views = [_as_bytes(part) for part in parts]
        self._take_turn(deadline)
        try:
            number = self._count + 1
            if time.monotonic() - self._checked_s > CHECK_S:
                self._check_readers()
            self._write(views, number, deadline)
            self._count = number
            lib.penstock_ring_post(self._segment.lines, WRITER, WRITER, number)
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def borrow(self, timeout_s: float | None = None) -> Iterator[list[memoryview]]:
        """Yield the buffers of the next message as read-only views into the ring, which are invalid after the block."""
        assert self._reader is not None, "the writer does not receive"
        deadline = Deadline(timeout_s)
        self._take_turn(deadline)
        try:
            assert not self._is_borrowed, "the previous message is still borrowed"
            self._wait(WRITER, WRITER, 1, self._count + 1, deadline)
            self._is_borrowed = True
            try:
                yield self._read()
            finally:  # frees the message's slot, even if its reader has failed
                self._is_borrowed = False
                self._count += 1
                lib.penstock_ring_post(self._segment.lines, self._line, FREED, self._count)
        finally:
            self._lock.release()

    def recv(self, timeout_s: float | None = None) -> list[bytes]:
        """Return copies of the buffers of the next message."""
        with self.borrow(timeout_s) as parts:
            return [bytes(part) for part in parts]

    def close(self) -> None:
        """End every waiting call in other threads of this process. Readers still receive what was sent before."""
        if self._closed[0]:
            return
        self._closed[0] = 1
        self._segment.leave(self._line)
        for bell in (WRITER, FREED):
            lib.penstock_ring_wake(self._segment.lines, bell)
        if self._lock.acquire(timeout=CLOSE_WAIT_S):
            self._lock.release()
            self._segment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self) -> None:
        """Assert the invariants that hold at any time, whatever other processes are doing."""
        handle = self._segment.handle
        done = [self._segment.count(FIRST_READER + reader) for reader in range(handle.num_readers)]
        sent = self._segment.count(WRITER)
        assert max(done) <= sent, f"a reader has finished {max(done)} of {sent} messages"
        if self._reader is None:
            assert sent == self._count and sent - min(done) <= handle.slots, (sent, self._count, done)
            assert all(spilled <= sent for spilled in self._spilled), (self._spilled, sent)
        else:
            assert done[self._reader] == self._count, (done, self._count)

    def _write(self, parts: list[memoryview], number: int, deadline: "Deadline") -> None:
        segment = self._segment
        sizes = [part.nbytes for part in parts]
        size = sum(map(padded, sizes))
        if size > MAX_MESSAGE_BYTES or len(parts) > MAX_PARTS:
            raise ValueError(
                f"message: {len(parts)} parts of {size} bytes given, at most {MAX_PARTS} of {MAX_MESSAGE_BYTES} can be sent"
            )
        needed, spill = number - segment.handle.slots, None
        if size > segment.stride - LINE:
            spill = self._free_spill()
            needed = max(needed, self._spilled[spill])
        self._wait(FREED, FIRST_READER, segment.handle.num_readers, needed, deadline)
        self._shrink_spills(spill)
        slot = segment.slot(number)
        area, at = 0, slot + LINE
        if spill is not None:
            segment.commit_spill(spill, size)
            self._spilled[spill] = number
            area, at = 1 + spill, segment.spill(spill)
        segment.set_busy(WRITER, number)
        HEADER.pack_into(segment.data, slot, number, area, len(parts), *sizes, *(0,) * (MAX_PARTS - len(parts)))
        for part, part_size in zip(parts, sizes, strict=True):
            segment.data[at : at + part_size] = part
            at += padded(part_size)

    def _free_spill(self) -> int:
        """Return the first spill area that all have read, as it is in the caches; else the one to be read first."""
        finished = self._finished()
        free = (spill for spill, last in enumerate(self._spilled) if last <= finished)
        return next(free, min(range(NUM_SPILLS), key=self._spilled.__getitem__))

    def _shrink_spills(self, in_use: int | None) -> None:
        """Free the memory of huge messages, which are rare, once they have been read."""
        for spill in self._segment.large_spills():
            if spill != in_use and self._finished() >= self._spilled[spill]:
                self._segment.shrink_spill(spill)

    def _finished(self) -> int:
        """Return the last message that every reader has finished."""
        return min(self._segment.count(FIRST_READER + reader) for reader in range(self._segment.handle.num_readers))

    def _read(self) -> list[memoryview]:
        segment, expected = self._segment, self._count + 1
        segment.set_busy(self._line, expected)
        slot = segment.slot(expected)
        number, area, num_parts, *sizes = HEADER.unpack_from(segment.data, slot)
        assert number == expected, f"message {number} lies where message {expected} is due"
        at = segment.spill(area - 1) if area else slot + LINE
        parts = []
        for size in sizes[:num_parts]:
            parts.append(segment.data[at : at + size])
            at += padded(size)
        return parts

    def _take_turn(self, deadline: "Deadline") -> None:
        """Acquire the lock, which admits one thread at a time, and none once the ring is closed."""
        while not self._lock.acquire(timeout=deadline.left_s()):
            self._refuse_closed()
            if deadline.is_over():
                raise TimeoutError(f"another thread kept this end of the ring for {deadline.timeout_s} s")
        try:
            self._refuse_closed()
        except RingClosed:
            self._lock.release()
            raise

    def _refuse_closed(self) -> None:
        if self._closed[0]:
            raise RingClosed("the ring was closed at this end")

    def _wait(self, bell: int, first: int, number: int, target: int, deadline: "Deadline") -> None:
        """Wait until `number` lines from `first` on have reached the count `target`."""
        if target <= 0:
            return
        began_ns = time.monotonic_ns()
        while True:
            left_s = deadline.left_s()
            spin_ns = min(self._spin_ns, int(left_s * 1e9))
            found = lib.penstock_ring_wait(
                self._segment.lines, bell, first, number, target, spin_ns, int(left_s * 1e9) - spin_ns,
                self._closed,
            )  # fmt: skip
            self._refuse_closed()
            if found >= 0:
                self._tune(0 if found == 0 else time.monotonic_ns() - began_ns)
                return
            if self._reader is None:
                self._check_readers()
            else:
                self._check_writer(target)
            if deadline.is_over():
                raise TimeoutError(self._slowness(target, deadline.timeout_s))

    def _tune(self, waited_ns: int) -> None:
        """Adapt the spin time: a worker that computes for 10 ms per step soon hardly spins."""
        is_short = waited_ns <= LONGEST_SPIN_NS
        self._spin_ns = LONGEST_SPIN_NS if is_short else max(self._spin_ns // 2, SHORTEST_SPIN_NS)

    def _check_readers(self) -> None:
        self._checked_s = time.monotonic()
        for reader in range(self._segment.handle.num_readers):
            state = self._segment.state(FIRST_READER + reader)
            if state == LEFT:
                raise RingClosed(f"{self._named(reader)} has closed its end; {self._doings(reader)}")
            if state == ATTACHED and not self._segment.owner(FIRST_READER + reader).is_alive:
                raise PeerDied(f"{self._named(reader)} has died; {self._doings(reader)}")

    def _check_writer(self, target: int) -> None:
        """Raise if the writer has left or died, unless it has sent message `target` before."""
        has_left = self._segment.state(WRITER) == LEFT
        is_alive = self._segment.owner(WRITER).is_alive
        sent = self._segment.count(WRITER)
        if sent >= target:
            return
        if has_left:
            raise RingClosed(f"the writer has closed the ring after message {sent}")
        if not is_alive:
            at = self._segment.busy(WRITER)
            doing = f"while it wrote message {at}" if at > sent else f"after message {sent}"
            raise PeerDied(f"the writer (process {self._segment.owner(WRITER).pid}) has died {doing}")

    def _slowness(self, target: int, timeout_s: float | None) -> str:
        if self._reader is not None:
            return f"reader {self._reader} waited {timeout_s} s for message {target}; the writer is alive"
        readers = range(self._segment.handle.num_readers)
        late = [reader for reader in readers if self._segment.count(FIRST_READER + reader) < target]
        whose = "; ".join(f"{self._named(reader)} {self._doings(reader)}" for reader in late)
        return f"message {self._count + 1} waited {timeout_s} s for a free slot: {whose}"

    def _named(self, reader: int) -> str:
        return f"rank {reader} (process {self._segment.owner(FIRST_READER + reader).pid})"

    def _doings(self, reader: int) -> str:
        line = FIRST_READER + reader
        done, at = self._segment.count(line), self._segment.busy(line)
        if self._segment.state(line) not in (ATTACHED, LEFT):
            return "has not attached yet"
        of = f"of {self._segment.count(WRITER)}"
        return f"it was reading message {at} {of}" if at > done else f"it had finished message {done} {of}"


class Deadline:
    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self._at_s = math.inf if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the time to wait until the next check of the other processes."""
        return min(CHECK_S, max(0.0, self._at_s - time.monotonic()))

    def is_over(self) -> bool:
        return self._at_s <= time.monotonic()


def _as_bytes(part: Any) -> memoryview:
    """Return a view of the part's bytes; raise TypeError if they are not contiguous."""
    view = memoryview(part)
    if not view.nbytes:
        return memoryview(b"")
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")

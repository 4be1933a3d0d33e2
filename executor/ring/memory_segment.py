"""The shared memory segment of the ring: creating it, opening it from other processes, its layout and its owners.

It knows nothing of messages (executor/ring/queue.py). The memory is a memfd: it has no name, so nothing can be left
behind; the size of /dev/shm does not matter; and it is freed with the last process that maps it, however that ends.
Other processes of the same user open it through /proc/<pid>/fd, even if they are not children. It is sealed against
shrinking and committed before use, so no access can end in SIGBUS.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock._csrc import ffi, lib
from penstock.executor.machine import available_memory

LINE = 64  # a cache line; everything in the segment is aligned to it
PAGE = mmap.PAGESIZE
# The largest mask: 4,096 rows × 262,144 tokens / 8 = 128 MiB, times up to eight positions per row with draft tokens.
MAX_MESSAGE_BYTES = 1 << 30
MAX_READERS = 256  # several per GPU of the largest existing node
NUM_SPILLS = 2  # so that a large message can be written while the previous one is still being read
SPILL_KEEP_BYTES = 64 << 20  # kept of each spill area; the mask of 1,024 rows of 152k tokens takes 19.4 MB

ABSENT, CLAIMED, ATTACHED, LEFT = range(4)  # states of a line
WRITER, FREED, FIRST_READER = 0, 1, 2  # indices of lines
_PREFACE = 64  # bytes before the lines, with a secret that identifies the segment
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # madvise constants of Linux 5.14 that Python does not define


class RingHandle(msgspec.Struct, frozen=True):
    """The data that a reader needs, for processes of the same user on the same machine."""

    pid: int
    fd: int
    secret: bytes
    num_readers: int
    slots: int
    slot_bytes: int


class Owner(NamedTuple):
    """A process, identified beyond reuse of its id."""

    pid: int
    start: int  # in clock ticks after boot, because process ids are reused

    @property
    def is_alive(self) -> bool:
        return _start_of(self.pid) == self.start


class Segment:
    """The mapped memory of one process: lines that all processes may write, and messages that only the writer may."""

    def __init__(self, fd: int, handle: RingHandle, is_writer: bool) -> None:
        self.handle, self._fd, self._is_writer = handle, fd, is_writer
        self.stride = LINE + padded(handle.slot_bytes)
        self._slots_bytes = padded(handle.slots * self.stride, PAGE)
        self._control = mmap.mmap(fd, _control_bytes(handle))
        access = mmap.PROT_READ | (mmap.PROT_WRITE if is_writer else 0)
        self._data = mmap.mmap(fd, _data_bytes(handle), mmap.MAP_SHARED, access, offset=_control_bytes(handle))
        with contextlib.suppress(OSError):  # only avoids page faults of the first messages
            self._data.madvise(_POPULATE_WRITE if is_writer else _POPULATE_READ, 0, self._slots_bytes)
        self.data = memoryview(self._data)
        self.base = int(ffi.cast("uintptr_t", ffi.from_buffer(self._data)))
        self.lines = int(ffi.cast("uintptr_t", ffi.from_buffer(self._control))) + _PREFACE
        self._line = ffi.cast("struct penstock_ring_line *", self.lines)
        self._committed = [0] * NUM_SPILLS

    @classmethod
    def create(cls, num_readers: int, slots: int, slot_bytes: int) -> "Segment":
        if sys.platform != "linux":
            raise OSError("the shared-memory ring needs Linux; use executor 'uniproc'")
        fd = os.memfd_create("penstock-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            handle = RingHandle(os.getpid(), fd, secrets.token_bytes(16), num_readers, slots, slot_bytes)
            committed = _control_bytes(handle) + padded(slots * (LINE + padded(slot_bytes)), PAGE)
            os.ftruncate(fd, _control_bytes(handle) + _data_bytes(handle))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            _commit(fd, 0, committed, f"slots: {slots} of {slot_bytes} bytes")
            segment = cls(fd, handle, is_writer=True)
        except BaseException:
            os.close(fd)
            raise
        segment._control[: len(handle.secret)] = handle.secret
        assert segment.claim(WRITER)
        return segment

    @classmethod
    def attach(cls, handle: RingHandle) -> "Segment":
        path = f"/proc/{handle.pid}/fd/{handle.fd}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConnectionError(f"the ring of process {handle.pid} cannot be opened: {error}") from error
        try:
            if os.fstat(fd).st_size != _control_bytes(handle) + _data_bytes(handle):
                raise ConnectionError(f"{path} is not the ring of this handle: its process has ended")
            segment = cls(fd, handle, is_writer=False)
        finally:
            os.close(fd)  # the mappings keep the memory
        if segment._control[: len(handle.secret)] != handle.secret:
            segment.close()
            raise ConnectionError(f"{path} is not the ring of this handle: its process has ended")
        return segment

    def claim(self, line: int) -> bool:
        """Make this process the owner of a line; return False if the line has or had an owner."""
        if lib.penstock_ring_change(self.lines, line, ABSENT, CLAIMED) != ABSENT:
            return False
        self._line[line].pid, self._line[line].start = os.getpid(), _start_of(os.getpid()) or 0
        return bool(lib.penstock_ring_change(self.lines, line, CLAIMED, ATTACHED) == CLAIMED)

    def leave(self, line: int) -> None:
        lib.penstock_ring_change(self.lines, line, ATTACHED, LEFT)

    def state(self, line: int) -> int:
        return int(self._line[line].state)

    def owner(self, line: int) -> Owner:
        return Owner(int(self._line[line].pid), int(self._line[line].start))

    def count(self, line: int) -> int:
        return int(lib.penstock_ring_count(self.lines, line))

    def busy(self, line: int) -> int:
        return int(self._line[line].busy)

    def set_busy(self, line: int, number: int) -> None:
        self._line[line].busy = number

    def slot(self, number: int) -> int:
        """Return the offset of the header of message `number`, counted from 1, relative to `data` and `base`."""
        return (number - 1) % self.handle.slots * self.stride

    def spill(self, index: int) -> int:
        return self._slots_bytes + index * MAX_MESSAGE_BYTES

    def commit_spill(self, index: int, size: int) -> None:
        """Ensure that the spill area has memory for `size` bytes."""
        size = padded(size, PAGE)
        if size > self._committed[index]:
            _commit(self._fd, _control_bytes(self.handle) + self.spill(index), size, f"a message of {size} bytes")
            self._committed[index] = size

    def large_spills(self) -> list[int]:
        return [index for index, size in enumerate(self._committed) if size > SPILL_KEEP_BYTES]

    def shrink_spill(self, index: int) -> None:
        """Free the memory of a spill area beyond the part that is kept; all readers must have read it."""
        excess = self._committed[index] - SPILL_KEEP_BYTES
        self._data.madvise(mmap.MADV_REMOVE, self.spill(index) + SPILL_KEEP_BYTES, excess)
        self._committed[index] = SPILL_KEEP_BYTES

    def close(self) -> None:
        """Close the segment. The mappings stay until the last borrowed array in them is gone."""
        if self._is_writer:
            os.close(self._fd)
        with contextlib.suppress(BufferError):
            self.data.release()
        for area in (self._data, self._control):
            with contextlib.suppress(BufferError):
                area.close()


def padded(size: int, grain: int = LINE) -> int:
    return -(-size // grain) * grain


def _control_bytes(handle: RingHandle) -> int:
    return padded(_PREFACE + (FIRST_READER + handle.num_readers) * LINE, PAGE)


def _data_bytes(handle: RingHandle) -> int:
    """Return the size of the data mapping. Spill areas take addresses, and memory only once a message needs them."""
    return padded(handle.slots * (LINE + padded(handle.slot_bytes)), PAGE) + NUM_SPILLS * MAX_MESSAGE_BYTES


def _commit(fd: int, offset: int, size: int, purpose: str) -> None:
    """Make the kernel reserve memory now; otherwise it would kill a process later."""
    free = available_memory()
    if size > free:
        raise MemoryError(f"{purpose}: the ring needs {size >> 20} MiB of shared memory, {free >> 20} MiB are free")
    try:
        os.posix_fallocate(fd, offset, size)
    except OSError as error:
        raise MemoryError(f"{purpose}: the ring gets no {size >> 20} MiB of shared memory: {error}") from error


def _start_of(pid: int) -> int | None:
    """Return the start time of a living process; None if it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])

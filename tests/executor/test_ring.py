"""The shared-memory ring: messages arrive whole, a wait can be stopped, and an error names a process that died."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.executor.ring import MessageQueue, PeerDied, RingClosed
from penstock.executor.ring.memory_segment import SPILL_KEEP_BYTES
from penstock.executor.ring.queue import MAX_PARTS
from tests.support.programs import printed
from tests.support.refusals import cases

SLOT = 4096
PATIENCE_S = 60.0  # long enough for a busy machine; nothing below waits for it to pass


@contextmanager
def ring(num_readers: int = 1, slots: int = 3, slot_bytes: int = SLOT) -> Iterator[tuple[MessageQueue, ...]]:
    """Open a writer and readers, all in this process."""
    with ExitStack() as stack:
        writer = stack.enter_context(MessageQueue.create(num_readers, slots=slots, slot_bytes=slot_bytes))
        handle = writer.handle()
        yield writer, *(stack.enter_context(MessageQueue.attach(handle, reader)) for reader in range(num_readers))


def received(reader: MessageQueue, timeout_s: float | None = PATIENCE_S) -> list[bytes]:
    """Return copies of the buffers of the next message, which comes soon even on a busy machine."""
    return reader.recv(timeout_s)


def fork(job: Callable[..., None], *arguments: Any) -> int:
    """Run a job in a child process that ends with it; return its id."""
    pid = os.fork()
    if pid == 0:
        try:
            job(*arguments)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def forked(job: Callable[..., None], *arguments: Any) -> Iterator[tuple[int, Callable[[], bytes]]]:
    """Run a job in a child process that the block kills; yield its id, and a function that reads the bytes it sends.

    The job gets the arguments and the file descriptor to which it writes."""
    read_end, write_end = os.pipe()
    child = fork(job, *arguments, write_end)
    yield child, lambda: os.read(read_end, 1000)
    assert ended(child) == -signal.SIGKILL
    os.close(read_end)
    os.close(write_end)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, SLOT - 1, SLOT, SLOT + 1, 3 * SLOT, 1_000_003])
def test_parts_of_any_size_and_kind_arrive_whole(size: int) -> None:
    content = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    with ring(2) as (writer, *readers):
        for _ in range(7):  # round the ring twice, and through both spills
            writer.send(
                (content, content.tobytes(), bytearray(content), memoryview(content.tobytes()), b"end"), PATIENCE_S
            )
            for reader in readers:
                assert received(reader) == [content.tobytes()] * 4 + [b"end"]
                reader.check()
            writer.check()


@pytest.mark.parametrize("parts", [1, 2, MAX_PARTS])
def test_messages_that_just_fit_their_slot_and_just_do_not_arrive(parts: int) -> None:
    with ring() as (writer, reader):
        for size in range(SLOT // parts - 130, SLOT // parts + 130):
            sent = [bytes([part]) * size for part in range(parts)]
            writer.send(sent, PATIENCE_S)
            assert received(reader) == sent


@pytest.mark.parametrize("array", cases(__file__, "arrays in a ring", np=np))
def test_borrowed_arrays_of_any_dtype_lie_in_the_ring_and_cannot_be_written(array: np.ndarray) -> None:
    with ring() as (writer, reader):
        writer.send((b"kind", array))
        start = np.frombuffer(reader._segment.data, np.uint8).ctypes.data
        with reader.borrow(PATIENCE_S) as (kind, part):
            got = np.frombuffer(part, array.dtype).reshape(array.shape)
            assert bytes(kind) == b"kind" and (got == array).all() and not got.flags.writeable
            assert not got.size or (got.ctypes.data % 64 == 0 and start <= got.ctypes.data < start + 3 * SLOT * 2)
            with pytest.raises(AssertionError, match="still borrowed"), reader.borrow():
                pass


def test_refused_messages_leave_the_ring_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is refused for an array with gaps, for too many parts, and for too many bytes."""
    monkeypatch.setattr("penstock.executor.ring.queue.MAX_MESSAGE_BYTES", 100_000)
    with ring() as (writer, reader):
        with pytest.raises(ValueError, match="1 parts of 100224 bytes given, at most 5 of 100000"):
            writer.send((b"x" * 100_200,))
        with pytest.raises(TypeError, match="contiguous"):
            writer.send((np.arange(10)[::2],))
        with pytest.raises(ValueError, match=f"message: {MAX_PARTS + 1} parts of 0 bytes given, at most {MAX_PARTS}"):
            writer.send([b""] * (MAX_PARTS + 1))
        writer.send((b"next",))
        assert received(reader) == [b"next"]


@pytest.mark.parametrize("size", [3000, 100_000])  # in the slot, and in a spill
def test_the_buffers_of_a_message_may_be_overwritten_once_it_is_sent(size: int) -> None:
    mask, rows = np.zeros(size, np.uint8), np.zeros(size // 8, np.int32)
    with ring(slots=8) as (writer, reader):
        for value in range(1, 101):
            mask[:] = rows[:] = value
            writer.send((mask, rows), PATIENCE_S)
            mask[:], rows[:] = 255, -1
            with reader.borrow(PATIENCE_S) as parts:
                assert (np.frombuffer(parts[0], np.uint8) == value).all()
                assert (np.frombuffer(parts[1], np.int32) == value).all()


def test_a_reader_that_fails_frees_the_slot() -> None:
    with ring() as (writer, reader):
        for number in range(10):
            writer.send((b"%d" % number,), PATIENCE_S)
            with pytest.raises(ZeroDivisionError), reader.borrow(PATIENCE_S):
                raise ZeroDivisionError
            writer.send((b"next",), PATIENCE_S)
            assert received(reader) == [b"next"]


def test_the_memory_of_a_rare_huge_message_is_given_back() -> None:
    with ring() as (writer, reader):
        for size in (SPILL_KEEP_BYTES + (8 << 20), 10, 10):
            writer.send((b"x" * size,))
            assert len(received(reader)[0]) == size
        assert max(writer._segment._committed) <= SPILL_KEEP_BYTES


def test_more_memory_than_there_is_is_refused_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match=r"slots: 4096 of 1073741824 bytes: the ring needs 4194\d+ MiB"):
        MessageQueue.create(1, slots=4096, slot_bytes=1 << 30)
    monkeypatch.setattr("os.posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(MemoryError, match="No space left on device"):
        MessageQueue.create(1, slots=3, slot_bytes=SLOT)


def test_a_reader_can_be_taken_once_and_must_exist_and_so_must_the_ring() -> None:
    with ring() as (writer, _):
        handle = writer.handle()
        with pytest.raises(ValueError, match=f"reader: 0 is or was process {os.getpid()}"):
            MessageQueue.attach(writer.handle(), 0)
        with pytest.raises(ValueError, match="reader: 1 given, the ring has readers 0 to 0"):
            MessageQueue.attach(writer.handle(), 1)
    with pytest.raises(ConnectionError, match="cannot be opened|is not the ring"):
        MessageQueue.attach(handle, 0)


def test_a_process_that_is_no_child_gets_it_pickled() -> None:
    script = (
        "import pickle, sys; from penstock.executor.ring import MessageQueue\n"
        "with MessageQueue.attach(pickle.loads(bytes.fromhex(sys.argv[1])), 0).borrow(20) as (part,):\n"
        "    print(bytes(part).decode())"
    )
    with MessageQueue.create(1, slots=3, slot_bytes=SLOT) as writer:
        writer.send((b"hello",))
        assert printed(script, pickle.dumps(writer.handle()).hex()) == "hello"


@pytest.mark.parametrize("timeout_s", [0.0, 0.05])
def test_both_sides_give_up_when_their_time_is_over(timeout_s: float) -> None:
    with ring(2, slots=2) as (writer, first, second):
        with pytest.raises(TimeoutError, match=f"reader 0 waited {timeout_s} s for message 1"):
            received(first, timeout_s)
        for number in range(2):
            writer.send((b"%d" % number,))
            received(first)
        received(second)
        writer.send((b"2",))
        with pytest.raises(
            TimeoutError, match=rf"message 4 waited {timeout_s} s for a free slot: rank 1 .* finished message 1"
        ):
            writer.send((b"3",), timeout_s)
        assert received(second, 0) == [b"1"]  # and nothing is lost by it
        received(first, 0)
        writer.send((b"3",), 0)
        assert [received(second, 0), received(second, 0)] == [[b"2"], [b"3"]]


@pytest.mark.parametrize("side", ["writer", "reader"])
def test_closing_an_end_that_waits_ends_its_wait(side: str) -> None:
    """A writer waits for room, a reader for a message."""
    with ring(slots=1) as (writer, reader):
        end = writer if side == "writer" else reader
        if end is writer:
            writer.send((b"0",))
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(lambda: writer.send((b"1",)) if end is writer else received(reader, None))
            while not writer._segment._line[1 if end is writer else 0].sleepers:  # until it sleeps on its bell
                time.sleep(0.001)
            end.close()
            assert isinstance(waiting.exception(PATIENCE_S), RingClosed)


def test_two_threads_on_one_end_share_its_messages() -> None:
    with ring(slots=4) as (writer, reader), ThreadPoolExecutor() as pool:
        halves = [pool.submit(lambda: [int(received(reader)[0]) for _ in range(200)]) for _ in range(2)]
        for number in range(400):
            writer.send((b"%d" % number,), PATIENCE_S)
        assert sorted(number for half in halves for number in half.result()) == list(range(400))


def test_a_reader_gets_what_was_sent_before_the_writer_closed() -> None:
    with ring() as (writer, reader):
        writer.send((b"1",))
        writer.send((b"x" * 100_000,))  # in a spill
        writer.close()
        assert received(reader) == [b"1"] and len(received(reader)[0]) == 100_000
        with pytest.raises(RingClosed, match="the writer has closed the ring after message 2"):
            received(reader)


def test_a_writer_that_waits_is_told_that_a_reader_has_closed() -> None:
    with ring(2, slots=1) as (writer, first, second):
        writer.send((b"0",))
        received(first)
        second.close()
        with pytest.raises(RingClosed, match=r"rank 1 .* has closed its end; it had finished message 0 of 1"):
            writer.send((b"1",))


def _write_for_ever(write_end: int) -> None:
    writer = MessageQueue.create(1, slots=3, slot_bytes=SLOT)
    os.write(write_end, pickle.dumps(writer.handle()))
    content = np.empty(20_000, np.uint8)
    for number in range(1 << 40):
        size = (number * 977) % 20_000
        content[:size] = number % 256
        writer.send((b"%d" % number, content[:size]))


def read_until_the_writer_is_killed(delay_s: float) -> int:
    """Check every message that arrives, and the error that names the last one; return how many arrived."""
    with forked(_write_for_ever) as (child, sent), MessageQueue.attach(pickle.loads(sent()), 0) as reader:
        killer = threading.Timer(delay_s, os.kill, (child, signal.SIGKILL))
        killer.start()
        count = 0
        with pytest.raises(PeerDied) as caught:
            while True:
                number, content = received(reader)
                assert int(number) == count and content == bytes([count % 256]) * ((count * 977) % 20_000)
                count += 1
    killer.join()
    died = f"the writer (process {child}) has died"
    assert str(caught.value) in (f"{died} after message {count}", f"{died} while it wrote message {count + 1}")
    return count


@pytest.mark.parametrize(("kills", "least"), [(3, 3), pytest.param(2000, 100_000, marks=pytest.mark.soak)])
def test_a_writer_killed_at_any_moment_tears_no_message(kills: int, least: int) -> None:
    rng = np.random.default_rng(1)
    assert sum(read_until_the_writer_is_killed(rng.uniform(0.0, 0.05)) for _ in range(kills)) > least


def _read_in_order(handle: Any, reader: int, count: int) -> None:
    with MessageQueue.attach(handle, reader) as queue:
        for number in range(count):
            sent, content = received(queue)
            assert int(sent) == number and content == number.to_bytes(8, "little") * (number % 40)


@pytest.mark.parametrize("count", [5_000, pytest.param(10_000_000, marks=pytest.mark.soak)])
def test_messages_keep_their_order_and_content(count: int) -> None:
    with MessageQueue.create(2, slots=8, slot_bytes=256) as writer:
        children = [fork(_read_in_order, writer.handle(), reader, count) for reader in range(2)]
        for number in range(count):
            writer.send((b"%d" % number, number.to_bytes(8, "little") * (number % 40)), PATIENCE_S)
        assert [ended(child) for child in children] == [0, 0]


def _read_and_stall(handle: Any, write_end: int) -> None:
    reader = MessageQueue.attach(handle, 1)
    received(reader)
    with reader.borrow(PATIENCE_S):
        os.write(write_end, b"!")
        signal.pause()


def test_a_killed_reader_is_named_with_what_it_did() -> None:
    with (
        MessageQueue.create(2, slots=2, slot_bytes=SLOT) as writer,
        MessageQueue.attach(writer.handle(), 0) as first,
        forked(_read_and_stall, writer.handle()) as (child, sent),
    ):
        for number in range(2):
            writer.send((b"%d" % number,))
            received(first)
        assert sent() == b"!"
        os.kill(child, signal.SIGKILL)
        with pytest.raises(PeerDied, match=rf"rank 1 \(process {child}\) has died; it was reading message 2 of"):
            while True:
                writer.send((b"2",))
                received(first)

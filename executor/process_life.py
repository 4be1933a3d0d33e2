"""Starts child processes, ends them in order, and makes sure that they do not outlive their parent.

`start_child` runs one of our modules as a child (executor/child_main.py); the module's main function calls `begin`. A
socket pair, the channel, connects the two: it carries the start message and the heartbeats, and its closing tells one
end that the other process has ended. A child ignores SIGTERM and SIGINT, because only its parent ends it.
`stop_signals` and `Stopping` are for the process that a user starts.

`python -m penstock.executor.process_life PARENT COMMAND…` executes COMMAND, tied to process PARENT. It serves callers
with many threads, where no Python code may run between fork and exec.
"""

import asyncio
import contextlib
import faulthandler
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Generic, TypeVar

import msgspec

from penstock.executor.child_main import die_with, leave
from penstock.executor.logs import log_to_stderr

HEARTBEAT_S = 1.0
EXIT_S = 3.0  # maximum time between the closing of a process's socket and its exit status, on a busy machine
STALL_S = 8  # a child that stops in the middle of a message, or does not read for this long, counts as dead
LOOK_S = 0.1  # polling interval of `wait_for`
CHILD_MAIN = "penstock.executor.child_main"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

Message = TypeVar("Message")
Start = TypeVar("Start", bound=msgspec.Struct)


def send(channel: Connection, message: msgspec.Struct) -> None:
    """Send a message; only one thread at a time may do so."""
    channel.send_bytes(msgspec.msgpack.encode(message))


def receive(channel: Connection) -> bytes | None:
    """Wait for the next message and return it encoded; None if the channel closed or the sender stalled within one."""
    try:
        return channel.recv_bytes()
    except (EOFError, OSError):
        return None


class Channels(Generic[Message]):
    """Several channels that are polled together."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Message]) -> None:
        self._decoder = decoder
        self._channels: dict[int, Connection] = {}
        self._selector = selectors.DefaultSelector()

    def add(self, index: int, channel: Connection) -> None:
        self._channels[index] = channel
        self._selector.register(channel, selectors.EVENT_READ, index)

    def fileno(self) -> int:
        return self._selector.fileno()

    def receive(self, timeout_s: float | None = None) -> Iterator[tuple[int, Message | None]]:
        """Wait for messages and yield (index, message) for each readable channel; the message is None if it closed."""
        for key, _ in self._selector.select(timeout_s):
            message = receive(self._channels[key.data])
            if message is None:
                self._selector.unregister(key.fileobj)
                self._channels.pop(key.data).close()
            yield key.data, None if message is None else self._decoder.decode(message)

    def close(self) -> None:
        self._selector.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


class ChildProcess:
    """A child process and the channel to it."""

    def __init__(self, role: str, popen: subprocess.Popen[bytes], channel: Connection) -> None:
        self._popen, self.channel = popen, channel
        self.pid = popen.pid
        self.name = f"{role} (process {popen.pid})"

    def dump_stacks(self) -> None:
        """Make the child print the stacks of its threads to its standard error."""
        self._popen.send_signal(signal.SIGUSR1)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the child to end; return whether it has ended within the timeout."""
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> str | None:
        """Return how the child ended, as text; None while it is alive."""
        return ending(self._popen.returncode) if self.wait(EXIT_S) else None

    def kill(self) -> None:
        """Kill the child if it is alive, without waiting for its end."""
        self._popen.kill()


def start_child(module: str, role: str, start: msgspec.Struct, pass_fds: Sequence[int] = ()) -> ChildProcess:
    """Run the `main` of a module in a new process and send it `start`. Without -P it would import files of the current
    directory, which may be that of a downloaded model. If the child dies before it reads `start`, its channel closes."""
    ours, theirs = Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as end:  # a call to a stopped child must not block forever
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
    with theirs:
        # The kernel ties a child to the thread that started it; only the main thread lives as long as the process.
        is_tied = threading.current_thread() is threading.main_thread()
        popen = subprocess.Popen(
            [sys.executable, "-P", "-m", CHILD_MAIN, module, str(theirs.fileno()), str(os.getpid()), str(int(is_tied))],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *pass_fds),
        )
    child = ChildProcess(role, popen, ours)
    with contextlib.suppress(ConnectionError):
        send(ours, start)
    return child


def ending(code: int) -> str:
    """Describe a process's return code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def begin(kind: type[Start]) -> tuple[Start, Connection]:
    """Return the start message and the channel to the parent. From now on this process ignores stop signals sent to the
    whole process group, because the parent handles them."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    channel = Connection(int(sys.argv[1]))
    start = receive(channel)
    if start is None:
        leave()
    log_to_stderr()
    return msgspec.msgpack.decode(start, type=kind), channel


class Reporter:
    """Sends a process's reports, from any thread, and its heartbeats."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self.doing = "starting"  # the current activity, for heartbeats that include it
        self._send, self._lock = send, threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._send(message)

    def beat(self, heartbeat: Callable[[], msgspec.Struct]) -> None:
        """Report a heartbeat every second from a separate thread; end this process if the parent cannot be reached."""

        def run() -> None:
            while not self._is_over.wait(HEARTBEAT_S):
                try:
                    self.report(heartbeat())
                except OSError:
                    leave()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the heartbeats."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


@contextlib.contextmanager
def stop_signals(take: Callable[[], object], signals: Sequence[signal.Signals] = STOP_SIGNALS) -> Iterator[None]:
    """Call `take` on these signals within the context: in the event loop if one runs, else in the main thread."""
    try:
        loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
    except RuntimeError:
        loop = None
    with contextlib.ExitStack() as restoring:
        for number in signals:
            if loop is not None:
                loop.add_signal_handler(number, take)
                restoring.callback(loop.remove_signal_handler, number)
            else:
                restoring.callback(signal.signal, number, signal.signal(number, lambda *_: take()))
        yield


class Stopping:
    """Events set by stop signals: the first signal sets `drain`, the second `stop`, which ends without draining."""

    def __init__(self) -> None:
        self.drain, self.stop = asyncio.Event(), asyncio.Event()

    def take(self) -> None:
        (self.stop if self.drain.is_set() else self.drain).set()


async def wait_for(is_done: Callable[[], bool], end: asyncio.Event, timeout_s: float = float("inf")) -> None:
    """Wait until `is_done` returns true, `end` is set, or the timeout expires."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done() and not end.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(LOOK_S, left_s)):
                await end.wait()


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # the tie to the parent survives exec

"""The executor of several ranks on one machine: a process each, below this one.

Starting them is all there is here. They are told their steps through a shared-memory ring (executor/ring/queue.py), they
answer through socket pairs, executor/ranks/worker_watch.py watches them and executor/ranks/ranked.py runs steps over them.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec

from penstock.executor.protocol import ExecutorConfig, ExecutorError, step_deadline_s
from penstock.executor.ranks.ranked import RING_SLOTS, SLOT_BYTES, RankedExecutor
from penstock.executor.ranks.wire import Channel, FromWorker, Rendezvous, Start
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.ring.memory_segment import MAX_READERS
from penstock.executor.ring.queue import MessageQueue


def open_multiproc(
    config: ExecutorConfig,
    progress: Callable[[str], None] = lambda line: None,
    deadline_s: Callable[[int], float] = step_deadline_s,
) -> RankedExecutor:
    """Start all ranks side by side and wait until each has loaded its part of the model."""
    if config.tensor_parallel_size > MAX_READERS:
        raise ExecutorError(f"tensor_parallel_size: {config.tensor_parallel_size} given; at most {MAX_READERS} can be")
    ring = MessageQueue.create(config.tensor_parallel_size, slots=RING_SLOTS, slot_bytes=SLOT_BYTES)
    worker_watch = start_processes(config, ring.handle().pack())
    return RankedExecutor(worker_watch, ring, progress, deadline_s)


def start_processes(config: ExecutorConfig, ring: bytes) -> WorkerWatch:
    world = config.tensor_parallel_size
    workers: list[Process] = []
    channels: list[Channel] = []
    # The ranks meet at a port that is bound here and handed to the first, so nobody can take it in between.
    with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
        host, port = listener.getsockname()
        for rank in range(world):
            fds = (listener.fileno(),) if rank == 0 else ()
            process, channel = _spawn(rank, fds)
            workers.append(process)
            channels.append(channel)
            meet = Rendezvous(host, port, host, fds[0] if fds else None)
            channel.send(Start(config, rank, world, world, rank, meet, ring, rank))
    return WorkerWatch(list(workers), Sockets(channels))


def _spawn(rank: int, fds: tuple[int, ...]) -> tuple["Process", Channel]:
    ours, theirs = socket.socketpair()
    with theirs:
        # The kernel ties a child to the thread that started it, and only the main one surely lasts.
        is_tied = threading.current_thread() is threading.main_thread()
        arguments = [str(theirs.fileno()), str(os.getpid()), str(int(is_tied))]
        popen = subprocess.Popen(
            [sys.executable, "-m", "penstock.executor.ranks.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *fds),
        )
    return Process(rank, popen), Channel(ours)


class Process:
    """One rank's process."""

    def __init__(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        self._popen = popen
        self.pid = popen.pid
        self.name = f"rank {rank} (process {popen.pid})"

    def dump_stacks(self) -> None:
        self._popen.send_signal(signal.SIGUSR1)

    def wait(self, timeout_s: float) -> bool:
        try:
            self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def death(self) -> str | None:
        # Its socket closes a moment before the process can be waited for.
        if not self.wait(1.0):
            return None
        code = self._popen.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def kill(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()


class Sockets:
    """The ends of the workers' socket pairs that stay here."""

    def __init__(self, channels: list[Channel]) -> None:
        self._channels = dict(enumerate(channels))
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._epoll = select.epoll()
        for channel in channels:
            self._epoll.register(channel.socket, select.EPOLLIN)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def pump(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        for rank, channel in list(self._channels.items()):
            if channel.socket.fileno() not in ready:
                continue
            messages = channel.receive()
            if messages is None:
                self._epoll.unregister(channel.socket)
                self._channels.pop(rank).socket.close()
                yield rank, None
            else:
                for message in messages:
                    yield rank, self._decoder.decode(message)

    def close(self) -> None:
        for channel in self._channels.values():
            channel.socket.close()
        self._channels.clear()
        self._epoll.close()

"""The worker processes of one executor: started side by side, watched all the time, ended together.

It knows nothing of steps. Whatever goes wrong with a worker, at the start or later, the first call after it raises
one ExecutorError that names the rank, what it was at and, where there is one, the root cause: a rank that merely lost
its peers is never blamed while the one that died is known.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.wire import Beat, Channel, Done, Failed, FromWorker, Loaded, Progress, Start

BEAT_LIMIT_S = 8.0  # silent for so long, a worker is stopped or starved; it says something every second
START_BEAT_LIMIT_S = 60.0  # while it loads, long calls may hold the interpreter
CAUSE_GRACE_S = 0.5  # how long to listen for the cause after the first sign of a failure
STOP_GRACE_S = 5.0
STACKS_GRACE_S = 0.5  # for the workers to print where they are, before they are killed


@dataclass(slots=True)
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    heard_s: float = field(default_factory=time.monotonic)
    doing: str = "starting"
    loaded: Loaded | None = None
    failed: Failed | None = None
    is_gone: bool = False  # its socket has closed


class Crew:
    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._epoll = select.epoll()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._error: ExecutorError | None = None

    def start(self, config: ExecutorConfig, ring: bytes, world: int) -> None:
        """Start all ranks; they meet at a port that is bound here, so nobody else can take it in between."""
        with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
            for rank in range(world):
                fds = (listener.fileno(),) if rank == 0 else ()
                worker = self._spawn(rank, fds)
                host, port = listener.getsockname()
                worker.channel.send(Start(config, rank, world, host, port, fds[0] if fds else None, "lo", ring))

    def _spawn(self, rank: int, fds: tuple[int, ...]) -> Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            # The kernel ties a child to the thread that started it, and only the main one surely lasts.
            is_hard = threading.current_thread() is threading.main_thread()
            command = [sys.executable, "-m", "penstock.executor.worker", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                [*command, str(int(is_hard))], stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), *fds)
            )
        worker = Worker(rank, process, Channel(ours))
        self.workers.append(worker)
        self._epoll.register(ours, select.EPOLLIN)
        return worker

    def wait_loaded(self, progress: Callable[[str], None]) -> list[Loaded]:
        while not all(worker.loaded for worker in self.workers):
            for message in self.hear(1.0, START_BEAT_LIMIT_S):
                if isinstance(message, Progress):
                    progress(message.line)
        return [worker.loaded for worker in self.workers if worker.loaded]

    @property
    def has_failed(self) -> bool:
        return self._error is not None

    def fileno(self) -> int:
        """Readable when a worker has said something, or is gone."""
        return self._epoll.fileno()

    def hear(self, timeout_s: float, beat_limit_s: float | None = None) -> list[Done | Progress]:
        """What the workers say within the time, the first news ends the wait; raises when one has failed."""
        if self._error is not None:
            raise self._error
        heard = list(self._pump(timeout_s))
        if any(worker.failed or worker.is_gone for worker in self.workers):
            self._give_up(self._cause())
        now_s = time.monotonic()
        for worker in self.workers:
            if now_s - worker.heard_s > (beat_limit_s or BEAT_LIMIT_S):
                self.give_up_on(worker, f"has not been heard of for {now_s - worker.heard_s:.0f} s")
        return heard

    def give_up_on(self, worker: Worker, what: str) -> None:
        self.give_up(f"rank {worker.rank} (process {worker.process.pid}) {what}; last it was {worker.doing}")

    def give_up(self, why: str) -> None:
        """Have every worker print its stacks to standard error, end them all, and raise."""
        for worker in self.workers:
            worker.process.send_signal(signal.SIGUSR1)
        time.sleep(STACKS_GRACE_S)
        self._give_up(why)

    def _give_up(self, why: str) -> None:
        self._error = ExecutorError(why)
        self.kill()
        raise self._error

    def _pump(self, timeout_s: float) -> Iterator[Done | Progress]:
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        for worker in self.workers:
            if worker.channel.socket.fileno() not in ready:
                continue
            messages = worker.channel.receive()
            worker.heard_s = time.monotonic()
            if messages is None:
                worker.is_gone = True
                self._epoll.unregister(worker.channel.socket)
                continue
            for message in map(self._decoder.decode, messages):
                if isinstance(message, Beat):
                    worker.doing = message.doing
                elif isinstance(message, Loaded):
                    worker.loaded = message
                elif isinstance(message, Failed):
                    worker.failed = message
                else:
                    yield message

    def _cause(self) -> str:
        """Why it failed, once all that belongs to the failure has had time to arrive."""
        until_s = time.monotonic() + CAUSE_GRACE_S
        while (left_s := until_s - time.monotonic()) > 0 and not self._knows_cause():
            list(self._pump(left_s))
        own = [worker for worker in self.workers if worker.failed and not worker.failed.is_consequence]
        dead = [worker for worker in self.workers if worker.is_gone and not worker.failed]
        if own:
            return _told(own[0])
        if dead:
            return _death(dead[0])
        return _told(next(worker for worker in self.workers if worker.failed))

    def _knows_cause(self) -> bool:
        return any(
            (worker.failed and not worker.failed.is_consequence) or (worker.is_gone and not worker.failed)
            for worker in self.workers
        )

    def stop(self) -> None:
        """Wait for workers that were told to close; whoever does not is killed."""
        until_s = time.monotonic() + STOP_GRACE_S
        for worker in self.workers:
            try:
                worker.process.wait(max(0.0, until_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def kill(self) -> None:
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.channel.socket.close()
        self._epoll.close()


def _told(worker: Worker) -> str:
    assert worker.failed is not None
    if worker.failed.traceback is None:
        return worker.failed.error
    return f"rank {worker.rank} failed: {worker.failed.error}\n{worker.failed.traceback}"


def _death(worker: Worker) -> str:
    code = worker.process.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return f"rank {worker.rank} (process {worker.process.pid}) {how}; last it was {worker.doing}"

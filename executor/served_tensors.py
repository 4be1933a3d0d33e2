"""Named tensors that a trainer's process gives to engines on any machine, over TCP.

The trainer's memory is sealed, so all who ask get the same. Of a model's ranks one on each machine asks, and the others
there read what it got. Nothing here imports torch. What is sent is not encrypted; who asks must know the address, of
which a secret is a part.
"""

import hashlib
import hmac
import mmap
import os
import secrets
import socket
import socketserver
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from penstock.executor.free_memory import available_memory
from penstock.executor.protocol import WeightsError
from penstock.executor.shared_tensors import SealedMemory, SharedTensors

SCHEME = "tcp://"
SILENCE_S = 30.0  # after which the other side is taken for gone
POLL_S = 0.05
SECRET_BYTES, LENGTH_BYTES, PIECE_BYTES = 32, 8, 2**24


class Group(Protocol):
    """The ranks of one model (executor/parallel.py)."""

    rank: int

    def minimum(self, value: int) -> int: ...

    def exchange(self, value: int) -> list[int]: ...


class ServedTensors(SharedTensors):
    """`with ServedTensors(model.state_dict(), "10.0.0.5") as served: engine.update_weights(served.path)`. The host is an
    address of this machine at which those of the engine reach it."""

    def __init__(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], host: str = "127.0.0.1", port: int = 0
    ) -> None:
        super().__init__(tensors)
        try:
            self._server = _Server(host, port, lambda connection: self._answer(connection))
        except OSError:
            super().close()
            raise
        secret = secrets.token_hex(SECRET_BYTES // 2)
        self._address = TrainerAddress(host, self._server.server_address[1], secret)
        self._thread = Thread(target=self._server.serve_forever, args=[POLL_S], daemon=True)
        self._thread.start()

    @property
    def path(self) -> str:
        """For engines on any machine, until `close`."""
        return f"{self._address}/{self._address.secret}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()  # when all that were answered are done or gone
        self._thread.join()
        super().close()

    def _answer(self, connection: socket.socket) -> None:
        with suppress(OSError), open(self._fd, "rb", closefd=False) as file:
            connection.settimeout(SILENCE_S)
            if hmac.compare_digest(_received(connection, SECRET_BYTES), self._address.secret.encode()):
                connection.sendall(os.fstat(self._fd).st_size.to_bytes(LENGTH_BYTES, "little"))
                connection.sendfile(file)


class _Server(socketserver.ThreadingTCPServer):
    def __init__(self, host: str, port: int, answer: Callable[[socket.socket], None]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._answer = answer
        super().__init__((host, port), socketserver.BaseRequestHandler)

    def finish_request(self, request: Any, _client_address: Any) -> None:
        self._answer(request)


class TrainerAddress(NamedTuple):
    host: str
    port: int
    secret: str

    @classmethod
    def read(cls, text: str) -> Self:
        try:
            parts = urlsplit(text)
            host, port, secret = parts.hostname, parts.port, parts.path[1:]
        except ValueError:
            host = port = secret = None
        if not host or not port or not secret or len(secret.encode()) != SECRET_BYTES:
            raise WeightsError("an address is tcp://HOST:PORT/SECRET, as ServedTensors has it in `path`")
        return cls(host, port, secret)

    def __str__(self) -> str:
        """Without the secret, for messages."""
        return f"{SCHEME}[{self.host}]:{self.port}" if ":" in self.host else f"{SCHEME}{self.host}:{self.port}"


@contextmanager
def fetched(source: str, group: Group, machine: int | None = None) -> Iterator[str]:
    """The path at which this process reads `source`: what a trainer serves is fetched by one rank on each machine. All
    ranks call it together."""
    if not source.startswith(SCHEME):
        yield source
        return
    address = TrainerAddress.read(source)
    machine = _machine() if machine is None else machine
    first = group.exchange(machine).index(machine)  # the rank that fetches for this machine
    with ExitStack() as stack:
        fetch = None
        if group.rank == first:
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="fetched weights"))
            fetch = pool.submit(SealedMemory, partial(_fetch, address))
        # The ranks wait for each other no longer than a moment at a time: a backend gives up after some minutes.
        while not group.minimum(fetch is None or fetch.done()):
            time.sleep(POLL_S)
        here = fd = 0
        error = None if fetch is None else fetch.exception()
        if fetch is not None and error is None:
            memory = stack.enter_context(fetch.result())
            here = os.getpid() << 32 | memory.fileno()
        there = group.exchange(here)[first]
        if there:
            fd = os.open(f"/proc/{there >> 32}/fd/{there & 0xFFFFFFFF}", os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, fd)
        group.minimum(0)  # nothing is closed before all have opened it
        if error is not None:
            raise error
        if not there:
            raise WeightsError(f"{address}: rank {first}, on this machine, could not fetch it")
        yield f"/proc/self/fd/{fd}"


def _fetch(address: TrainerAddress, fd: int) -> None:
    try:
        with socket.create_connection((address.host, address.port), SILENCE_S) as connection:
            connection.sendall(address.secret.encode())
            length, free = int.from_bytes(_received(connection, LENGTH_BYTES), "little"), available_memory()
            if not 0 < length <= free:
                raise WeightsError(
                    f"{address}: {length} bytes of tensors; this machine has {free} bytes of memory free"
                )
            os.ftruncate(fd, length)
            with mmap.mmap(fd, length) as memory, memoryview(memory) as view:
                at = 0
                while at < length:
                    count = connection.recv_into(view[at : at + PIECE_BYTES])
                    if not count:
                        raise ConnectionError(f"closed after {at} of {length} bytes")
                    at += count
    except OSError as error:
        raise WeightsError(f"{address}: the tensors cannot be fetched: {error.strerror or error}") from None


def _received(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        piece = connection.recv(count - len(received))
        if not piece:
            raise ConnectionError("closed before its answer: the secret is another one, or the trainer is gone")
        received += piece
    return received


def _machine() -> int:
    """The same for processes that can read each other's shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return int.from_bytes(hashlib.sha256(b"%s %d" % (boot, namespace)).digest()[:7], "little")

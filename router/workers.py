"""Several router processes on one port: the kernel deals connections out (SO_REUSEPORT).

Each has its own placement, pools, probes and event links: the replicas send their events to all of them, so what is
cached is known to each, while load is known only as far as a process has sent it itself. The parent serves nothing.
It starts the workers, starts one again that dies, passes signals on, carries changes of the fleet to all, and adds
up their counters so that any of them can answer `/metrics` for all.
"""

import asyncio
import dataclasses
import logging
import multiprocessing
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from penstock.engine.http.listen import bind_socket, url_of
from penstock.router.config import Prefill, RouterConfig, replicas_of

log = logging.getLogger("penstock.router")

RESTART_PAUSE_S = 0.5  # between two starts of a worker that dies
REPORT_S = 1.0  # how old the others' counters in /metrics may be


class Change(msgspec.Struct, frozen=True, tag="change"):
    """A replica was added or taken out at one worker."""

    method: str
    url: str
    peer: str | None = None


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A worker's counters."""

    worker: int
    counters: dict[str, float]


Message = Change | Report
_DECODER = msgspec.msgpack.Decoder(Message)


class Worker:
    def __init__(self, index: int) -> None:
        self.index = index
        self.started_s = 0.0
        self.process: Any = None
        self.pipe: Connection | None = None


def run_workers(config: RouterConfig, sock: socket.socket) -> int:
    """Until all workers have ended; 0 if they ended because they were told to. `sock` holds the port, no more."""
    parent = Parent(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, parent.pass_on)
    print(f"Routing to {replicas_of(config)} in {config.workers} processes: {url_of(sock)}", flush=True)
    return parent.run()


class Parent:
    def __init__(self, config: RouterConfig) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._config = config
        self._peers: dict[str, str | None] = dict.fromkeys(config.backends)  # by URL, with the changes since
        self._peers |= {each.url: each.peer for each in config.prefills}
        self._workers = [Worker(index) for index in range(config.workers)]
        self._is_stopping = False

    def run(self) -> int:
        for worker in self._workers:
            self._start(worker)
        while running := [worker for worker in self._workers if worker.process is not None]:
            pipes = {worker.pipe: worker for worker in running if worker.pipe is not None}
            for ready in wait([*pipes, *(worker.process.sentinel for worker in running)], timeout=RESTART_PAUSE_S):
                if isinstance(ready, Connection):
                    self._take(pipes[ready])
            for worker in running:
                if not worker.process.is_alive():
                    self._ended(worker)
        return 0 if self._is_stopping else 1

    def pass_on(self, number: int, frame: object) -> None:
        self._is_stopping = True
        for worker in self._workers:
            if worker.process is not None and worker.process.is_alive():
                worker.process.terminate()

    def _start(self, worker: Worker) -> None:
        worker.pipe, theirs = self._context.Pipe()
        config = dataclasses.replace(
            self._config,
            backends=tuple(url for url, peer in self._peers.items() if peer is None),
            prefills=tuple(Prefill(url, peer) for url, peer in self._peers.items() if peer is not None),
        )
        worker.process = self._context.Process(
            target=work, args=(msgspec.msgpack.encode(config), worker.index, theirs), daemon=True
        )
        worker.started_s = time.monotonic()
        worker.process.start()
        theirs.close()

    def _ended(self, worker: Worker) -> None:
        code = worker.process.exitcode
        worker.process.close()
        worker.process = None
        if worker.pipe is not None:
            worker.pipe.close()
        if self._is_stopping:
            return
        log.error("worker %d ended with code %s and is started again", worker.index, code)
        time.sleep(max(0.0, worker.started_s + RESTART_PAUSE_S - time.monotonic()))
        self._start(worker)

    def _take(self, worker: Worker) -> None:
        """One message of a worker goes to all the others."""
        assert worker.pipe is not None
        try:
            data = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            worker.pipe = None  # it is ending; its sentinel will say so
            return
        message = _DECODER.decode(data)
        if isinstance(message, Change):
            self._peers.pop(message.url, None)
            if message.method == "POST":
                self._peers[message.url] = message.peer
        for other in self._workers:
            if other is not worker and other.pipe is not None and other.process is not None:
                try:
                    other.pipe.send_bytes(data)
                except OSError:
                    other.pipe = None


def work(settings: bytes, index: int, pipe: Connection) -> None:
    """The main function of a worker process."""
    import uvloop

    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s %(levelname).1s [{index}] %(message)s", stream=sys.stderr
    )
    config = msgspec.msgpack.decode(settings, type=RouterConfig)
    sys.exit(uvloop.run(_serve(config, bind_socket(config.host, config.port, reuse_port=True), index, pipe)))


async def _serve(config: RouterConfig, sock: socket.socket, index: int, pipe: Connection) -> int:
    from penstock.router.serve import serve

    def link(router: Any) -> None:
        Link(router, index, pipe).start()

    return await serve(config, sock, announce=False, on_start=link)


class Link:
    """A worker's end of the pipe: changes go out and come in, counters go out every second."""

    def __init__(self, router: Any, index: int, pipe: Connection) -> None:
        self._router = router
        self._index = index
        self._pipe = pipe

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._router.app.on_change = lambda method, url, peer: self._send(Change(method, url, peer))
        loop.add_reader(self._pipe.fileno(), self._take)
        self._report()

    def _report(self) -> None:
        self._send(Report(self._index, self._router.app.metrics.own_counters()))
        asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _send(self, message: Message) -> None:
        self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def _take(self) -> None:
        try:
            message = _DECODER.decode(self._pipe.recv_bytes())
        except (EOFError, OSError):
            # The parent is gone: nobody would pass signals on or start us again.
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            signal.raise_signal(signal.SIGTERM)
            return
        if isinstance(message, Change):
            self._router.app.apply(message.method, message.url, message.peer)
        else:
            self._router.app.metrics.others[message.worker] = message.counters

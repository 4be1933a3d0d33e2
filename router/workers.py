"""Several router processes on one port: the kernel deals connections out (SO_REUSEPORT).

Each has its own placement, pools, probes and event links: the replicas send their events to all of them, so what is
cached is known to each, while load is known only as far as a process has sent it itself. The parent serves nothing.
It starts the workers, starts one again that dies, passes signals on, carries changes of the fleet to all, and adds
up their counters so that any of them can answer `/metrics` for all.
"""

import asyncio
import contextlib
import dataclasses
import logging
import select
import signal
import socket
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection

import msgspec

from penstock.engine.http.listen import bind_socket, url_of
from penstock.executor.process_life import (
    Channels,
    ChildProcess,
    Stopping,
    begin,
    log_to_stderr,
    receive,
    send,
    start_child,
    stop_signals,
)
from penstock.router.app import RouterApp
from penstock.router.backend import Backend
from penstock.router.config import Prefill, RouterConfig, replicas_of
from penstock.router.metrics import is_counter

log = logging.getLogger("penstock.router")

DEAD = -1  # the workers that have died, as one
RESTART_PAUSE_S = 0.5  # before a worker that has died is started again
REPORT_S = 1.0  # how old the others' counters in /metrics may be


class FleetChange(msgspec.Struct, frozen=True, tag="change"):
    """A replica was added or taken out at one worker."""

    method: str
    url: str
    peer: str | None = None


class Report(msgspec.Struct, frozen=True, tag="report"):
    """A worker's counters; or, from the parent, those of all that have died, of whom `gone` is the last."""

    worker: int
    counters: dict[str, float]
    gone: int | None = None


class WorkerStart(msgspec.Struct, frozen=True):
    config: RouterConfig
    index: int


_DECODER = msgspec.msgpack.Decoder(FleetChange | Report)


def run_workers(config: RouterConfig, sock: socket.socket) -> int:
    """Until all workers have ended; 0 if they ended because they were asked to. `sock` holds the port, no more."""
    parent = Parent(config)
    with stop_signals(parent.pass_on):
        print(f"Routing to {replicas_of(config)} in {config.workers} processes: {url_of(sock)}", flush=True)
        return parent.run()


class Parent:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        # By URL: how it is written, and its peer; with the changes since.
        self._replicas: dict[str, tuple[str, str | None]] = {
            Backend.of(text).url: (text, None) for text in config.backends
        }
        self._replicas |= {each.url: (each.url, each.peer) for each in config.prefills}
        self._workers: dict[int, ChildProcess] = {}
        self._counters: dict[int, dict[str, float]] = {}  # as last reported
        self._channels = Channels(_DECODER)
        self._is_stopping = False

    def run(self) -> int:
        for index in range(self._config.workers):
            self._start(index)
        while self._workers:
            for index, message in self._channels.hear():
                if message is None:
                    self._ended(index)
                else:
                    self._pass_around(index, message)
        return 0 if self._is_stopping else 1

    def pass_on(self) -> None:
        """A signal to stop: they drain, and with the second they end."""
        self._is_stopping = True
        for worker in self._workers.values():
            worker.terminate()

    def _start(self, index: int) -> None:
        config = dataclasses.replace(
            self._config,
            backends=tuple(text for text, peer in self._replicas.values() if peer is None),
            prefills=tuple(Prefill(url, peer) for url, (_, peer) in self._replicas.items() if peer is not None),
        )
        self._workers[index] = worker = start_child(
            "penstock.router.workers", f"worker {index}", WorkerStart(config, index), may_finish=True
        )
        self._channels.add(index, worker.channel)
        if DEAD in self._counters:
            self._send(worker, Report(DEAD, self._counters[DEAD]))
        if self._is_stopping:  # since we decided to start it
            worker.terminate()

    def _ended(self, index: int) -> None:
        worker = self._workers.pop(index)
        how = worker.death() or "is gone"
        worker.kill()
        if not self._is_stopping:
            log.error("%s %s and is started again", worker.name, how)
            self._keep_counters(index)
            time.sleep(RESTART_PAUSE_S)
        if not self._is_stopping:
            self._start(index)

    def _keep_counters(self, index: int) -> None:
        """What a worker had counted stays in the sums: a counter must not fall. Gauges end with it."""
        kept = Counter(self._counters.get(DEAD, {}))
        kept.update({name: value for name, value in self._counters.pop(index, {}).items() if is_counter(name)})
        self._counters[DEAD] = dict(kept)
        self._pass_around(DEAD, Report(DEAD, self._counters[DEAD], gone=index))

    def _pass_around(self, index: int, message: FleetChange | Report) -> None:
        """One message of a worker goes to all the others."""
        if isinstance(message, Report):
            self._counters[message.worker] = message.counters
        else:
            url = Backend.of(message.url).url
            self._replicas.pop(url, None)
            if message.method == "POST":
                self._replicas[url] = message.url, message.peer
        for other, worker in self._workers.items():
            if other != index:
                self._send(worker, message)

    def _send(self, worker: ChildProcess, message: FleetChange | Report) -> None:
        try:
            send(worker.channel, message)
        except BlockingIOError:  # it has stopped reading, with half a message in its channel
            worker.kill()  # another takes its place
        except OSError:
            pass  # it is ending; its channel will say so


def main() -> int:
    """The main function of a worker process."""
    import uvloop

    # The first SIGTERM drains it, and it is the parent who sends it, also for a Ctrl-C: that goes to the whole group.
    start, channel = begin(WorkerStart, ignored=(signal.SIGINT,))
    log_to_stderr(mark=f"[{start.index}] ")
    return uvloop.run(_serve(start, channel))


async def _serve(start: WorkerStart, channel: Connection) -> int:
    from penstock.router.serve import serve

    stopping = Stopping()
    sock = bind_socket(start.config.host, start.config.port, reuse_port=True)
    with stop_signals(stopping.take, (signal.SIGTERM,)):
        return await serve(
            start.config, sock, stopping, lambda router: WorkerLink(router.app, start.index, channel, stopping).start()
        )


class WorkerLink:
    """A worker's end of the channel: changes go out and come in, counters go out every second."""

    def __init__(self, app: RouterApp, index: int, channel: Connection, stopping: Stopping) -> None:
        self._app, self._index, self._channel, self._stopping = app, index, channel, stopping

    def start(self) -> None:
        self._app.on_change = lambda method, url, peer: send(self._channel, FleetChange(method, url, peer))
        asyncio.get_running_loop().add_reader(self._channel, self._take)
        self._report()

    def _report(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone, which `_take` learns
            if select.select([], [self._channel], [], 0)[1]:  # else it is not reading, and we would wait for it here
                send(self._channel, Report(self._index, self._app.metrics.own_counters()))
            asyncio.get_running_loop().call_later(REPORT_S, self._report)

    def _take(self) -> None:
        data = receive(self._channel)
        if data is None:  # the parent is gone, and with it what passes signals on and starts us again
            asyncio.get_running_loop().remove_reader(self._channel)
            self._stopping.take()
        elif isinstance(message := _DECODER.decode(data), FleetChange):
            self._app.apply(message.method, message.url, message.peer)
        else:
            self._app.metrics.others.pop(message.gone, None)
            self._app.metrics.others[message.worker] = message.counters


if __name__ == "__main__":
    sys.exit(main())

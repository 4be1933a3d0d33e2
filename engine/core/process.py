"""The engine core as a process of its own, below one API server: `python -m penstock.engine.core.process`.

It reads its config from standard input, talks over two ZMQ sockets in a private directory, and lives exactly
as long as its parent: the kernel kills it when the parent dies, and a closed standard input ends it where
the kernel does not offer that. Only the parent stops it; signals meant for the group are the parent's to act
on, so that a drain can finish what is running.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec
import zmq

from penstock.engine.config import EngineConfig
from penstock.engine.core.engine_core import EngineCore, settle_garbage
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import load_vocabulary
from penstock.engine.messages import (
    Abort,
    CacheReset,
    Connected,
    Dead,
    FromCore,
    Heartbeat,
    LoadProgress,
    Output,
    Outputs,
    Ready,
    ResetCache,
    Shutdown,
    Submit,
    ToCore,
    WatchCache,
)
from penstock.executor.process_life import die_with
from penstock.executor.protocol import ExecutorError, open_executor

HEARTBEAT_S = 1.0
TRANSFER_POLL_S = 0.005  # an idle core whose blocks are on their way to the tiers goes on with them this often
IDLE_CHECK_S = 1.0  # after this long without work the invariants are checked, once, and what may be needed is warmed


def main() -> int:
    """Run until told to stop. The exit code is 0 only after a Shutdown."""
    directory, parent = Path(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_watch_stdin, daemon=True).start()
    context = zmq.Context()
    link, beats_outbox = Link(context, directory), sender(context, directory)
    link.send(Connected())
    beats_outbox.send(msgspec.msgpack.encode(Connected()))
    over = threading.Event()
    beats: threading.Thread | None = None
    try:
        executor = open_executor(config.executor, lambda line: link.send(LoadProgress(line)))
        core = EngineCore(config, executor, Compiler(lambda: load_vocabulary(config.executor, executor.info)))
        link.send(Ready(core.info))
        beats = threading.Thread(target=_beat, args=(core, beats_outbox, over), daemon=True)
        beats.start()
        settle_garbage()
        _serve(core, link)
        core.close()
        return 0
    except ExecutorError as error:  # what the user can mend: the message says it all
        link.send(Dead(str(error)))
        return 1
    except Exception as error:  # the top of the process: say why, then end
        traceback.print_exc()
        link.send(Dead(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        over.set()
        if beats is not None:
            beats.join(HEARTBEAT_S)  # its socket is its own to close
        context.destroy(linger=2000)


class Link:
    """The core's two sockets: what the front sends, and what the core answers."""

    def __init__(self, context: zmq.Context, directory: Path) -> None:
        self._inbox = context.socket(zmq.PULL)
        self._inbox.connect(f"ipc://{directory}/to_core")
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._outbox = sender(context, directory)
        self._decoder = msgspec.msgpack.Decoder(ToCore)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))

    def wake_for(self, fd: int) -> None:
        """Let `receive` return also when this file descriptor becomes readable."""
        self._poller.register(fd, zmq.POLLIN)

    def receive(self, timeout_s: float | None) -> list[ToCore]:
        """Everything that has arrived; waits for the first message as long as allowed (None: for ever)."""
        messages: list[ToCore] = []
        if timeout_s != 0.0:
            self._poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        try:
            while True:
                messages.append(self._decoder.decode(self._inbox.recv(zmq.NOBLOCK)))
        except zmq.Again:
            return messages


def sender(context: zmq.Context, directory: Path) -> zmq.Socket:
    outbox = context.socket(zmq.PUSH)
    outbox.connect(f"ipc://{directory}/from_core")
    return outbox


def _serve(core: EngineCore, link: Link) -> None:
    idle_wait_s = None if (fd := core.executor.fileno()) is None else IDLE_CHECK_S
    if fd is not None:
        link.wake_for(fd)
    checked = False
    while True:
        working = core.has_work()
        patience_s = idle_wait_s if checked else IDLE_CHECK_S
        if not core.is_settled:
            patience_s = TRANSFER_POLL_S
        messages = link.receive(0.0 if working else patience_s)
        if not working and not messages and not core.is_settled:
            core.step()
            continue
        if not working and not messages:
            core.executor.check()
            if not checked:
                core.scheduler.check()
                core.warm_grammars()
            checked = True
            continue
        checked = False
        outputs: list[Output] = []
        for message in messages:
            if isinstance(message, Submit):
                _keep(outputs, core.submit(message))
            elif isinstance(message, Abort):
                for request_id in message.request_ids:
                    _keep(outputs, core.abort(request_id))
            elif isinstance(message, WatchCache):
                core.cache_log.watch(message.is_on)
            elif isinstance(message, ResetCache):
                link.send(CacheReset(message.number, core.reset_prefix_cache()))
            elif isinstance(message, Shutdown):
                return
        if core.has_work():
            outputs += core.step()
        link.send(Outputs(outputs, core.stats(), core.last_step_tokens))
        for news in core.cache_updates():
            link.send(news)


def _keep(outputs: list[Output], output: Output | None) -> None:
    if output is not None:
        outputs.append(output)


def _beat(core: EngineCore, outbox: zmq.Socket, over: threading.Event) -> None:
    """Say every second that the process lives and how old the running step is. The socket is this thread's alone."""
    encoder = msgspec.msgpack.Encoder()
    while not over.is_set():
        started = core.step_started_s
        age = 0.0 if started is None else time.monotonic() - started
        outbox.send(encoder.encode(Heartbeat(core.num_collected, age, max(age - core.step_deadline_s, 0.0))))
        over.wait(HEARTBEAT_S)
    outbox.close(linger=0)


def _watch_stdin() -> None:
    # Not through sys.stdin: its lock, held by this thread, would make a fatal error of the interpreter's end.
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

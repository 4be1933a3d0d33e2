"""One rank as a process of its own: `python -m penstock.executor.ranks.worker FD PARENT HARD`.

It hears steps from the ring and answers on the socket FD. It lives as long as its parent: the kernel kills it with
the thread that started it (HARD), and a closed socket ends it in any case. Only the parent stops it; signals meant
for the whole group are the parent's to act on.
"""

import faulthandler
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from penstock.executor.parallel import CollectiveError, RankGroup
from penstock.executor.process_life import die_with
from penstock.executor.protocol import ExecutorError, Step, TransferResult
from penstock.executor.ranks.join import join
from penstock.executor.ranks.rank import Rank, choose_device
from penstock.executor.ranks.wire import (
    CLOSE,
    MASKS,
    STEP,
    Beat,
    Channel,
    Done,
    Failed,
    LoadProgress,
    ModelLoaded,
    Start,
)
from penstock.executor.ring.queue import MessageQueue
from penstock.executor.step.runner import Launched

BEAT_S = 1.0

Message = Sequence[Any]  # the kind, and its buffers


def main() -> int:
    fd, parent, hard = (int(argument) for argument in sys.argv[1:])
    if hard:
        die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    channel = Channel(socket.socket(fileno=fd))
    start = _hear_start(channel)
    threading.Thread(target=_leave_with, args=(channel,), daemon=True).start()
    voice = Voice(channel.send)
    voice.beat(_end)
    try:
        assert start.ring is not None
        with MessageQueue.attach(MessageQueue.unpack_handle(start.ring), start.reader) as inbox:
            compute(start, inbox.borrow, voice)
        return 0
    except Exception as error:  # the top of the process: say why, then end
        voice.say(failure(error))
        return 1


def failure(error: Exception) -> Failed:
    if isinstance(error, ExecutorError):
        return Failed(str(error), None, False)
    trace = "".join(traceback.format_exception(error))
    return Failed(f"{type(error).__name__}: {error}", trace, isinstance(error, CollectiveError))


class Voice:
    """What this rank says, from whichever thread, and what its main thread is at."""

    def __init__(self, send: Callable[[msgspec.Struct], None]) -> None:
        self._send, self._lock = send, threading.Lock()
        self.doing = "starting"
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def say(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._send(message)

    def beat(self, lost: Callable[[], NoReturn]) -> None:
        """Say every second, from a thread of its own, what the main thread is at."""

        def run() -> None:
            while not self._is_over.wait(BEAT_S):
                try:
                    self.say(Beat(self.doing))
                except OSError:
                    lost()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def hush(self) -> None:
        """Nothing more is said; for whoever must know that nobody still talks."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()


def compute(start: Start, hear: Callable[[], AbstractContextManager[Message]], voice: Voice) -> None:
    """Load this rank's part of the model, then compute step after step until told to close."""
    config, rank = start.config, start.rank
    device = choose_device(config.device, start.device_index)
    if device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // start.neighbours))
    else:
        torch.cuda.set_device(device)
    voice.doing = "waiting for the other ranks to join"
    group = join(rank, start.world, start.rendezvous, device)
    voice.doing = "loading the model"
    ours = Rank(config, group, device, lambda line: voice.say(LoadProgress(line)) if rank == 0 else None)
    voice.say(ModelLoaded(ours.info))
    finisher = Finisher(ours, group, voice)
    decoder = msgspec.msgpack.Decoder(Step)
    unsampled: Launched | None = None  # a step that waits for its masks; they come next
    while True:
        voice.doing = "waiting for a step"
        with hear() as (kind, *parts):
            if kind == CLOSE:
                break
            if kind == MASKS:
                if unsampled is not None:  # only the first rank samples
                    rows = np.frombuffer(parts[0], np.int32)
                    masks = np.frombuffer(parts[1], np.int32)
                    masks = masks.reshape(len(rows), masks.size // max(1, len(rows)))  # all their requests may be gone
                    ours.runner.sample_masked(unsampled, rows, masks)
                    finisher.take(unsampled)
                    unsampled = None
                continue
            assert kind == STEP, kind
            step = decoder.decode(parts[0])
        voice.doing = f"computing step {step.step_id} of {len(step.rows)} rows"
        launched = ours.runner.launch(step)
        if launched.unsampled is None:
            finisher.take(launched)
        else:
            unsampled = launched
    finisher.close()
    ours.close()
    group.close()


class Finisher:
    """Waits for launched steps and says what came out, in a thread of its own: the next step is launched meanwhile."""

    def __init__(self, rank: Rank, group: RankGroup, voice: Voice) -> None:
        self._rank, self._group, self._voice = rank, group, voice
        self._launched: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, launched: Launched) -> None:
        self._launched.put(launched)

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                result = self._rank.runner.finish(launched)
                if self._group.is_first or (result.transfers is not None and _is_news(result.transfers)):
                    self._voice.say(Done(self._group.rank, result))
        except Exception as error:  # the top of the thread; the rank cannot go on without it
            self._voice.say(failure(error))
            os._exit(1)


def _is_news(transfers: TransferResult) -> bool:
    return bool(transfers.completions or transfers.found or transfers.lost or transfers.stores)


def _hear_start(channel: Channel) -> Start:
    while (messages := channel.receive()) is not None:
        if messages:
            return msgspec.msgpack.decode(messages[0], type=Start)
    _end()


def _leave_with(channel: Channel) -> NoReturn:
    while channel.receive() is not None:
        pass
    _end()


def _end() -> NoReturn:
    """At once: whoever could want more is gone, and the main thread may sit in a collective for ever."""
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())

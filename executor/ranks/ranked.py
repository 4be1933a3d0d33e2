"""Runs steps on several ranks: all get the same steps and compute their shares; the first one samples and replies.

Steps are sent ahead, so a rank starts the next one without waiting. A step holds only what changed, because each worker
keeps the state of the requests (executor/step/inputs.py). A rank that dies, fails or hangs ends the executor.

On one machine each rank is a child process (`open_multiproc`): it gets steps through a ring in shared memory and
replies through a socket pair. On several machines Ray starts the ranks (executor/ranks/ray_executor.py).
"""

import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.executor.process_life import Channels, start_child
from penstock.executor.protocol import (
    AdapterError,
    AdapterInfo,
    ExecutorConfig,
    ExecutorError,
    ModelInfo,
    Part,
    SleepLevel,
    Step,
    StepResult,
    TransferResult,
    WeightsError,
    step_deadline_s,
)
from penstock.executor.ranks.wire import Done, FromWorker, MessageKind, RankAnswer, Rendezvous, Start
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.ring import MessageQueue
from penstock.executor.ring.memory_segment import MAX_READERS
from penstock.executor.tiers.transfers import ResultMerger

# A step of 256 decoding requests takes 17 KB; a prompt is sent with its admission, 4 bytes per token. Larger messages
# go through the ring's slower spill areas (ring/queue.py).
RING_SLOTS = 8
SLOT_BYTES = 1 << 20
CLOSE_TIMEOUT_S = 1.0
ADAPTER_S = 120.0  # time limit for all ranks to read an adapter
WEIGHTS_S = 1800.0  # time limit for all ranks to read the weights, of a large model from a slow disk
REASON_S = 1.0  # time for a worker to report why it does not accept a step


class Broadcast(Protocol):
    """Sends all workers the same messages, in order. Buffers may be reused as soon as `send` returns."""

    def send(self, message: tuple[Any, ...], timeout_s: float | None = None) -> None: ...

    def close(self) -> None: ...


class RankedExecutor:
    def __init__(self, worker_watch: WorkerWatch, broadcast: Broadcast, progress: Callable[[str], None]) -> None:
        self.worker_watch, self._broadcast = worker_watch, broadcast
        self._encoder = msgspec.msgpack.Encoder()
        self._due: deque[tuple[Step, float]] = deque()  # submitted steps, and the seconds that each may take
        self._begun_s = 0.0  # when the oldest of them became the oldest
        self._results: deque[StepResult] = deque()
        self._transfers: list[TransferResult] = []  # received since the last result
        self._adapters: set[str] = set()  # keys of adapters that all ranks hold
        self._reported = [-1] * len(worker_watch.workers)  # by rank: the last step that it has reported
        self._answers: list[RankAnswer] = []  # answers to the last `_ask`
        self._merge = ResultMerger(len(worker_watch.workers))
        try:
            self.info = _agreed([loaded.info for loaded in worker_watch.wait_loaded(progress)])
        except BaseException:
            self.close()
            raise

    def submit(self, step: Step) -> None:
        assert len(self._due) < self.info.max_in_flight, "too many steps in flight"
        allowed_s = step_deadline_s(sum(row.count for row in step.rows), self.info.device)
        self._send((MessageKind.STEP, self._encoder.encode(step)), allowed_s)
        if not self._due:
            self._begun_s = time.monotonic()
        self._due.append((step, allowed_s))

    def set_masks(self, step_id: int, rows: np.ndarray, masks: np.ndarray) -> None:
        step, allowed_s = self._due[-1]
        assert step.step_id == step_id, "masks come before the next step is submitted"
        self._send((MessageKind.MASKS, rows, masks), allowed_s)

    def collect(self) -> StepResult:
        step, allowed_s = self._due[0]
        # A step without rows asks all ranks what their stores hold, and every rank reports it.
        while not self._results or not (step.rows or min(self._reported) >= step.step_id):
            left_s = self._begun_s + allowed_s - time.monotonic()
            if left_s <= 0:
                what = f"step {step.step_id} of {len(step.rows)} rows is not done within its deadline"
                self.worker_watch.give_up(f"{what}: {self.worker_watch.whereabouts()}")
            self._receive(min(left_s, 1.0))
        self._due.popleft()
        self._begun_s = time.monotonic()
        result = self._results.popleft()
        assert result.step_id == step.step_id, "results out of order"
        return self._with_transfers(result)

    def load_adapter(self, path: str) -> AdapterInfo:
        """Load an adapter on all ranks; if one of them fails, no rank keeps it."""
        answers = self._ask(MessageKind.LOAD, path, ADAPTER_S)
        infos = [answer.value for answer in answers if isinstance(answer.value, AdapterInfo)]
        keys = {info.key for info in infos}
        if len(infos) == len(answers) and len(keys) == 1:
            self._adapters |= keys
            return infos[0]
        for key in keys - self._adapters:
            self.unload_adapter(key)
        raise AdapterError(_first_error(answers) or f"{path}: the ranks have read different content")

    def unload_adapter(self, key: str) -> None:
        self._adapters.discard(key)
        self._send((MessageKind.UNLOAD, key.encode()), ADAPTER_S)

    def update_weights(self, path: str) -> None:
        """Prepare new weights on every rank. If all ranks have read the same, all replace theirs, else none does."""
        answers = self._ask(MessageKind.PREPARE, path)
        prepared = {answer.value for answer in answers if isinstance(answer.value, bytes)}
        if (error := _first_error(answers)) or len(prepared) > 1:
            self._send((MessageKind.DROP, b""), WEIGHTS_S)
            raise WeightsError(error or f"{path}: the ranks have read different weights; the files changed meanwhile")
        self._ask(MessageKind.TAKE)
        self.info = msgspec.structs.replace(self.info, fingerprint=prepared.pop())

    def sleep(self, level: SleepLevel) -> None:
        self._demand(MessageKind.SLEEP, str(level))

    def wake(self, parts: Sequence[Part]) -> None:
        self._demand(MessageKind.WAKE, " ".join(parts))

    def _demand(self, kind: bytes, named: str) -> None:
        if error := _first_error(self._ask(kind, named)):
            raise WeightsError(error)

    def _ask(self, kind: bytes, named: str = "", timeout_s: float = WEIGHTS_S) -> list[RankAnswer]:
        """Send a request to all ranks and return their answers, sorted by rank."""
        self._answers = []
        self._send((kind, named.encode()), timeout_s)
        until_s = time.monotonic() + timeout_s
        while len(self._answers) < len(self.worker_watch.workers):
            if time.monotonic() > until_s:
                self.worker_watch.give_up(f"{kind.decode()} {named}: the ranks are not done within {timeout_s:.0f} s")
            self._receive(1.0)
        return sorted(self._answers, key=lambda answer: answer.rank)

    def fileno(self) -> int:
        return self.worker_watch.fileno()

    def check(self) -> None:
        self._receive(0.0)

    def close(self) -> None:
        """End all workers: ask them to close, then kill those that are left."""
        try:
            if self.worker_watch.error is None:
                self._broadcast.send((MessageKind.CLOSE,), timeout_s=CLOSE_TIMEOUT_S)
                self.worker_watch.stop()
        except (ConnectionError, TimeoutError):
            pass  # they cannot be asked, so they are killed
        finally:
            self.worker_watch.close()
            self._broadcast.close()

    def _send(self, message: tuple[Any, ...], timeout_s: float) -> None:
        try:
            self._broadcast.send(message, timeout_s=max(0.0, timeout_s))
        except (ConnectionError, TimeoutError) as error:
            until_s = time.monotonic() + REASON_S
            while (left_s := until_s - time.monotonic()) > 0:
                self._receive(left_s)  # raises if the worker watch knows the cause, with a better message
            self.worker_watch.give_up(f"a step could not be handed out: {error}; {self.worker_watch.whereabouts()}")

    def _receive(self, timeout_s: float) -> None:
        for message in self.worker_watch.receive(timeout_s):
            if isinstance(message, RankAnswer):
                self._answers.append(message)
            if not isinstance(message, Done):
                continue
            if message.result.transfers is not None:
                self._transfers.append(message.result.transfers)
            self._reported[message.rank] = message.result.step_id
            if message.rank == 0:
                self._results.append(message.result)

    def _with_transfers(self, result: StepResult) -> StepResult:
        """Return the first rank's result with the transfer results that all ranks have reported so far. The counters of
        its stores stand for those of all ranks, which do the same."""
        if result.transfers is None:
            return result
        received, self._transfers = self._transfers, []
        merged = msgspec.structs.replace(self._merge.merge(received), store_stats=result.transfers.store_stats)
        return msgspec.structs.replace(result, transfers=merged)


def open_multiproc(config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> RankedExecutor:
    """Start all ranks in parallel and wait until each has loaded its part of the model."""
    if config.tensor_parallel_size > MAX_READERS:
        raise ExecutorError(f"tensor_parallel_size: {config.tensor_parallel_size} given; at most {MAX_READERS} can be")
    world = config.tensor_parallel_size
    ring = MessageQueue.create(world, slots=RING_SLOTS, slot_bytes=SLOT_BYTES)
    workers, channels = [], Channels(msgspec.msgpack.Decoder(FromWorker))
    # The first rank inherits the socket of the rendezvous port, so that no other process can take the port in between.
    with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
        host, port = listener.getsockname()
        for rank in range(world):
            fds = [listener.fileno()] if rank == 0 else []
            start = Start(config, rank, world, world, rank, Rendezvous(host, port, host, *fds), ring.handle())
            worker = start_child("penstock.executor.ranks.worker", f"rank {rank}", start, fds)
            workers.append(worker)
            channels.add(rank, worker.channel)
    return RankedExecutor(WorkerWatch(workers, channels), ring, progress)


def _first_error(answers: Sequence[RankAnswer]) -> str:
    return next((answer.error for answer in answers if answer.error), "")


def _agreed(infos: list[ModelInfo]) -> ModelInfo:
    """Return the model info, which must be equal on all ranks; sizes in bytes are those of one rank."""
    first = infos[0]
    for rank, info in enumerate(infos):
        if (info.fingerprint, info.num_blocks) != (first.fingerprint, first.num_blocks):
            raise ExecutorError(f"model: rank {rank} has loaded other weights than rank 0; the files changed meanwhile")
    return first

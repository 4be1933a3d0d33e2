"""The process of one rank. It reads steps from the ring and replies through its parent's channel.

executor/process_life.py implements its start and end, ray_executor.py the connection to ranks on other machines.
"""

import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from penstock.executor.child_main import leave
from penstock.executor.machine import usable_cores
from penstock.executor.parallel import CollectiveError, Connections, RankGroup, naming
from penstock.executor.process_life import Reporter, begin, send
from penstock.executor.protocol import AdapterError, AdapterInfo, ExecutorError, SleepLevel, Step, WeightsError
from penstock.executor.ranks import wire
from penstock.executor.ranks.rank import Rank
from penstock.executor.ranks.rank_builder import build_rank
from penstock.executor.ranks.rank_settings import choose_device
from penstock.executor.ranks.ranked import WEIGHTS_S
from penstock.executor.ranks.weights_lifecycle import WeightsLifecycle
from penstock.executor.ring import MessageQueue
from penstock.executor.step.runner import LaunchedStep

log = logging.getLogger("penstock.executor")

Message = Sequence[Any]  # the kind and its buffers
# A rank that has its weights waits in a collective for one that still reads. The watcher of the processes detects a dead
# or stopped rank much earlier than this, and a step has its own deadline.
COLLECTIVE_TIMEOUT_S = WEIGHTS_S
JOIN_TIMEOUT_S = 120.0


def main() -> int:
    start, channel = begin(wire.Start)
    return work(start, Reporter(partial(send, channel)))


def work(
    start: wire.Start, reporter: Reporter, receive: Callable[[], AbstractContextManager[Message]] | None = None
) -> int:
    """Run this rank until it ends; return the exit code. `receive` returns the next message if there is no ring."""
    reporter.beat(lambda: wire.Beat(reporter.doing))
    try:
        if start.ring is None:
            assert receive is not None
            compute(start, receive, reporter)
        else:
            with MessageQueue.attach(start.ring, start.rank) as ring:
                compute(start, ring.borrow, reporter)
        return 0
    except Exception as error:  # top level of the process: report the cause, then end
        reporter.report(_failure(error))
        return 1


def _failure(error: Exception) -> wire.Failed:
    if isinstance(error, ExecutorError):
        return wire.Failed(str(error), None, False)
    trace = "".join(traceback.format_exception(error))
    return wire.Failed(f"{type(error).__name__}: {error}", trace, isinstance(error, CollectiveError))


def compute(start: wire.Start, receive: Callable[[], AbstractContextManager[Message]], reporter: Reporter) -> None:
    """Load this rank's part of the model, then compute steps until the end."""
    config, rank = start.config, start.rank
    device = choose_device(config.device, start.device_index)
    if device.type == "cpu":
        torch.set_num_threads(max(1, usable_cores() // start.neighbours))
    else:
        torch.cuda.set_device(device)
    reporter.doing = "waiting for the other ranks to join"
    group = join(rank, start.world, start.rendezvous, device, config.batch_invariant)
    reporter.doing = "loading the model"
    ours = build_rank(
        config, group, device, lambda line: reporter.report(wire.RankProgress(line)) if rank == 0 else None
    )
    weights = WeightsLifecycle(ours)
    reporter.report(wire.ModelLoaded(ours.info))
    finisher = Finisher(ours, group, reporter)
    decoder = msgspec.msgpack.Decoder(Step)
    unsampled: LaunchedStep | None = None  # a step whose masks are the next message
    while True:
        reporter.doing = "waiting for a step"
        with receive() as (kind, *parts):
            kind = bytes(kind)
            if kind == wire.MessageKind.CLOSE:
                break
            if kind == wire.MessageKind.MASKS:
                if unsampled is not None:  # only on the first rank, which samples
                    rows = np.frombuffer(parts[0], np.int32)
                    masks = np.frombuffer(parts[1], np.int32)
                    masks = masks.reshape(len(rows), masks.size // max(1, len(rows)))  # there may be no rows left
                    ours.runner.sample_masked(unsampled, rows, masks)
                    finisher.take(unsampled)
                    unsampled = None
                continue
            if kind != wire.MessageKind.STEP:
                reporter.doing = f"changing weights or memory: {kind.decode()}"
                finisher.wait()
                answer = _control(ours, weights, kind, bytes(parts[0]).decode())
                if kind not in (wire.MessageKind.UNLOAD, wire.MessageKind.DROP):
                    reporter.report(answer)
                continue
            step = decoder.decode(parts[0])
        reporter.doing = f"computing step {step.step_id} of {len(step.rows)} rows"
        log.debug("rank %d: %s", start.rank, reporter.doing)
        launched = ours.runner.launch(step)
        if launched.unsampled is None:
            finisher.take(launched)
        else:
            unsampled = launched
    finisher.close()
    ours.tiers.close()
    group.close()


def join(rank: int, world: int, at: wire.Rendezvous, device: torch.device, is_ordered: bool = False) -> RankGroup:
    """Connect to the other ranks and return the group of all: gloo on the CPU, NCCL on CUDA."""
    if world == 1:
        return RankGroup()
    with naming("join"):
        limit, fd = timedelta(seconds=JOIN_TIMEOUT_S), at.listen_fd
        store = TCPStore(at.host, at.port, world, rank == 0, limit, wait_for_workers=False, master_listen_fd=fd)
        store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))  # NCCL connects in the first collective

        def connect(name: str) -> Connections:
            return _backend(PrefixStore(name, store), rank, world, at.address, device)

        return RankGroup(rank, world, connect, device, is_ordered)


def _backend(store: Store, rank: int, world: int, address: str, device: torch.device) -> Connections:
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if device.type == "cuda":
        # Not tested so far: the available machines had at most one GPU.
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return cast(Connections, dist.ProcessGroupNCCL(store, rank, world, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs have another name
    gloo._timeout = timeout
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    return cast(Connections, dist.ProcessGroupGloo(store, rank, world, gloo))


def _control(rank: Rank, weights: WeightsLifecycle, kind: bytes, argument: str) -> wire.RankAnswer:
    """Execute a request other than a step."""
    index = rank.settings.group.rank
    try:
        return wire.RankAnswer(index, value=_REQUESTS[kind](rank, weights, argument))
    except (AdapterError, WeightsError) as error:
        return wire.RankAnswer(index, str(error))


_REQUESTS: dict[bytes, Callable[[Rank, WeightsLifecycle, str], AdapterInfo | bytes | None]] = {
    wire.MessageKind.LOAD: lambda rank, _, path: rank.adapters.load(path),
    wire.MessageKind.UNLOAD: lambda rank, _, key: rank.adapters.unload(key),
    wire.MessageKind.PREPARE: lambda _rank, weights, path: weights.prepare(path),
    wire.MessageKind.TAKE: lambda _rank, weights, _: weights.take(),
    wire.MessageKind.DROP: lambda _rank, weights, _: weights.drop(),
    wire.MessageKind.SLEEP: lambda _rank, weights, level: weights.sleep(msgspec.json.decode(level, type=SleepLevel)),
    wire.MessageKind.WAKE: lambda _rank, weights, parts: weights.wake(parts.split()),
}


class Finisher:
    """Waits for launched steps and reports their results in its own thread, while the next step is launched."""

    def __init__(self, rank: Rank, group: RankGroup, reporter: Reporter) -> None:
        self._rank, self._group, self._reporter = rank, group, reporter
        self._launched: queue.Queue[LaunchedStep | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, launched: LaunchedStep) -> None:
        self._launched.put(launched)

    def wait(self) -> None:
        """Wait until this rank has finished every step; the executor may count a step as done before that."""
        self._launched.join()

    def close(self) -> None:
        self._launched.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (launched := self._launched.get()) is not None:
                result = self._rank.runner.finish(launched)
                moved = result.transfers
                is_asked = self._group.is_first or not launched.step.rows
                if is_asked or (moved is not None and (moved.completions or moved.gained or moved.lost)):
                    self._reporter.report(wire.Done(self._group.rank, result))
                self._launched.task_done()
        except Exception as error:  # top level of the thread; the rank cannot continue without it
            self._reporter.report(_failure(error))
            leave()


if __name__ == "__main__":
    sys.exit(main())

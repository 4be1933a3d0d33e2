"""The executor of several ranks on one machine: a process each, below this one.

Starting them is all there is here. They get their steps through a shared-memory ring (executor/ring/queue.py), they
answer through socket pairs, executor/ranks/worker_watch.py watches them and executor/ranks/ranked.py runs steps over them.
"""

import socket
from collections.abc import Callable

import msgspec

from penstock.executor.process_life import Channels, start_child
from penstock.executor.protocol import ExecutorConfig, ExecutorError, step_deadline_s
from penstock.executor.ranks.ranked import RING_SLOTS, SLOT_BYTES, RankedExecutor
from penstock.executor.ranks.wire import FromWorker, Rendezvous, Start
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.ring.memory_segment import MAX_READERS
from penstock.executor.ring.queue import MessageQueue


def open_multiproc(
    config: ExecutorConfig,
    progress: Callable[[str], None] = lambda _line: None,
    deadline_s: Callable[[int], float] = step_deadline_s,
) -> RankedExecutor:
    """Start all ranks side by side and wait until each has loaded its part of the model."""
    if config.tensor_parallel_size > MAX_READERS:
        raise ExecutorError(f"tensor_parallel_size: {config.tensor_parallel_size} given; at most {MAX_READERS} can be")
    world = config.tensor_parallel_size
    ring = MessageQueue.create(world, slots=RING_SLOTS, slot_bytes=SLOT_BYTES)
    workers, channels = [], Channels(msgspec.msgpack.Decoder(FromWorker))
    # The ranks meet at a port that is bound here and handed to the first, so that no other process takes it in between.
    with socket.create_server(("127.0.0.1", 0), backlog=world) as listener:
        host, port = listener.getsockname()
        for rank in range(world):
            fds = [listener.fileno()] if rank == 0 else []
            start = Start(config, rank, world, world, rank, Rendezvous(host, port, host, *fds), ring.handle())
            worker = start_child("penstock.executor.ranks.worker", f"rank {rank}", start, fds)
            workers.append(worker)
            channels.add(rank, worker.channel)
    return RankedExecutor(WorkerWatch(workers, channels), ring, progress, deadline_s)

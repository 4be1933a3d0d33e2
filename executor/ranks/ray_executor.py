"""The executor over the nodes of a running Ray cluster: one actor per rank, each with a GPU (or a core) of its own.

Ray finds the places, starts the actors and ends them with their driver; nothing of a step goes through it. Ranks on
the driver's node hear steps through the shared-memory ring, the others over encrypted TCP (executor/ranks/network.py); all
answer over the latter. executor/ranks/worker_watch.py watches them and executor/ranks/ranked.py runs steps over them.
"""

import faulthandler
import os
import queue
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, NoReturn

import msgspec

from penstock.executor.protocol import ExecutorConfig, ExecutorError, step_deadline_s
from penstock.executor.ranks.network import Hub, Spoke, Ticket
from penstock.executor.ranks.ranked import RING_SLOTS, SLOT_BYTES, RankedExecutor
from penstock.executor.ranks.wire import MASKS, STACKS, Failed, FromWorker, Rendezvous, Start
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.ring.queue import MessageQueue

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from penstock.executor.ranks.cluster import join
except ImportError as error:
    raise ExecutorError("executor: 'ray' needs the package ray: pip install 'penstock[ray]'") from error

PLACE_TIMEOUT_S = 30.0  # for the cluster to find room for all ranks
ACTOR_TIMEOUT_S = 120.0  # for their processes to start: on a new node Ray imports this package first
LIFE_CHECK_S = 0.5


class Place(NamedTuple):
    node: str
    address: str
    pid: int


def open_ray(
    config: ExecutorConfig,
    progress: Callable[[str], None] = lambda line: None,
    deadline_s: Callable[[int], float] = step_deadline_s,
) -> RankedExecutor:
    """Find room in the cluster for all ranks, start them, and wait until each has loaded its part of the model."""
    join(None, config.ray_allow_open_dashboard, log_to_driver=True)
    ranks = Ranks.start(config, progress)
    try:
        here = ray.get_runtime_context().get_node_id()
        local = [rank for rank, place in enumerate(ranks.places) if place.node == here]
        hub = Hub(ray.util.get_node_ip_address())
        ring = MessageQueue.create(len(local), slots=RING_SLOTS, slot_bytes=SLOT_BYTES) if local else None
        workers = ranks.run(config, hub, ring, local)
    except BaseException:
        ranks.end()
        raise
    remote = [rank for rank in range(len(workers)) if rank not in local]
    worker_watch = WorkerWatch(list(workers), Voices(hub, workers, ranks))
    return RankedExecutor(worker_watch, Spread(hub, ring, remote), progress, deadline_s)


class Ranks:
    """The actors and the room they have in the cluster, by rank: those of one node side by side, the driver's first."""

    def __init__(self, group: Any, actors: list[Any], places: list[Place]) -> None:
        self._group, self.actors, self.places = group, actors, places

    @classmethod
    def start(cls, config: ExecutorConfig, progress: Callable[[str], None]) -> "Ranks":
        world = config.tensor_parallel_size
        need = {"CPU": 1.0} if config.device == "cpu" or not ray.cluster_resources().get("GPU") else {"GPU": 1.0}
        group = _room(need, world)
        try:
            actors = [
                ray.remote(RankActor)
                .options(
                    num_cpus=need.get("CPU", 0),
                    num_gpus=need.get("GPU", 0),
                    max_concurrency=2,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
                )
                .remote()
                for index in range(world)
            ]
            places = [Place(*place) for place in ray.get([a.place.remote() for a in actors], timeout=ACTOR_TIMEOUT_S)]
        except (RayError, GetTimeoutError) as error:
            remove_placement_group(group)
            raise ExecutorError(f"executor: Ray could not start {world} ranks: {error}") from error
        here = ray.get_runtime_context().get_node_id()
        order = sorted(range(world), key=lambda index: (places[index].node != here, places[index].node, index))
        nodes = len({place.node for place in places})
        progress(f"{world} ranks on {nodes} node{'s' * (nodes > 1)} of the Ray cluster")
        return cls(group, [actors[index] for index in order], [places[index] for index in order])

    def run(self, config: ExecutorConfig, hub: Hub, ring: MessageQueue | None, local: list[int]) -> list["Actor"]:
        """Tell every actor what it is; from here on they talk through hub and ring."""
        host = self.places[0].address
        fd, port = ray.get(self.actors[0].listen.remote(host), timeout=ACTOR_TIMEOUT_S)
        workers = []
        for rank, (actor, place) in enumerate(zip(self.actors, self.places, strict=True)):
            start = Start(
                config,
                rank,
                len(self.actors),
                sum(other.node == place.node for other in self.places),
                0,  # Ray shows each actor its own GPU alone
                Rendezvous(host, port, place.address, fd if rank == 0 else None),
                ring.handle().pack() if ring is not None and rank in local else None,
                local.index(rank) if rank in local else 0,
            )
            done = actor.run.remote(msgspec.msgpack.encode(start), msgspec.msgpack.encode(hub.ticket(rank)))
            workers.append(Actor(rank, place, actor, done, hub))
        return workers

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def _room(need: dict[str, float], world: int) -> Any:
    group = placement_group([need] * world, strategy="PACK")
    try:
        ray.get(group.ready(), timeout=PLACE_TIMEOUT_S)
    except GetTimeoutError:
        remove_placement_group(group)
        ((kind, _),) = need.items()
        total, free = ray.cluster_resources().get(kind, 0), ray.available_resources().get(kind, 0)
        raise ExecutorError(
            f"tensor_parallel_size: {world} given; every rank needs one {kind}, and the Ray cluster has {total:g}, "
            f"{free:g} of them free"
        ) from None
    return group


class RankActor:
    """What runs in the actor's process. One thread computes; the other answers Ray."""

    def place(self) -> tuple[str, str, int]:
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def listen(self, host: str) -> tuple[int, int]:
        """Bind the port that the ranks will meet at, so that nobody else can."""
        self._listener = socket.create_server((host, 0), backlog=256)
        return self._listener.fileno(), self._listener.getsockname()[1]

    def run(self, start: bytes, ticket: bytes) -> None:
        from penstock.executor.ranks import worker

        told = msgspec.msgpack.decode(start, type=Start)
        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        link = Spoke(msgspec.msgpack.decode(ticket, type=Ticket), lambda message: _sort(message, inbox), _end)
        voice = worker.Voice(link.say)
        voice.beat(_end)
        try:
            if told.ring is None:
                worker.compute(told, lambda: nullcontext(inbox.get()), voice)
            else:
                with MessageQueue.attach(MessageQueue.unpack_handle(told.ring), told.reader) as ring:
                    worker.compute(told, ring.borrow, voice)
        except Exception as error:  # the top of the process: say why
            voice.say(worker.failure(error))
        voice.hush()
        link.close()


def _sort(message: list[memoryview], inbox: "queue.SimpleQueue[Any]") -> None:
    if message[0] == STACKS:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    else:
        inbox.put(message)


def _end() -> NoReturn:
    os._exit(1)


class Actor:
    """One rank's actor, as the worker_watch touches it."""

    def __init__(self, rank: int, place: Place, actor: Any, done: Any, hub: Hub) -> None:
        self.rank, self._actor, self._done, self._hub = rank, actor, done, hub
        self.name = f"rank {rank} (process {place.pid} on {place.address})"
        self.pid = place.pid
        self._ending: str | None = None

    def dump_stacks(self) -> None:
        self._hub.tell(self.rank, [STACKS])

    def wait(self, timeout_s: float) -> bool:
        return bool(ray.wait([self._done], timeout=timeout_s)[0])

    def death(self) -> str | None:
        if self._ending is None and self.wait(0):
            try:
                ray.get(self._done)
                self._ending = "has left"
            except RayActorError as error:
                self._ending = f"has died: {' '.join(str(error).split())}"
            except RayError as error:
                self._ending = f"has failed: {error}"
        return self._ending

    def kill(self) -> None:
        ray.kill(self._actor)


class Voices:
    """The worker_watch's post: what the hub hears, and from time to time what Ray knows of actors that say nothing."""

    def __init__(self, hub: Hub, workers: list[Actor], ranks: Ranks) -> None:
        self._hub, self._workers, self._ranks = hub, workers, ranks
        self._checked_s = time.monotonic()
        self._is_open = True
        self._gone: set[int] = set()

    def fileno(self) -> int:
        return self._hub.fileno()

    def pump(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        for rank, message in self._hub.hear(timeout_s):
            yield rank, message
            if isinstance(message, Failed):
                self._gone.add(rank)
        if time.monotonic() - self._checked_s > LIFE_CHECK_S:
            self._checked_s = time.monotonic()
            for worker in self._workers:
                if worker.rank not in self._gone and worker.death() is not None:
                    self._gone.add(worker.rank)
                    yield worker.rank, None

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._ranks.end()
            self._hub.close()


class Spread:
    """Tells every rank the same: those of this node through the ring, the others through the hub."""

    def __init__(self, hub: Hub, ring: MessageQueue | None, remote: list[int]) -> None:
        self._hub, self._ring, self._remote = hub, ring, remote

    def send(self, message: tuple[Any, ...], timeout_s: float | None = None) -> None:
        for rank in self._remote:
            if message[0] != MASKS or rank == 0:  # who does not sample needs no masks
                self._hub.tell(rank, message)
        if self._ring is not None:
            self._ring.send(message, timeout_s=timeout_s)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

"""The executor on the nodes of a running Ray cluster: one actor per rank, each with its own GPU (or core).

Ray places and starts the actors and ends them with their driver; steps do not go through Ray. Ranks on the driver's
node receive steps through the shared-memory ring, other ranks over encrypted TCP (executor/ranks/network.py); all of
them reply over TCP. executor/ranks/worker_watch.py watches them, and executor/ranks/ranked.py runs steps on them.
"""

import contextlib
import faulthandler
import ipaddress
import os
import queue
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from penstock.executor.process_life import Reporter
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.ranks.network import Hub, Spoke, Ticket
from penstock.executor.ranks.ranked import RING_SLOTS, SLOT_BYTES, RankedExecutor
from penstock.executor.ranks.wire import Failed, FromWorker, MessageKind, Rendezvous, Start
from penstock.executor.ranks.worker_watch import WorkerWatch
from penstock.executor.ring import MessageQueue

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ExecutorError("executor: 'ray' needs the package ray: pip install 'penstock[ray]'") from error

PLACE_TIMEOUT_S = 30.0  # for the cluster to find resources for all ranks
ACTOR_TIMEOUT_S = 120.0  # for the processes to start: on a new node Ray imports this package first
LIFE_CHECK_S = 0.5
EXIT_S = 10  # for Ray to end the process of an actor whose work is done


class Location(NamedTuple):
    node: str
    address: str
    pid: int


def open_ray(config: ExecutorConfig, progress: Callable[[str], None] = lambda _line: None) -> RankedExecutor:
    """Find resources in the cluster, start all ranks, and wait until each has loaded its part of the model."""
    _join_cluster(config.ray_allow_open_dashboard)
    ranks = RayRanks(Hub(ray.util.get_node_ip_address()))
    try:
        ranks.start(config, progress)
    except BaseException as error:
        ranks.close()
        if not isinstance(error, RayError):
            raise
        raise ExecutorError(f"executor: Ray could not start {config.tensor_parallel_size} ranks: {error}") from error
    return RankedExecutor(WorkerWatch(ranks.workers, ranks), ranks, progress)


def _join_cluster(allow_open_dashboard: bool) -> None:
    """Join the cluster in RAY_ADDRESS or on this machine; refuse one whose dashboard accepts jobs from the network."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        with contextlib.chdir("/"):  # Ray lets the actors import from the current directory, which may be a model's
            context = ray.init(address=address, ignore_reinit_error=True, log_to_driver=True)
    except (ConnectionError, ValueError, RayError) as error:
        raise ExecutorError(
            f"executor: no Ray cluster can be reached ({error}); start one with `ray start --head`, "
            "or name it in RAY_ADDRESS"
        ) from error
    url = context.dashboard_url
    if url and is_open(url) and not allow_open_dashboard:
        raise ExecutorError(
            f"executor: Ray's dashboard at {url} takes jobs from every client that can reach it. Start Ray with "
            "--dashboard-host 127.0.0.1 or with RAY_AUTH_MODE=token, or set ray_allow_open_dashboard"
        )


def is_open(dashboard: str) -> bool:
    """Tell whether other machines can use a dashboard at this address without a token."""
    host = urlsplit(dashboard if "//" in dashboard else f"//{dashboard}").hostname or ""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class RayRanks:
    """The placement group and actors of all ranks. Sends their messages, and receives reports through the hub and from
    Ray, which detects actors that died without a report."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._ring: MessageQueue | None = None
        self._remote = range(0)
        self._group: Any = None
        self.workers: list[ActorProcess] = []
        self._checked_s = time.monotonic()
        self._gone: set[int] = set()

    def start(self, config: ExecutorConfig, progress: Callable[[str], None]) -> None:
        """Start the ranks, grouped by node, the driver's node first. Afterwards they use only the hub and the ring."""
        world = config.tensor_parallel_size
        need = {"CPU": 1.0} if config.device == "cpu" or not ray.cluster_resources().get("GPU") else {"GPU": 1.0}
        self._group = _room(need, world)
        here = ray.get_runtime_context().get_node_id()
        placed = sorted(_actors(self._group, need, world), key=lambda pair: (pair[0].node != here, pair[0].node))
        locations = [location for location, _ in placed]
        nodes = len({location.node for location in locations})
        progress(f"{world} ranks on {nodes} node{'s' * (nodes > 1)} of the Ray cluster")
        num_local = sum(location.node == here for location in locations)
        self._remote = range(num_local, world)
        if num_local:
            self._ring = MessageQueue.create(num_local, slots=RING_SLOTS, slot_bytes=SLOT_BYTES)
        host = locations[0].address
        fd, port = ray.get(placed[0][1].listen.remote(host), timeout=ACTOR_TIMEOUT_S)
        for rank, (location, actor) in enumerate(placed):
            is_local = location.node == here
            start = Start(
                config,
                rank,
                world,
                sum(other.node == location.node for other in locations),
                0,  # Ray shows each actor only its own GPU
                Rendezvous(host, port, location.address, fd if rank == 0 else None),
                self._ring.handle() if self._ring is not None and is_local else None,
            )
            done = actor.run.remote(msgspec.msgpack.encode(start), msgspec.msgpack.encode(self._hub.ticket(rank)))
            self.workers.append(ActorProcess(rank, location, actor, done, self._hub))

    def send(self, message: tuple[Any, ...], timeout_s: float | None = None) -> None:
        """Send all ranks the same message: through the ring on this node, through the hub on others."""
        for rank in self._remote:
            if message[0] != MessageKind.MASKS or rank == 0:  # only the first rank samples
                self._hub.send(rank, message)
        if self._ring is not None:
            self._ring.send(message, timeout_s=timeout_s)

    def fileno(self) -> int:
        return self._hub.fileno()

    def receive(self, timeout_s: float) -> Iterator[tuple[int, FromWorker | None]]:
        for rank, message in self._hub.receive(timeout_s):
            yield rank, message
            if isinstance(message, Failed):
                self._gone.add(rank)
        if time.monotonic() - self._checked_s > LIFE_CHECK_S:
            self._checked_s = time.monotonic()
            for rank, worker in enumerate(self.workers):
                if rank not in self._gone and worker.death() is not None:
                    self._gone.add(rank)
                    yield rank, None

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        if self._group is not None:
            remove_placement_group(self._group)  # ends actors that have not become workers
            self._group = None
        self._hub.close()
        if self._ring is not None:
            self._ring.close()


def _actors(group: Any, need: dict[str, float], world: int) -> list[tuple[Location, Any]]:
    """Create an actor for each rank and return it with its place, once its process runs."""
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
    locations = ray.get([actor.location.remote() for actor in actors], timeout=ACTOR_TIMEOUT_S)
    return [(Location(*location), actor) for location, actor in zip(locations, actors, strict=True)]


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
    """The class of the actor. One thread computes; the other answers Ray."""

    def location(self) -> tuple[str, str, int]:
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def listen(self, host: str) -> tuple[int, int]:
        """Bind the rendezvous port of the ranks, so that no other process can take it."""
        self._listener = socket.create_server((host, 0), backlog=256)
        return self._listener.fileno(), self._listener.getsockname()[1]

    def run(self, start: bytes, ticket: bytes) -> None:
        from penstock.executor.ranks import worker

        inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        spoke = Spoke(msgspec.msgpack.decode(ticket, type=Ticket), lambda message: _sort(message, inbox))
        reporter = Reporter(spoke.report)
        worker.work(msgspec.msgpack.decode(start, type=Start), reporter, lambda: nullcontext(inbox.get()))
        signal.alarm(EXIT_S)  # ends the process although Ray does not, or hangs while it does
        reporter.close()
        spoke.close()


def _sort(message: list[memoryview], inbox: "queue.SimpleQueue[Any]") -> None:
    if message[0] == MessageKind.STACKS:
        faulthandler.dump_traceback(file=sys.__stderr__ or 2)
    else:
        inbox.put(message)


class ActorProcess:
    """The `Worker` of one rank's actor, for the worker watch."""

    def __init__(self, rank: int, location: Location, actor: Any, done: Any, hub: Hub) -> None:
        self._rank, self._actor, self._done, self._hub = rank, actor, done, hub
        self.name = f"rank {rank} (process {location.pid} on {location.address})"
        self.pid = location.pid
        self._ending: str | None = None

    def dump_stacks(self) -> None:
        with contextlib.suppress(ConnectionError):  # an unreachable rank cannot be asked
            self._hub.send(self._rank, [MessageKind.STACKS])

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

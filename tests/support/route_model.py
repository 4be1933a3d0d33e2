"""The router's placement under simulated time, over replicas that are models of engines. Benchmarks and tests share it.

Nothing of the router is replaced but its clock and its sockets: event frames arrive after a lag, first tokens and ends
are reported to the charges. A model replica prefills one prompt after the other, keeps a least-recently-used cache of
blocks, and decodes at a fixed pace; answers in flight may slow its prefill.
"""

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from penstock.engine.http.kv_stream import Alive, Changes, Frame, Hello, Snapshot
from penstock.router.placement.index import Keys, KeySpace
from penstock.router.placement.load import Charge, PolicyConfig
from penstock.router.placement.placement import Placement, Prompt, ReplicaInfo

BLOCK_SIZE = 512  # of the traces' hash ids
SPACE = KeySpace(b"simulated", BLOCK_SIZE)


class Arrival(NamedTuple):
    at_s: float
    num_tokens: int
    num_outputs: int
    keys: Keys
    session: str | None = None


class Outcome(NamedTuple):
    replica: str
    ttft_s: float
    cached_tokens: int
    predicted_cached_tokens: int
    num_tokens: int


class World:
    """Simulated time: what is due happens in order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now_s

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now_s + seconds, next(self._count), action))

    def run_until(self, at_s: float) -> None:
        while self._due and self._due[0][0] <= at_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = at_s

    def run(self) -> None:
        while self._due:
            self.run_until(self._due[0][0])


class ModelReplica:
    """Serial prefill, LRU blocks, paced decode, events. `say` receives frames; a test may lose or forge them."""

    def __init__(self, world: World, name: str, settings: "Settings", say: Callable[[str, Frame], None]) -> None:
        self.world, self.name, self.settings = world, name, settings
        self.cache: OrderedDict[int, None] = OrderedDict()
        self.seq = 0
        self.num_tokens_done = 0
        self._say = say
        self._queue: deque[tuple[Arrival, Charge]] = deque()
        self._num_decoding = 0
        self._is_busy = False
        self.outcomes: list[Outcome] = []

    def send(self, arrival: Arrival, charge: Charge) -> None:
        self._queue.append((arrival, charge))
        if not self._is_busy:
            self._start()

    def snapshot(self) -> list[Frame]:
        keys = np.fromiter(self.cache, dtype=np.uint64).tobytes()
        num_blocks = self.settings.num_blocks
        hello = Hello(self.name, "sha256", SPACE.fingerprint, BLOCK_SIZE, num_blocks)
        return [hello, Snapshot(self.seq, "device", keys, True, True)]

    def _start(self) -> None:
        self._is_busy = True
        arrival, charge = self._queue.popleft()
        keys = arrival.keys.tolist()
        num_hit = next((index for index, key in enumerate(keys) if key not in self.cache), len(keys))
        cached = min(num_hit * BLOCK_SIZE, arrival.num_tokens - 1)
        speed = self.settings.tokens_per_s * max(1.0 - self.settings.interference * self._num_decoding, 0.1)
        self.world.after((arrival.num_tokens - cached) / speed, lambda: self._finish(arrival, charge, cached, keys))

    def _finish(self, arrival: Arrival, charge: Charge, cached: int, keys: list[int]) -> None:
        self.num_tokens_done += arrival.num_tokens - cached
        self._keep(keys)
        charge.first_token(cached)
        ttft_s = self.world.now_s - arrival.at_s
        self.outcomes.append(Outcome(self.name, ttft_s, cached, charge.predicted_cached_tokens, arrival.num_tokens))
        self._num_decoding += 1
        self.world.after(arrival.num_outputs * self.settings.token_s, lambda: self._end(charge))
        self._is_busy = False
        if self._queue:
            self._start()

    def _end(self, charge: Charge) -> None:
        self._num_decoding -= 1
        charge.release(True)

    def _keep(self, keys: list[int]) -> None:
        cache = self.cache
        stored = [key for key in keys if key not in cache]
        for key in reversed(keys):  # the start of a chain is evicted last
            cache[key] = None
            cache.move_to_end(key)
        removed = [cache.popitem(last=False)[0] for _ in range(len(cache) - self.settings.num_blocks)]
        self.seq += 1
        gone = set(removed)
        stored = [key for key in stored if key not in gone]
        frame = Changes(self.seq, "device", _packed(stored), _packed(removed))
        self.world.after(self.settings.lag_s, lambda: self._say(self.name, frame))


class Settings(NamedTuple):
    num_replicas: int = 8
    tokens_per_s: float = 12_000.0
    num_blocks: int = 1_000_000 // BLOCK_SIZE
    lag_s: float = 0.010
    token_s: float = 0.02
    interference: float = 0.0  # of its prefill speed, what each answer in flight costs a replica
    num_routers: int = 1  # arrivals take turns; a router sees all replicas' events, but the load of its own requests
    has_events: bool = True  # otherwise the routers guess the caches


class Simulation:
    def __init__(self, settings: Settings, policy: PolicyConfig, seed: int = 0) -> None:
        self.world = World()
        self.settings = settings
        self.routers = [Placement(policy, self.world, seed + number) for number in range(settings.num_routers)]
        self.placement = self.routers[0]
        self._turns = itertools.cycle(self.routers)
        self.say: Callable[[str, Frame], None] = self.tell if settings.has_events else lambda name, frame: None
        self.replicas = {
            name: ModelReplica(self.world, name, settings, lambda name, frame: self.say(name, frame))
            for name in (f"r{number}" for number in range(settings.num_replicas))
        }
        info = ReplicaInfo(SPACE.fingerprint, BLOCK_SIZE, settings.num_blocks)
        for name, replica in self.replicas.items():
            for router in self.routers:
                router.add_replica(name, info)
                router.set_available(name, True)
            for frame in replica.snapshot():
                self.say(name, frame)

    def tell(self, name: str, frame: Frame) -> None:
        for router in self.routers:
            router.apply_events(name, [frame])

    def arrive(self, arrival: Arrival) -> None:
        prompt = Prompt(arrival.num_tokens, ((SPACE, arrival.keys),))
        charge = next(self._turns).choose(prompt, num_tokens=arrival.num_tokens, session=arrival.session)
        assert charge is not None
        self.replicas[charge.replica].send(arrival, charge)

    def run(self, arrivals: Iterable[Arrival], every: Callable[["Simulation"], None] = lambda simulation: None) -> None:
        """Play the trace to its end. Replicas that have nothing to say say so every second; then `every` is called."""
        next_second = 1.0
        for arrival in arrivals:
            while next_second <= arrival.at_s:
                self.world.run_until(next_second)
                for name, replica in self.replicas.items():
                    seq = replica.seq
                    self.world.after(self.settings.lag_s, lambda name=name, seq=seq: self.say(name, Alive(seq)))  # type: ignore[misc]
                every(self)
                next_second += 1.0
            self.world.run_until(arrival.at_s)
            self.arrive(arrival)
        self.world.run()

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for replica in self.replicas.values() for outcome in replica.outcomes]

    def report(self) -> dict[str, float]:
        ttft = np.array([outcome.ttft_s for outcome in self.outcomes])
        work = [replica.num_tokens_done for replica in self.replicas.values()]
        prompt = sum(outcome.num_tokens for outcome in self.outcomes)
        return {
            "hit": sum(outcome.cached_tokens for outcome in self.outcomes) / prompt,
            "predicted_hit": sum(outcome.predicted_cached_tokens for outcome in self.outcomes) / prompt,
            **{f"ttft_p{p}_s": float(np.percentile(ttft, p)) for p in (50, 95, 99)},
            "imbalance": max(work) / (sum(work) / len(work)),
        }


def pooled_hit(arrivals: Iterable[Arrival], num_blocks: int) -> float:
    """Return the hit rate of one least-recently-used cache of all the replicas' blocks, without any delay."""
    cache: OrderedDict[int, None] = OrderedDict()
    hit = prompt = 0
    for arrival in arrivals:
        keys = arrival.keys.tolist()
        num_hit = next((index for index, key in enumerate(keys) if key not in cache), len(keys))
        hit += min(num_hit * BLOCK_SIZE, arrival.num_tokens - 1)
        prompt += arrival.num_tokens
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > num_blocks:
            cache.popitem(last=False)
    return hit / prompt


def _packed(keys: list[int]) -> bytes:
    return np.array(keys, dtype="<u8").tobytes()

"""The engine core: the scheduler and the executor, driven step by step from one thread.

It handles neither sockets nor text. The core process (engine/core/process.py) and the offline LLM
(engine/front/llm.py) call it; they own the loop.
"""

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import msgspec

from penstock.cache.keys import SHORT_KEY_BYTES
from penstock.cache.pool import BlockPool
from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.constraints import Constraints
from penstock.engine.core.grammars import GrammarCompiler
from penstock.engine.core.page_keys import PageKeys
from penstock.engine.core.pause import PauseController
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.usable import UsableKeys
from penstock.engine.messages import CacheUpdate, KeyedBlock, Output, Stats, Submit
from penstock.executor.protocol import (
    AdapterError,
    AdapterInfo,
    Executor,
    ExpertUpdate,
    ModelInfo,
    Step,
    step_deadline_s,
)

log = logging.getLogger("penstock.engine")

POLL_S = 0.0005  # interval of polling stores while nothing computes
SETTLE_S = 3.0  # how long closing waits for the stores; shorter than the server waits for its core
RESET_S = 1.0  # how long a reset waits for the stores; new requests wait as well


class EngineCore:
    """The scheduler and the executor. Every submitted request ends in exactly one output with a finish reason, from
    `abort` or `step`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        compiler: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `compiler`, no request may have a grammar."""
        self.executor = executor
        self.scheduler = Scheduler(_scheduler_config(config, executor.info), executor.info, clock)
        self.constraints = Constraints(self.scheduler, executor, compiler)
        kv = self.scheduler.kv
        pools: Mapping[str, BlockPool | UsableKeys] = kv.pools
        if len(executor.info.groups) > 1:
            pools = {tier: UsableKeys(pool, kv) for tier, pool in kv.pools.items()}
        self.cache_log = CacheLog(pools, kv.keys)
        self._clock = clock
        self.last_step_tokens = 0  # tokens of the step that `step` collected
        self.pauses = PauseController(executor, self.scheduler, partial(self.step, plans=False))
        self._experts: ExpertUpdate | None = None
        self._adapters: Counter[str] = Counter()  # number of references; 0: unloaded after its last request
        self.scheduler.on_end = self._drop_adapter
        self.step_ends_s: float | None = None  # deadline of the running step; read by the heartbeat thread
        if executor.info.stores:
            self.step()  # an empty step, whose result reports the keys of earlier engines

    @property
    def info(self) -> ModelInfo:
        return self.executor.info

    def load_adapter(self, path: str) -> AdapterInfo:
        """Load a LoRA adapter, or count one more reference to it; raise AdapterError if it cannot be used."""
        if not self.info.max_loras:
            raise AdapterError("enable_lora: not given; this engine takes no adapters")
        info = self.executor.load_adapter(path)
        self._adapters[info.key] += 1
        return info

    def unload_adapter(self, key: str) -> None:
        """Drop one reference to the adapter. It is unloaded once no reference and no request with it is left."""
        self._adapters[key] -= 1
        self._drop_adapter(key)

    def _drop_adapter(self, key: str | None) -> None:
        if key is None or self._adapters[key]:
            return
        if not any(request.message.adapter == key for request in self.scheduler.requests.values()):
            del self._adapters[key]
            self.executor.unload_adapter(key)

    def submit(self, message: Submit) -> None:
        assert message.adapter is None or self._adapters[message.adapter], "the adapter is not loaded"
        if message.grammar is None:
            self.scheduler.submit(message)
        else:
            self.constraints.submit(message)

    def abort(self, request_id: str) -> Output | None:
        return self.scheduler.abort(request_id)

    def has_work(self) -> bool:
        return bool(self.scheduler.in_flight) if self.pauses.is_paused else self.scheduler.has_work()

    def _runs(self, step: Step | None) -> None:
        """Record that this step (None: no step) runs from now on, because the previous one has ended."""
        self.step_ends_s = (
            None if step is None else self._clock() + step_deadline_s(_num_tokens(step), self.info.device)
        )

    def step(self, plans: bool = True) -> list[Output]:
        """Keep the executor's pipeline full if `plans`, then apply the oldest result.

        The masks of constrained rows depend on all earlier tokens. So the masks of a step that is submitted behind
        another are set as soon as that one is collected; those of a single step are filled while it computes.
        """
        scheduler, constraints = self.scheduler, self.constraints
        outputs = constraints.take_compiled()
        self.last_step_tokens = 0
        if self.pauses.is_paused and scheduler.requests:
            plans = False
        while plans and len(scheduler.in_flight) < self.info.max_in_flight:
            step = scheduler.schedule()
            if step is None:
                break
            if self.step_ends_s is None:
                self._runs(step)
            if len(scheduler.in_flight) > 1:
                self.executor.submit(step)
            else:
                constraints.begin_masks()
                self.executor.submit(step)
                outputs += constraints.set_masks()
        if not scheduler.in_flight:
            if not plans:
                return outputs
            if scheduler.held:
                return outputs + constraints.wait_for_compiled()
            # A pool that holds the longest request alone can always admit one.
            assert not scheduler.has_work(), "requests wait, and nothing runs that could make room"
            return outputs
        result = self.executor.collect()
        self.last_step_tokens = _num_tokens(scheduler.in_flight[0].step)
        self._runs(scheduler.in_flight[1].step if len(scheduler.in_flight) > 1 else None)
        self._experts = result.experts or self._experts
        outputs += scheduler.apply(result)
        if scheduler.in_flight:
            outputs += constraints.set_masks()
        transfers = result.transfers
        if not result.tokens and transfers and not (transfers.completions or transfers.num_copied):
            time.sleep(POLL_S)
        return outputs

    def stats(self, with_tiers: bool = True) -> Stats:
        """Return gauges and counters. Collecting those of the tiers takes as long as planning a short step."""
        stats = self.scheduler.stats(with_tiers)
        return stats if self._experts is None else msgspec.structs.replace(stats, experts=self._experts)

    @property
    def is_settled(self) -> bool:
        """True if no block is in flight between the tiers. Otherwise an idle core continues to step, unless it is
        paused."""
        return self.scheduler.tiers.is_idle or self.pauses.is_paused

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """While there are no requests, step until the last computed blocks have reached the tiers, also in a pause."""
        ends_s = time.monotonic() + timeout_s
        while not (self.scheduler.requests or self.pauses.asleep) and time.monotonic() < ends_s:
            if self.scheduler.tiers.is_idle and not self.scheduler.in_flight:
                return
            self.step()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached content in all tiers; return False while requests run or transfers do not end."""
        self.settle(RESET_S)
        if not (self.scheduler.has_work() or self.pauses.asleep):
            self.scheduler.tiers.wake()
            self.step()  # takes the keys that peers and the disk have reported since the last step, to forget them too
        is_reset = self.scheduler.reset_prefix_cache()
        self.settle(RESET_S)  # a step tells the ranks
        return is_reset

    def close(self) -> None:
        self.settle()
        self.constraints.close()
        self.executor.close()


def _scheduler_config(config: EngineConfig, info: ModelInfo) -> SchedulerConfig:
    """Return the scheduler's options, without drafts where they cost more than they save."""
    has_graphs = info.device == "cuda" and not config.executor.enforce_eager
    has_states = info.groups[-1].kind == "state"
    speculative = config.scheduler.speculative_config
    if speculative is None or speculative.method == "mtp" or not (has_graphs and has_states):
        return config.scheduler
    log.warning(
        "speculative_config: drafts are off; with recurrent layers, CUDA graphs only have rows for those of 'mtp'"
    )
    return msgspec.structs.replace(config.scheduler, speculative_config=None)


def _num_tokens(step: Step) -> int:
    return sum(row.count for row in step.rows)


class CacheLog:
    """Reports cached keys for routers: all keys once, then the net changes of every step. Without a watcher nothing is
    recorded."""

    def __init__(self, pools: Mapping[str, BlockPool | UsableKeys], keys: PageKeys) -> None:
        self._pools, self._keys = pools, keys
        self._is_new = False  # the next updates are snapshots
        self._blocks: list[KeyedBlock] = []  # whose keys were computed since the last update

    def watch(self, is_on: bool, with_blocks: bool = False) -> None:
        self._is_new = is_on
        for pool in self._pools.values():
            pool.watch(is_on)
        self._blocks.clear()
        self._keys.on_keys = self._add_blocks if is_on and with_blocks else None

    def _add_blocks(self, request: Request, first: int) -> None:
        keys, tokens, message = request.kv.keys, request.tokens, request.message
        size = self._keys.block_size
        for block in range(first, len(keys)):
            parent = keys[block - 1][:SHORT_KEY_BYTES] if block else b""
            content = tokens[block * size : (block + 1) * size].tobytes()
            salt = None if block else message.cache_salt
            self._blocks.append(KeyedBlock(keys[block][:SHORT_KEY_BYTES], parent, content, message.adapter, salt))

    def updates(self) -> list[CacheUpdate]:
        """Return the changes since the last call; nothing without a watcher."""
        found = []
        for tier, pool in self._pools.items():
            added, removed = pool.take_changes()
            if self._is_new:
                found.append(CacheUpdate(tier, shortened(pool.cached_keys()), b"", True))
            elif added or removed or self._blocks:  # hits change no pool, and their blocks must not pile up
                blocks, self._blocks = self._blocks, []
                found.append(CacheUpdate(tier, shortened(added), shortened(removed), blocks=blocks))
        self._is_new = False
        return found


def shortened(keys: Iterable[bytes]) -> bytes:
    return b"".join([key[:SHORT_KEY_BYTES] for key in keys])


def settle_garbage() -> None:
    """Exempt the objects made at the start from garbage collection: they live as long as the process, and scanning them
    again and again would stall steps."""
    gc.collect()
    gc.freeze()

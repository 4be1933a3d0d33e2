"""One rank's part in the tiers: the host slots, the stores beneath them, and the copies between slots and blocks.

Whoever runs steps calls `begin` when a step starts and `end` for its result. Nothing here decides anything, and
nothing imports torch: how a block is copied is the copier's business (`NumpyCopier` where the device's memory is
the host's, executor/tiers/cuda_copies.py where it is not).
"""

import hashlib
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.cache.tiers.base import DISK, SERVED, Store, peer_name
from penstock.cache.tiers.memory import huge_array
from penstock.executor.protocol import ExecutorConfig, ExecutorError, TransferResult, Transfers
from penstock.executor.tiers.peers import SERVE_BYTES, Bytes, open_peers, serve
from penstock.executor.tiers.served import Served

ALIGNMENT = 4096  # a slot starts on a page, so that a store may read straight into it
STAGING_BYTES = 2**30  # of the host, where a disk or a peer is given and no host tier: bytes pass through it
STATS_EVERY_S = 1.0

Pairs = Sequence[tuple[int, int]]


class Copier(Protocol):
    """Moves blocks. Copies of one `start` come after the rows of earlier steps and run beside those of their own."""

    def begin_step(self, written: Iterable[int]) -> None:
        """The rows from here on come after all restores that were started so far, and after all saves of the blocks that
        are theirs to write from now on."""
        ...

    def start(self, saves: Pairs, restores: Pairs) -> None: ...

    def finish(self) -> float:
        """Wait for the copies of the oldest `start` that has not been finished; how many seconds they took."""
        ...

    def settle(self, slots: Iterable[int]) -> None:
        """Wait until no copy reads or writes these host slots: a store is about to."""
        ...


def host_slots(config: ExecutorConfig, block_bytes: int) -> int:
    """How many blocks the host tier of one rank holds; what was asked for and cannot be is an error."""
    if not (config.kv_disk_path or config.kv_host_bytes or config.kv_peers or config.kv_peer_listen):
        return 0
    asked = config.kv_host_bytes or min(config.kv_disk_bytes or STAGING_BYTES, STAGING_BYTES)
    name = "kv_disk_bytes" if config.kv_disk_path and not config.kv_host_bytes else "kv_host_bytes"
    slots = asked // config.tensor_parallel_size // _stride(block_bytes)
    if slots < 2:
        raise ExecutorError(
            f"{name}: {asked} given; a block takes {_stride(block_bytes)} bytes on each of "
            f"{config.tensor_parallel_size} ranks, and at least two are needed"
        )
    return slots


def tier_memory(config: ExecutorConfig, slots: int, block_bytes: int) -> dict[str, int]:
    """For `ModelInfo.memory`: what one rank's tiers take."""
    memory = {"host tier": (slots + 1) * _stride(block_bytes)} if slots else {}
    if config.kv_disk_path:
        memory["disk tier"] = config.kv_disk_bytes // config.tensor_parallel_size
    if config.kv_peer_listen:
        memory["for peers"] = SERVE_BYTES
    return memory


def host_arena(slots: int, block_bytes: int) -> np.ndarray:
    """uint8 [slots + 1, bytes of a slot]; slot 0 is never used. Memory is taken as slots are first written."""
    return huge_array(slots + 1, _stride(block_bytes))


def open_stores(config: ExecutorConfig, block: Bytes) -> dict[str, Store]:
    """This rank's stores, by name, nearest first."""
    return _open_disk(config, block) | open_peers(config, block)


def store_names(config: ExecutorConfig) -> tuple[str, ...]:
    return (DISK,) * bool(config.kv_disk_path) + tuple(map(peer_name, config.kv_peers))


def block_of(config: ExecutorConfig, block_bytes: int, fingerprint: bytes, rank: int = 0) -> Bytes:
    ranks = config.tensor_parallel_size
    return Bytes(block_bytes, rank_fingerprint(fingerprint, config.block_size, block_bytes, ranks, rank), rank)


def _open_disk(config: ExecutorConfig, block: Bytes) -> dict[str, Store]:
    if not config.kv_disk_path:
        return {}
    from penstock.cache.tiers.disk.tier import DiskTier

    try:
        disk = DiskTier(
            config.kv_disk_path,
            capacity_bytes=config.kv_disk_bytes // config.tensor_parallel_size,
            chunk_bytes=block.size,
            fingerprint=block.fingerprint,
        )
    except OSError as error:
        raise ExecutorError(f"kv_disk_path: {config.kv_disk_path!r}: {error.strerror or error}") from None
    except ValueError as error:
        raise ExecutorError(f"kv_disk_bytes: {error}") from None
    return {DISK: disk}


def rank_fingerprint(model: bytes, block_size: int, block_bytes: int, num_ranks: int, rank: int) -> bytes:
    """Names all that gives a rank's bytes their meaning. `model` covers the weights, the dtypes and the numbers; the
    first figure is the version of the keys and of the layout of a block."""
    return hashlib.sha256(struct.pack("<5Q", 1, block_size, block_bytes, num_ranks, rank) + model).digest()


def open_rank(
    config: ExecutorConfig, arena: np.ndarray, block: Bytes, copier: Copier, stores: dict[str, Store]
) -> "RankTransfers":
    return RankTransfers(
        arena, block.size, copier, stores, partial(serve, config, block) if config.kv_peer_listen else None
    )


class Content(NamedTuple):
    """What a slot will hold, if nothing else is written to it before."""

    slot: int
    key: bytes
    version: int


class Server(Protocol):
    """What gives blocks to peers, from a thread of its own (cache/tiers/peer/server.py)."""

    def call(self) -> None:
        """There is news of what can be had."""
        ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class RankTransfers:
    """Owns `arena`, `stores` and the transfers under way. One thread may begin steps while another ends them."""

    def __init__(
        self,
        arena: np.ndarray,
        block_bytes: int,
        copier: Copier,
        stores: dict[str, Store],
        serve: Callable[[Served], Server] | None = None,
    ) -> None:
        """`serve` starts what gives our blocks to peers, if anything should."""
        self._slots = arena[:, :block_bytes]
        self._copier = copier
        self._stores = stores
        self._loads: dict[tuple[str, int], tuple[int, Content | None]] = {}  # (store, its ticket) → ours
        self._puts: dict[bytes, int] = {}  # key → our ticket
        self._done: list[tuple[int, bool]] = []  # completions to report
        self._num_copied: list[int] = []  # blocks, by step under way
        self._saved: list[list[Content]] = []  # by step under way
        self._stats_at_s = 0.0
        self._were_open: list[bool] = []
        self._lock = threading.Lock()  # of the stores and what is known of them
        self._served = None if serve is None else Served(self._slots, stores, self._lock, self._poll)
        self._server = None if serve is None or self._served is None else serve(self._served)

    def begin(self, transfers: Transfers | None, written: Iterable[int] = ()) -> None:
        """Start a step's transfers; called before its rows are launched. written: the blocks that are new to the rows, as
        far as they write them."""
        self._copier.begin_step(written)
        if transfers is None:
            self._num_copied.append(0)
            self._saved.append([])
            return
        self._saved.append(self._withdraw(transfers))
        self._num_copied.append(len(transfers.saves) + len(transfers.restores))
        if self._num_copied[-1]:
            self._copier.start(transfers.saves, transfers.restores)
        # The core has seen the end of whatever used these slots before; this rank may lag behind the one it heard.
        used = [read[-1] for read in transfers.reads] + [write[-1] for write in transfers.writes]
        self._copier.settle(used)
        with self._lock:
            self._start(transfers)

    def end(self) -> TransferResult:
        """With the result of the oldest step that has begun: what has been completed since the last."""
        num_copied, saved = self._num_copied.pop(0), self._saved.pop(0)
        seconds = self._copier.finish() if num_copied else 0.0
        with self._lock:
            for content in saved:
                self._offer(content)
            result = self._report(num_copied, seconds)
        if self._server is not None and self._served is not None and self._served.has_changed:
            self._server.call()
        return result

    def close(self) -> None:
        """Nothing borrows a slot afterwards."""
        while self._num_copied:
            if self._num_copied.pop(0):
                self._copier.finish()
        if self._server is not None:
            self._server.close()
        with self._lock:
            for store in self._stores.values():
                store.close()

    def _withdraw(self, transfers: Transfers) -> list[Content]:
        """What this step overwrites is not given to peers any more; what it saves can be when it is over."""
        if self._served is None:
            return []
        with self._lock:
            if transfers.forget:
                self._served.forget()
            slots = [slot for _, slot in transfers.saves]
            versions = self._served.overwrite(slots)
        return [Content(*each) for each in zip(slots, transfers.saved_keys, versions, strict=True)]

    def _offer(self, content: Content | None) -> None:
        if content is not None and self._served is not None:
            self._served.fill(*content)

    def _start(self, transfers: Transfers) -> None:
        for ticket, name, key, slot in transfers.reads:
            content = None
            if self._served is not None:
                content = Content(slot, key, *self._served.overwrite([slot]))
            theirs = self._stores[name].start_load(key, memoryview(self._slots[slot]))
            if theirs is None:
                self._done.append((ticket, False))
            else:
                self._loads[name, theirs] = ticket, content
        if transfers.touches:
            self._stores[DISK].touch(transfers.touches)
        for ticket, key, slot in transfers.writes:
            if self._stores[DISK].put(key, memoryview(self._slots[slot])):
                self._puts[key] = ticket
            else:  # it is there already, or the queue is full
                self._done.append((ticket, self._stores[DISK].contains(key)))

    def _poll(self) -> None:
        """Take in what the stores have finished, for the core or for a peer; under the lock."""
        for name, store in self._stores.items():
            for completion in store.poll():
                if completion.kind == "store":
                    self._done.append((self._puts.pop(completion.key), completion.ok))
                elif self._served is not None and name == DISK and self._served.is_reading(completion.ticket):
                    self._served.end_read(completion.ticket, completion.ok)
                else:
                    ticket, content = self._loads.pop((name, completion.ticket))
                    self._done.append((ticket, completion.ok))
                    if completion.ok:
                        self._offer(content)

    def _report(self, num_copied: int, seconds: float) -> TransferResult:
        self._poll()
        found, lost = {}, {}
        for name, store in self._stores.items():
            came, went = store.changes()
            if came:
                found[name] = came
            if went:
                lost[name] = went
        if self._served is not None:
            self._served.note_disk(found.get(DISK, ()), lost.get(DISK, ()))
        done, self._done = self._done, []
        return TransferResult(done, found, lost, num_copied, seconds, self._stats())

    def _stats(self) -> dict[str, dict[str, float]]:
        """From time to time, and when a store can serve that could not, or the other way round."""
        now_s, are_open = time.monotonic(), [store.is_open for store in self._stores.values()]
        if now_s < self._stats_at_s and are_open == self._were_open:
            return {}
        self._stats_at_s, self._were_open = now_s + STATS_EVERY_S, are_open
        stats = {name: _numbers(store.stats()) for name, store in self._stores.items()}
        return stats if self._server is None else stats | {SERVED: _numbers(self._server.stats())}


class NumpyCopier:
    """Copies at once, where blocks and slots are both the host's memory."""

    def __init__(self, blocks: np.ndarray, arena: np.ndarray) -> None:
        self._blocks = blocks  # uint8 [blocks, bytes of a block]
        self._slots = arena[:, : blocks.shape[1]]
        self._seconds: list[float] = []

    def begin_step(self, written: Iterable[int]) -> None:
        pass

    def start(self, saves: Pairs, restores: Pairs) -> None:
        started_s = time.perf_counter()
        for block, slot in saves:
            self._slots[slot] = self._blocks[block]
        for slot, block in restores:
            self._blocks[block] = self._slots[slot]
        self._seconds.append(time.perf_counter() - started_s)

    def finish(self) -> float:
        return self._seconds.pop(0)

    def settle(self, slots: Iterable[int]) -> None:
        pass


class Merge:
    """Makes one result of those of all ranks. A rank's result counts when it comes; none is waited for."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, tuple[int, bool]] = {}  # ticket → ranks that have completed it, ok on all of them
        self._has: dict[str, Counter[bytes]] = {}  # store → key → ranks that have it

    def merge(self, results: Sequence[TransferResult]) -> TransferResult:
        """`results` in any number and order, each rank's own in the order it gave them."""
        completions = []
        stores: dict[str, dict[str, float]] = {}
        for result in results:
            for ticket, ok in result.completions:
                count, all_ok = self._open.pop(ticket, (0, True))
                if count + 1 == self._num_ranks:
                    completions.append((ticket, all_ok and ok))
                else:
                    self._open[ticket] = (count + 1, all_ok and ok)
            for name, numbers in result.stores.items():
                stores[name] = numbers  # of whichever rank spoke last: they all do the same
        found, lost = self._changes(results)
        num_copied = max((result.num_copied for result in results), default=0)  # every rank copies the same blocks
        slowest_s = max((result.copy_s for result in results), default=0.0)
        return TransferResult(completions, found, lost, num_copied, slowest_s, stores)

    def _changes(self, results: Sequence[TransferResult]) -> tuple[dict[str, list[bytes]], dict[str, list[bytes]]]:
        before: dict[tuple[str, bytes], bool] = {}
        for result in results:
            for changes, step in ((result.found, 1), (result.lost, -1)):
                for name, keys in changes.items():
                    has = self._has.setdefault(name, Counter())
                    for key in keys:
                        before.setdefault((name, key), has[key] == self._num_ranks)
                        has[key] += step
                        if has[key] == 0:
                            del has[key]
        found: dict[str, list[bytes]] = {}
        lost: dict[str, list[bytes]] = {}
        for (name, key), was_there in before.items():
            is_there = self._has[name][key] == self._num_ranks
            if is_there != was_there:
                (found if is_there else lost).setdefault(name, []).append(key)
        return found, lost


def _stride(block_bytes: int) -> int:
    return -(-block_bytes // ALIGNMENT) * ALIGNMENT


def _numbers(stats: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flat, with names joined by underscores; what is not a number is not for a dashboard."""
    numbers: dict[str, float] = {}
    for name, value in stats.items():
        name = prefix + name.replace(" ", "_")
        if isinstance(value, dict):
            numbers |= _numbers(value, f"{name}_")
        elif isinstance(value, int | float):
            numbers[name] = float(value)
    return numbers

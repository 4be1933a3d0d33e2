"""One rank's side of the tiers: its host blocks, the stores below them, and copies between host and device.

The runner calls `begin` when a step starts and `end` for its result. This module decides nothing and imports no torch:
a copier copies blocks (`NumpyCopier` if the device's memory is the host's, otherwise executor/tiers/cuda_copies.py).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.cache.tiers.base import Store
from penstock.cache.tiers.names import DISK, SERVED
from penstock.executor.protocol import TransferResult, Transfers
from penstock.executor.tiers.served import Fill, ServedBlocks

STATS_EVERY_S = 1.0

Pairs = Sequence[tuple[int, int]]


class Copier(Protocol):
    """Copies blocks. Copies of one `start` run after the rows of earlier steps and beside those of their own step."""

    def use(self, blocks: Any) -> None:
        """Replace the device's blocks: an array if they are in host memory, else a tensor."""

    def begin_step(self, written: Iterable[int]) -> None:
        """Order the step's rows after all restores started so far, and after all saves of blocks that the rows will
        write."""

    def start(self, saves: Pairs, restores: Pairs) -> None: ...

    def finish(self) -> float:
        """Wait for the copies of the oldest unfinished `start`; return how many seconds they took."""

    def settle(self, hosts: Iterable[int]) -> None:
        """Wait until no copy uses these host blocks, because a store is about to."""

    def close(self) -> None:
        """Release system resources. No copy is started afterwards."""


class Copies(NamedTuple):
    """The copies of a step in flight."""

    num_blocks: int
    fills: list[Fill]


class RankTransfers:
    """Owns `arena`, `stores` and the transfers in flight. One thread may begin steps while another one ends them."""

    def __init__(
        self,
        arena: np.ndarray,
        copier: Copier,
        stores: dict[str, Store],
        serve: Callable[[ServedBlocks], Any] | None = None,  # returns a PeerServer, whose code only peers need
    ) -> None:
        """arena: uint8 [host blocks, bytes per block]. `serve` starts the server for peers, if there is one."""
        self._arena = arena
        self._copier = copier
        self._stores = stores
        self._loading: dict[tuple[str, int], tuple[int, Fill]] = {}  # (store, its ticket) → our ticket, fill
        self._storing: dict[bytes, int] = {}  # key → our ticket
        self._done: list[tuple[int, bool]] = []  # completions to report
        self._in_flight: deque[Copies] = deque()
        self._stats_at_s = 0.0
        self._were_open: list[bool] = []
        self._lock = threading.Lock()  # protects the stores and their state
        self._served = None if serve is None else ServedBlocks(arena, stores.get(DISK), self._lock, self._poll)
        self._server = None if serve is None or self._served is None else serve(self._served)

    def use(self, blocks: Any) -> None:
        """Replace the device's blocks. No step is in flight."""
        self._copier.use(blocks)

    def begin(self, transfers: Transfers | None, written: Iterable[int] = ()) -> None:
        """Start a step's transfers, before its rows are launched. written: the new blocks of the rows that they will
        write."""
        self._copier.begin_step(written)
        if transfers is None:
            self._in_flight.append(Copies(0, []))
            return
        copies = Copies(len(transfers.saves) + len(transfers.restores), self._withdraw(transfers))
        self._in_flight.append(copies)
        if copies.num_blocks:
            self._copier.start(transfers.saves, transfers.restores)
        # The core knows that earlier uses have ended, but this rank may be behind the one that reported it.
        self._copier.settle([load[-1] for load in transfers.loads] + [store[-1] for store in transfers.stores])
        with self._lock:
            self._start(transfers)

    def end(self) -> TransferResult:
        """Return everything completed since the last call, for the result of the oldest step that has begun."""
        num_copied, fills = self._in_flight.popleft()
        seconds = self._copier.finish() if num_copied else 0.0
        with self._lock:
            for fill in fills:
                fill()
            result = self._report(num_copied, seconds)
        if self._server is not None and self._served is not None and self._served.has_changed:
            self._server.call()
        return result

    def close(self) -> None:
        """Wait for all copies and close the stores; nothing uses a host block afterwards."""
        while self._in_flight:
            if self._in_flight.popleft().num_blocks:
                self._copier.finish()
        if self._server is not None:
            self._server.close()
        with self._lock:
            for store in self._stores.values():
                store.close()
        self._copier.close()

    def _withdraw(self, transfers: Transfers) -> list[Fill]:
        """Withdraw from peers what this step overwrites; return the functions to call once its saves are done."""
        if self._served is None:
            return []
        with self._lock:
            if transfers.forget:
                self._served.forget()
            saves = zip(transfers.saves, transfers.saved_keys, strict=True)
            return [self._served.overwrite(host, key) for (_, host), key in saves]

    def _start(self, transfers: Transfers) -> None:
        for ticket, name, key, host in transfers.loads:
            fill = (lambda: None) if self._served is None else self._served.overwrite(host, key)
            theirs = self._stores[name].start_load(key, memoryview(self._arena[host]))
            if theirs is None:
                self._done.append((ticket, False))
            else:
                self._loading[name, theirs] = ticket, fill
        if transfers.touches:
            self._stores[DISK].touch(transfers.touches)
        for ticket, key, host in transfers.stores:
            if self._stores[DISK].put(key, memoryview(self._arena[host])):
                self._storing[key] = ticket
                continue
            is_stored = self._stores[DISK].contains(key)  # otherwise the queue is full
            self._done.append((ticket, is_stored))
            if is_stored and self._served is not None:  # after a reset, peers do not know it any more
                self._served.note_disk((key,), ())

    def _poll(self) -> None:
        """Process completions of the stores, for the core or for a peer; called under the lock."""
        for name, store in self._stores.items():
            for completion in store.poll():
                if completion.kind == "store":
                    self._done.append((self._storing.pop(completion.key), completion.ok))
                    continue
                served = self._served if name == DISK else None
                if served is not None and served.end_load(completion.ticket, completion.ok):
                    continue
                ticket, fill = self._loading.pop((name, completion.ticket))
                self._done.append((ticket, completion.ok))
                if completion.ok:
                    fill()

    def _report(self, num_copied: int, seconds: float) -> TransferResult:
        self._poll()
        changes = {name: store.changes() for name, store in self._stores.items()}
        gained = {name: came for name, (came, _) in changes.items() if came}
        lost = {name: went for name, (_, went) in changes.items() if went}
        if self._served is not None:
            self._served.note_disk(gained.get(DISK, ()), lost.get(DISK, ()))
        done, self._done = self._done, []
        is_last = bool(done) and not self._loading and not self._storing  # no further step may come for long
        return TransferResult(done, gained, lost, num_copied, seconds, self._stats(is_last))

    def _stats(self, is_due: bool) -> dict[str, dict[str, float]]:
        """Return statistics if they are due, at intervals, and when a store has become available or unavailable."""
        now_s, are_open = time.monotonic(), [store.is_open for store in self._stores.values()]
        if not is_due and now_s < self._stats_at_s and are_open == self._were_open:
            return {}
        self._stats_at_s, self._were_open = now_s + STATS_EVERY_S, are_open
        stats = {name: _flatten(store.stats()) for name, store in self._stores.items()}
        return stats if self._server is None else stats | {SERVED: _flatten(self._server.stats())}


class NumpyCopier:
    """Copies synchronously, if blocks and host blocks are both in host memory."""

    def __init__(self, blocks: np.ndarray, arena: np.ndarray) -> None:
        self._blocks = blocks  # uint8 [blocks, bytes of a block]
        self._hosts = arena[:, : blocks.shape[1]]
        self._seconds: list[float] = []

    def use(self, blocks: np.ndarray) -> None:
        self._blocks = blocks

    def begin_step(self, written: Iterable[int]) -> None:
        pass

    def start(self, saves: Pairs, restores: Pairs) -> None:
        started_s = time.perf_counter()
        for block, host in saves:
            self._hosts[host] = self._blocks[block]
        for host, block in restores:
            self._blocks[block] = self._hosts[host]
        self._seconds.append(time.perf_counter() - started_s)

    def finish(self) -> float:
        return self._seconds.pop(0)

    def settle(self, hosts: Iterable[int]) -> None:
        pass

    def close(self) -> None:
        pass


class ResultMerger:
    """Merges the results of all ranks as they arrive, without waiting for any rank."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, tuple[int, bool]] = {}  # ticket → (ranks that have completed it, all ok)
        self._has: dict[str, Counter[bytes]] = {}  # store → key → number of ranks that have it

    def merge(self, results: Sequence[TransferResult]) -> TransferResult:
        """Merge results in any number and order, except the statistics of stores; each rank's own results must be in
        their original order."""
        completions = []
        for result in results:
            for ticket, ok in result.completions:
                count, all_ok = self._open.pop(ticket, (0, True))
                if count + 1 == self._num_ranks:
                    completions.append((ticket, all_ok and ok))
                else:
                    self._open[ticket] = (count + 1, all_ok and ok)
        gained, lost = self._changes(results)
        num_copied = max((result.num_copied for result in results), default=0)  # every rank copies the same blocks
        slowest_s = max((result.copy_s for result in results), default=0.0)
        return TransferResult(completions, gained, lost, num_copied, slowest_s)

    def _changes(self, results: Sequence[TransferResult]) -> tuple[dict[str, list[bytes]], dict[str, list[bytes]]]:
        before: dict[tuple[str, bytes], bool] = {}
        for result in results:
            for changes, step in ((result.gained, 1), (result.lost, -1)):
                for name, keys in changes.items():
                    has = self._has.setdefault(name, Counter())
                    for key in keys:
                        before.setdefault((name, key), has[key] == self._num_ranks)
                        has[key] += step
                        if has[key] == 0:
                            del has[key]
        gained: dict[str, list[bytes]] = {}
        lost: dict[str, list[bytes]] = {}
        for (name, key), was_there in before.items():
            is_there = self._has[name][key] == self._num_ranks
            if is_there != was_there:
                (gained if is_there else lost).setdefault(name, []).append(key)
        return gained, lost


def _flatten(stats: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Flatten statistics, joining names by underscores; values that are not numbers are dropped."""
    flat: dict[str, float] = {}
    for name, value in stats.items():
        name = prefix + name.replace(" ", "_")
        if isinstance(value, dict):
            flat |= _flatten(value, f"{name}_")
        elif isinstance(value, int | float):
            flat[name] = float(value)
    return flat

"""One rank's part in the tiers: its host blocks, the stores beneath them, and the copies between host and device.

Whatever runs steps calls `begin` when a step starts and `end` for its result. Nothing here decides anything, and
nothing imports torch: how a block is copied is the copier's business (`NumpyCopier` where the device's memory is
the host's, executor/tiers/cuda_copies.py where it is not).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from penstock.cache.tiers.base import DISK, SERVED, Store
from penstock.executor.protocol import TransferResult, Transfers
from penstock.executor.tiers.served import Filling, Served

if TYPE_CHECKING:  # only engines with peers load what talks to them
    from penstock.cache.tiers.peer.server import PeerServer

STATS_EVERY_S = 1.0

Pairs = Sequence[tuple[int, int]]


class Copier(Protocol):
    """Moves blocks. Copies of one `start` come after the rows of earlier steps and run beside those of their own."""

    def use(self, blocks: Any) -> None:
        """In place of those that it was made with: an array where that is the host's memory, else a tensor."""
        ...

    def begin_step(self, written: Iterable[int]) -> None:
        """The rows from here on come after all restores that were started so far, and after all saves of the blocks that
        are theirs to write from now on."""
        ...

    def start(self, saves: Pairs, restores: Pairs) -> None: ...

    def finish(self) -> float:
        """Wait for the copies of the oldest `start` that has not been finished; how many seconds they took."""
        ...

    def settle(self, hosts: Iterable[int]) -> None:
        """Wait until no copy reads or writes these host blocks: a store is about to."""
        ...

    def close(self) -> None:
        """Release what was taken from the system. No copy is started afterwards."""
        ...


class Copies(NamedTuple):
    """Of a step in flight."""

    num_blocks: int
    saved: list[Filling]


class RankTransfers:
    """Owns `arena`, `stores` and the transfers in flight. One thread may begin steps while another ends them."""

    def __init__(
        self,
        arena: np.ndarray,
        copier: Copier,
        stores: dict[str, Store],
        serve: "Callable[[Served], PeerServer] | None" = None,
    ) -> None:
        """arena: uint8 [host blocks, bytes of a block]. `serve` starts what gives our blocks to peers, if anything should."""
        self._arena = arena
        self._copier = copier
        self._stores = stores
        self._loads: dict[tuple[str, int], tuple[int, Filling | None]] = {}  # (store, its ticket) → ours
        self._puts: dict[bytes, int] = {}  # key → our ticket
        self._done: list[tuple[int, bool]] = []  # completions to report
        self._in_flight: deque[Copies] = deque()
        self._stats_at_s = 0.0
        self._were_open: list[bool] = []
        self._lock = threading.Lock()  # of the stores and what is known of them
        self._served = None if serve is None else Served(arena, stores, self._lock, self._poll)
        self._server = None if serve is None or self._served is None else serve(self._served)

    def use(self, blocks: Any) -> None:
        """The device's blocks lie here from now on. No step is in flight."""
        self._copier.use(blocks)

    def begin(self, transfers: Transfers | None, written: Iterable[int] = ()) -> None:
        """Start a step's transfers; called before its rows are launched. written: the blocks that are new to the rows, as
        far as they write them."""
        self._copier.begin_step(written)
        if transfers is None:
            self._in_flight.append(Copies(0, []))
            return
        copies = Copies(len(transfers.saves) + len(transfers.restores), self._withdraw(transfers))
        self._in_flight.append(copies)
        if copies.num_blocks:
            self._copier.start(transfers.saves, transfers.restores)
        # The core has seen the end of whatever used these before; this rank may be behind the one that reported it.
        self._copier.settle([read[-1] for read in transfers.reads] + [write[-1] for write in transfers.writes])
        with self._lock:
            self._start(transfers)

    def end(self) -> TransferResult:
        """With the result of the oldest step that has begun: what has been completed since the last."""
        num_copied, saved = self._in_flight.popleft()
        seconds = self._copier.finish() if num_copied else 0.0
        with self._lock:
            for filling in saved:
                self._fill(filling)
            result = self._report(num_copied, seconds)
        if self._server is not None and self._served is not None and self._served.has_changed:
            self._server.call()
        return result

    def close(self) -> None:
        """Nothing borrows a host block afterwards."""
        while self._in_flight:
            if self._in_flight.popleft().num_blocks:
                self._copier.finish()
        if self._server is not None:
            self._server.close()
        with self._lock:
            for store in self._stores.values():
                store.close()
        self._copier.close()

    def _withdraw(self, transfers: Transfers) -> list[Filling]:
        """What this step overwrites is not given to peers any more; what it saves can be when it is over."""
        if self._served is None:
            return []
        with self._lock:
            if transfers.forget:
                self._served.forget()
            saves = zip(transfers.saves, transfers.saved_keys, strict=True)
            return [self._served.overwrite(host, key) for (_, host), key in saves]

    def _fill(self, filling: Filling | None) -> None:
        if filling is not None and self._served is not None:
            self._served.fill(filling)

    def _start(self, transfers: Transfers) -> None:
        for ticket, name, key, host in transfers.reads:
            filling = None if self._served is None else self._served.overwrite(host, key)
            theirs = self._stores[name].start_load(key, memoryview(self._arena[host]))
            if theirs is None:
                self._done.append((ticket, False))
            else:
                self._loads[name, theirs] = ticket, filling
        if transfers.touches:
            self._stores[DISK].touch(transfers.touches)
        for ticket, key, host in transfers.writes:
            if self._stores[DISK].put(key, memoryview(self._arena[host])):
                self._puts[key] = ticket
            else:  # it is there already, or the queue is full
                self._done.append((ticket, self._stores[DISK].contains(key)))

    def _poll(self) -> None:
        """Take in what the stores have finished, for the core or for a peer; under the lock."""
        for name, store in self._stores.items():
            for completion in store.poll():
                if completion.kind == "store":
                    self._done.append((self._puts.pop(completion.key), completion.ok))
                    continue
                served = self._served if name == DISK else None
                if served is not None and served.end_read(completion.ticket, completion.ok):
                    continue
                ticket, filling = self._loads.pop((name, completion.ticket))
                self._done.append((ticket, completion.ok))
                if completion.ok:
                    self._fill(filling)

    def _report(self, num_copied: int, seconds: float) -> TransferResult:
        self._poll()
        changes = {name: store.changes() for name, store in self._stores.items()}
        found = {name: came for name, (came, _) in changes.items() if came}
        lost = {name: went for name, (_, went) in changes.items() if went}
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
    """Copies at once, where blocks and host blocks are both the host's memory."""

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
            stores |= result.stores  # of the rank that reported last: they all do the same
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

"""Are kept blocks what would be computed? One in N of those that requests take from a tier is computed again and compared.

The request that takes it waits meanwhile: its slot computes the block's positions once more, from the blocks before it into
a spare one, and with a later step every rank compares its parts of the two. What differs may be wrong in that block or in
any before it, from which it was computed. So all goes that begins with the same first block, in every tier, and every
running request that does computes its tokens anew; what it has said before stays said.

    drawn ─restored─▶ computing ─▶ written ─▶ comparing ─▶ same: it goes on | differs: it computes all
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.cache.pool import BlockPool
from penstock.cache.tiers.base import tier_of
from penstock.engine.core.request import Request
from penstock.executor.protocol import Row, TransferResult

DEVICE = "device"
DEVICE_SHARE = 1 / 16  # of one kept on the device, which no copy has touched


@dataclass(slots=True)
class Check:
    """Of one block of a request's prefix."""

    request: Request | None  # None: it has left
    index: int
    path: str  # by which it came
    keys: list[bytes]
    spare: int  # the block to compute into
    num_computed: int = 0  # positions


class Difference(NamedTuple):
    key: bytes
    path: str
    first: bytes  # key of the first block of its chain


class Verifier:
    def __init__(self, one_in: int, pool: BlockPool, block_size: int, stores: Sequence[str]) -> None:
        self._one_in, self._pool, self._size = one_in, pool, block_size
        self._rng = random.Random(0)
        self._checks: dict[Request, Check] = {}
        self._written: list[Check] = []  # spare and all, by the steps submitted so far
        self._comparing: dict[int, Check] = {}  # by ticket
        self._num_tickets = 0
        self._first_of: dict[bytes, bytes] = {}  # key → that of the first block of its chain; of what the pool has had
        self._most_keys = 2 * pool.num_blocks
        self.counts: dict[str, dict[str, float]] = {
            tier: {"verified_blocks": 0, "differing_blocks": 0} for tier in (DEVICE, *map(tier_of, stores))
        }

    # -- a block is drawn and computed ---------------------------------------------------------------------

    def draw(self, request: Request, paths: Sequence[str], reserve: int) -> None:
        """The request has claimed its cached blocks, which came by these paths."""
        num_device = paths.count(DEVICE)
        weight = len(paths) - num_device + num_device * DEVICE_SHARE
        if self._rng.random() * self._one_in >= weight or self._pool.num_free <= reserve:
            return
        weights = [DEVICE_SHARE if path == DEVICE else 1 for path in paths]
        (index,) = self._rng.choices(range(len(paths)), weights)
        (spare,) = self._pool.allocate(1)
        self._checks[request] = Check(request, index, paths[index], request.keys, spare)

    def waits(self, request: Request) -> bool:
        return request in self._checks

    def row(self, request: Request, budget: int) -> Row | None:
        """The next positions of its block, for the step being planned."""
        check = self._checks[request]
        count = min(budget, self._size - check.num_computed)
        if request.is_restoring or not count:
            return None
        blocks: tuple[int, ...] = ()
        if not check.num_computed:
            blocks = (*request.blocks[: check.index], check.spare)
            request.num_sent_blocks = check.index
        start = check.index * self._size + check.num_computed
        check.num_computed += count
        if check.num_computed == self._size:
            self._written.append(check)
        return Row(request.slot, start, count, False, 0, blocks)

    def take_compares(self) -> list[tuple[int, int, int]]:
        """Before the next step is planned: what earlier ones have written."""
        compares = []
        for check in self._written:
            if check.request is not None:
                self._num_tickets += 1
                self._comparing[-self._num_tickets] = check
                compares.append((-self._num_tickets, check.request.blocks[check.index], check.spare))
        self._written.clear()
        return compares

    @property
    def is_waiting(self) -> bool:
        return bool(self._comparing)

    def finish(self, result: TransferResult | None) -> list[Difference]:
        """What was compared; the requests go on."""
        found = []
        for ticket, is_same in result.completions if result is not None else ():
            check = self._comparing.pop(ticket, None)
            if check is None:
                continue
            counts = self.counts[tier_of(check.path)]
            counts["verified_blocks"] += 1
            if check.request is not None:
                self.leave(check.request)
            if not is_same:
                counts["differing_blocks"] += 1
                found.append(Difference(check.keys[check.index], check.path, check.keys[0]))
        return found

    def leave(self, request: Request) -> None:
        """The request goes on, or it is aborted or preempted. Steps in flight may still write to the spare block: what
        it is given to writes later."""
        check = self._checks.pop(request, None)
        if check is not None:
            check.request = None
            self._pool.release([check.spare])

    # -- what begins alike ---------------------------------------------------------------------------------

    def note(self, keys: Sequence[bytes], start: int, end: int) -> None:
        """The pool has these of a chain from now on."""
        if start < end:
            self._first_of.update(dict.fromkeys(keys[start:end], keys[0]))

    def begins_with(self, first: bytes) -> Callable[[bytes], bool]:
        """Whether a chain does, or may: nothing is known of what lies in a store and has not been asked for."""
        return lambda key: self._first_of.get(key, first) == first

    def trim(self, has: Callable[[bytes], bool]) -> None:
        """Forget what no tier has any more, now and then."""
        if len(self._first_of) > self._most_keys:
            self._first_of = {key: first for key, first in self._first_of.items() if has(key)}
            self._most_keys = max(self._most_keys, 2 * len(self._first_of))

    def held(self) -> Iterator[int]:
        return (check.spare for check in self._checks.values())

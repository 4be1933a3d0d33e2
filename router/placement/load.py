"""The load of each replica: columns of numbers, and the charge that each request is.

A charge is made when a request is placed and released exactly once, whatever becomes of the request. Health checks,
drains and restarts never change these numbers. The replica's prefill speed is learned from the charges' first tokens.
"""

from collections.abc import Callable, Collection
from inspect import get_annotations

import msgspec
import numpy as np
import numpy.typing as npt

from penstock._csrc import ffi, lib
from penstock.router.placement.policy import POLICIES, PolicyConfig

Column = npt.NDArray[np.float64]

SPEED_MEMORY = 0.9  # weight of the past at each sample
UNKNOWN_CAPACITY = 2.0**18  # tokens
MIN_SAMPLE_TOKENS = 256  # shorter waits say more about the network than about the replica
MIN_STREAM_TOKENS = 4
DELAY_STEP = 1.1  # by which what is learned of a delay goes up or down at each answer
OTHERS_MEMORY = 0.75  # weight of the past at each look


class LoadTable:
    """One row per replica; a freed row is used again. Columns are views of one array that grows by doubling, and
    csrc/route_choice.c chooses among them."""

    queued: Column  # tokens placed there whose first token has not come
    waiting: Column  # how many requests they belong to
    head: Column  # of these tokens, the oldest request's
    head_since: Column  # when that one's turn came, as far as we know
    active: Column  # requests in flight
    held: Column  # tokens of KV that they hold or will need
    capacity: Column  # tokens of KV there are
    speed: Column  # learned, tokens of prefill per second
    delay: Column  # learned, seconds by which an answer in flight delays a first token
    filled: Column  # tokens of new content that went there of late: what its cache had to make room for
    per_capacity: Column  # one over the capacity, where that is not known over a middling one
    is_open: Column  # 1: takes requests
    cached: Column  # of a prompt that is to be placed: tokens that need not be computed there
    backlog: Column  # at the last choice: queued tokens, less what the oldest request must have got done
    ttft: Column  # and what it predicted
    score: Column  # and what it went by

    def __init__(self, policy: PolicyConfig = PolicyConfig(), seed: int = 0) -> None:  # noqa: B008
        self._free: list[int] = []
        self._unknown: set[int] = set()  # rows whose speed was neither learned nor given: that of the others is assumed
        self.num_rows = 0
        self._first_delay_s, self._first_speed = policy.first_delay_s, policy.first_tokens_per_s
        self.c = ffi.new(
            "struct penstock_fleet *",
            {
                "wear": policy.wear,
                "affinity_s": policy.affinity_s,
                "policy": POLICIES.index(policy.name),
                "turn": -1,
                "random": seed + 1,
            },
        )
        self._columns = np.zeros((len(COLUMNS), 8))
        self._name_columns()

    def add(self, capacity: float, speed: float | None) -> int:
        """Return a row. Until its speed was learned, a replica is taken to be like the mean of the others."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.num_rows
            self.num_rows += 1
            if self.num_rows > self._columns.shape[1]:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._name_columns()
        self._columns[:, row] = 0.0
        if speed is None:
            others = [self.speed[other] for other in range(self.num_rows) if other != row and other not in self._free]
            self._unknown.add(row)
            speed = sum(others) / len(others) if others else self._first_speed
        self.capacity[row], self.speed[row], self.delay[row] = capacity, speed, self._first_delay_s
        self.per_capacity[row] = 1.0 / (UNKNOWN_CAPACITY if np.isinf(capacity) else capacity)
        self._count_rows()
        return row

    def remove(self, row: int) -> None:
        self._columns[:, row] = 0.0
        self.speed[row] = 1.0  # a divisor
        self._unknown.discard(row)
        self._free.append(row)
        self._count_rows()

    def choose(self, num_tokens: int, now_s: float, sticky: int = -1, excluded: Collection[int] = ()) -> int:
        """The row for a request by what `cached` says of its prompt, -1 if none is open; `sticky` is its session's."""
        rows = ffi.new("int64_t[]", list(excluded)) if excluded else ffi.NULL
        row: int = lib.penstock_fleet_choose(self.c, num_tokens, now_s, sticky, rows, len(excluded))
        return row

    def prediction(self, row: int) -> tuple[float, float, float]:
        """At the last choice: cached tokens, tokens queued before, and the time to the first token."""
        return self.c.cached[row], self.c.backlog[row], self.c.ttft[row]

    def learn(self, row: int, speed: float) -> None:
        """A replica that has done nothing yet is taken to be like the others. A fixed guess would keep it idle for ever
        where it is too low: what it is worth shows only in work."""
        self.speed[row] = speed
        self._unknown.discard(row)
        if self._unknown:
            known = set(range(self.num_rows)) - self._unknown - set(self._free)
            self.speed[list(self._unknown)] = self.speed[list(known)].mean()

    def backlog_of(self, row: int, now_s: float) -> float:
        """Queued tokens, less what the oldest request must have got done since its turn came."""
        done = min((now_s - self.head_since[row]) * self.speed[row], self.head[row])
        return float(self.queued[row] - max(done, 0.0))

    def _count_rows(self) -> None:
        in_use = np.ones(self.num_rows, dtype=bool)
        in_use[self._free] = False
        self.c.num_in_use = int(in_use.sum())
        self.c.total_capacity = (1.0 / self.per_capacity[in_use]).sum()

    def _name_columns(self) -> None:
        start, stride = ffi.from_buffer("double[]", self._columns), self._columns.shape[1]
        for index, field in enumerate(COLUMNS):
            setattr(self, field, self._columns[index, : self.num_rows])
            setattr(self.c, field, start + index * stride)
        self.c.num_rows = self.num_rows


COLUMNS = tuple(get_annotations(LoadTable))


class Ledger(msgspec.Struct):
    """Sums over all charges, by their names among the metrics: what was predicted, and what was."""

    decisions_total: int = 0
    requests_ok_total: int = 0
    requests_failed_total: int = 0
    compared_requests_total: int = 0
    compared_prompt_tokens_total: int = 0
    predicted_cached_tokens_total: int = 0
    actual_cached_tokens_total: int = 0
    cached_tokens_error_total: int = 0
    predicted_ttft_seconds_total: float = 0.0
    actual_ttft_seconds_total: float = 0.0

    def compare(self, charge: "Charge", cached_tokens: int | None, ttft_s: float) -> None:
        self.predicted_ttft_seconds_total += charge.predicted_ttft_s
        self.actual_ttft_seconds_total += ttft_s
        if cached_tokens is not None:
            self.count(charge, cached_tokens)

    def count(self, charge: "Charge", cached_tokens: int) -> None:
        self.compared_requests_total += 1
        self.compared_prompt_tokens_total += charge.num_tokens
        self.predicted_cached_tokens_total += charge.predicted_cached_tokens
        self.actual_cached_tokens_total += cached_tokens
        self.cached_tokens_error_total += abs(cached_tokens - charge.predicted_cached_tokens)


class ReplicaLoad:
    """One replica's row, its charges in order, and what is learned from them."""

    def __init__(self, table: LoadTable, row: int, ledger: Ledger, clock: Callable[[], float]) -> None:
        self.table = table
        self.row = row
        self.ledger = ledger
        self.clock = clock
        self.is_gone = False  # removed: charges still in flight count for nothing
        self.num_active = 0
        self.num_others = 0.0  # requests there of other routers and clients, over the last looks
        self._is_seen = False
        self._waiting: dict[Charge, None] = {}  # no first token yet, oldest first
        self._sample_tokens = self._sample_s = 0.0

    def place(self, charge: "Charge") -> None:
        self.num_active += 1
        self._waiting[charge] = None
        lib.penstock_fleet_place(self.table.c, self.row, charge.own_tokens, charge.held_tokens, charge.placed_s)

    def answer(self, charge: "Charge", now_s: float) -> None:
        """Its first token has come, or never will."""
        if self._waiting.pop(charge, self) is self or self.is_gone:
            return
        oldest = next(iter(self._waiting), None)
        next_own = 0.0 if oldest is None else oldest.own_tokens
        lib.penstock_fleet_answer(self.table.c, self.row, charge.own_tokens, next_own, now_s)

    def lighten(self, charge: "Charge", own_tokens: float) -> None:
        """A waiting request turns out to be less work here."""
        if not self.is_gone:
            self.table.queued[self.row] -= charge.own_tokens - own_tokens
            if next(iter(self._waiting)) is charge:
                self.table.head[self.row] = own_tokens
        charge.own_tokens = own_tokens

    def see_others(self, count: float) -> None:
        """A look is seconds old when it counts, and most requests are over by then: what lasts is their mean."""
        if not self.is_gone:
            change = (1 - OTHERS_MEMORY * self._is_seen) * (count - self.num_others)
            self.num_others += change
            self._is_seen = True
            self.table.active[self.row] += change

    def leave(self, charge: "Charge") -> None:
        self.num_active -= 1
        if not self.is_gone:
            lib.penstock_fleet_leave(self.table.c, self.row, charge.held_tokens)

    def learn(self, num_tokens: float, seconds: float) -> None:
        """So many tokens of prefill were done in so long, queue and own prompt together."""
        if num_tokens < MIN_SAMPLE_TOKENS or seconds <= 0 or self.is_gone:
            return
        self._sample_tokens = SPEED_MEMORY * self._sample_tokens + num_tokens
        self._sample_s = SPEED_MEMORY * self._sample_s + seconds
        self.table.learn(self.row, self._sample_tokens / self._sample_s)

    def learn_delay(self, num_tokens: int, seconds: float) -> None:
        """So many tokens of an answer came in so long: a step each, whose time all that are in flight share. Its median is
        followed, as a client that reads slowly would spoil a mean."""
        if num_tokens >= MIN_STREAM_TOKENS and not self.is_gone:
            delay, share_s = self.table.delay, seconds / num_tokens / self.table.active[self.row]
            delay[self.row] *= DELAY_STEP if share_s > delay[self.row] else 1 / DELAY_STEP

    def check(self) -> None:
        if not self.is_gone:
            queued = sum(charge.own_tokens for charge in self._waiting)
            assert abs(self.table.queued[self.row] - queued) < 1e-3, (self.table.queued[self.row], queued)
            assert abs(self.table.active[self.row] - self.num_active - self.num_others) < 1e-6
            assert self.num_active >= len(self._waiting) == self.table.waiting[self.row]
            assert self.table.speed[self.row] > 0


class Charge:
    """One request at one replica: `first_token`, `tokens` as they come, `release` at its end, which may be any time.
    A second release does nothing."""

    __slots__ = (
        "_load", "ahead_tokens", "answered_s", "held_tokens", "is_answered", "is_handed_over", "is_released", "num_tokens",
        "own_tokens", "placed_s", "predicted_cached_tokens", "predicted_ttft_s", "replica",
    )  # fmt: skip

    def __init__(
        self,
        load: ReplicaLoad,
        replica: str,
        num_tokens: int,
        cached_tokens: float,
        ahead_tokens: float,
        ttft_s: float,
    ) -> None:
        self.replica = replica
        self.num_tokens = num_tokens
        self.predicted_cached_tokens = int(cached_tokens)
        self.predicted_ttft_s = ttft_s
        self.own_tokens = max(num_tokens - cached_tokens, 1.0)
        self.held_tokens = float(num_tokens)
        self.ahead_tokens = ahead_tokens
        self.is_answered = self.is_released = self.is_handed_over = False
        self._load = load
        self.placed_s = load.clock()
        load.ledger.decisions_total += 1
        load.place(self)

    def hand_over(self, ttft_s: float) -> None:
        """The prompt is computed elsewhere and comes as blocks, within `ttft_s` by what is known there: for the queue
        here it is a single token. It says nothing of this replica's speed."""
        assert not self.is_answered and not self.is_released, "only a prompt that waits can be computed elsewhere"
        self.is_handed_over = True
        self._load.lighten(self, 1.0)
        self.predicted_cached_tokens, self.predicted_ttft_s = self.num_tokens - 1, ttft_s

    def first_token(self, cached_tokens: int | None = None) -> None:
        """The first token is here; `cached_tokens` as the replica counted them, where it says so."""
        assert not self.is_released and not self.is_answered, "a first token comes once, before the release"
        self.is_answered = True
        load, now_s = self._load, self._load.clock()
        self.answered_s = now_s
        own = self.own_tokens if cached_tokens is None else max(self.num_tokens - cached_tokens, 1)
        if not self.is_handed_over:
            load.learn(self.ahead_tokens + own, now_s - self.placed_s)
        load.answer(self, now_s)
        load.ledger.compare(self, cached_tokens, now_s - self.placed_s)

    def counted(self, cached_tokens: int) -> None:
        """As `first_token` with a count, of a replica that says it at the end."""
        if not self.is_handed_over:
            self._load.ledger.count(self, cached_tokens)

    def tokens(self, count: int) -> None:
        """So many tokens of the answer have come; each holds a place in the replica's cache."""
        if not self.is_released and not self._load.is_gone:
            self.held_tokens += count
            self._load.table.held[self._load.row] += count

    def streamed(self, num_tokens: int) -> None:
        """The answer was a stream of so many tokens, and has come to its end."""
        self._load.learn_delay(num_tokens - 1, self._load.clock() - self.answered_s)

    def release(self, ok: bool = True) -> None:
        if self.is_released:
            return
        self.is_released = True
        if not self.is_answered:
            self._load.answer(self, self._load.clock())
        self._load.leave(self)
        if ok:
            self._load.ledger.requests_ok_total += 1
        else:
            self._load.ledger.requests_failed_total += 1

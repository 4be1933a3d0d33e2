"""The load of each replica: a table with a column for each number, and a charge for each request.

A charge is made when a request is placed, and released exactly once however the request ends. Health checks, drains and
restarts never change these numbers. The prefill speed of a replica is learned from the first tokens of its charges.
"""

from collections.abc import Callable, Collection
from inspect import get_annotations
from typing import get_args

import msgspec
import numpy as np
import numpy.typing as npt

from penstock._csrc import ffi, lib
from penstock.router.config import PolicyName

POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)  # in this order in C
Column = npt.NDArray[np.float64]

SPEED_MEMORY = 0.9  # weight of the past at each sample
UNKNOWN_CAPACITY = 2.0**18  # tokens
MIN_SAMPLE_TOKENS = 256  # shorter waits say more about the network than about the replica
MIN_STREAM_TOKENS = 4
DELAY_STEP = 1.1  # factor by which the learned delay is raised or lowered per answer


class PolicyConfig(msgspec.Struct, frozen=True):
    """The policy by which a replica is chosen, and its weights; csrc/route_choice.c computes it.

    The default, `predicted-ttft`, is the seconds until a new request's first token: work queued there that is not cached,
    plus the part of its own prompt that is not cached there, over the replica's learned speed, plus what its answers in
    flight cost. Everything is in one unit, so a long match cannot outweigh a long queue, nor the other way round.
    """

    name: PolicyName = "predicted-ttft"
    wear: float = 1.0  # cost of new content beside its time, at a replica with the mean amount of it
    first_tokens_per_s: float = 5_000.0  # of prefill, assumed until the speed of a replica is learned
    first_delay_s: float = 0.004  # delay of a first token by each answer in flight, until it is learned
    affinity_s: float = 0.05  # a session stays where it was unless another replica is better by more
    host_credit: float = 0.8  # what a token cached in host memory saves, of one on the device
    disk_credit: float = 0.5
    prediction_s: float = 5.0  # a prediction counts for at most so long
    stall_s: float = 5.0  # a replica whose events are silent for longer is guessed at
    max_sessions: int = 50_000
    max_facts: int = 2**22  # entries of the index, 36 bytes each when in use


class LoadTable:
    """One row per replica; freed rows are used again. The columns are views of one array that grows by doubling;
    csrc/route_choice.c reads them to choose a row."""

    queued: Column  # prompt tokens of requests without a first token
    waiting: Column  # number of those requests
    head: Column  # uncached tokens of the oldest waiting request
    head_since: Column  # when that request became the oldest
    active: Column  # requests in flight
    held: Column  # KV tokens that requests in flight hold or will need
    capacity: Column  # KV tokens that fit
    speed: Column  # learned, tokens of prefill per second
    delay: Column  # learned, seconds by which an answer in flight delays a first token
    filled: Column  # decayed sum of new (uncached) tokens placed here
    per_capacity: Column  # 1 / capacity, or 1 / UNKNOWN_CAPACITY
    is_open: Column  # 1: takes requests
    cached: Column  # cached tokens of the prompt that is being placed
    backlog: Column  # at the last choice: queued tokens, less what the oldest request must have computed
    ttft: Column  # seconds to the first token that the last choice predicted
    score: Column  # the value that the last choice minimized

    def __init__(self, policy: PolicyConfig = PolicyConfig(), seed: int = 0) -> None:  # noqa: B008
        self._free: list[int] = []
        self._unknown: set[int] = set()  # rows whose speed is not learned yet: the mean of the others is assumed
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

    def add(self, capacity: float) -> int:
        """Return the row of a new replica."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.num_rows
            self.num_rows += 1
            if self.num_rows > self._columns.shape[1]:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
            self._name_columns()
        self._columns[:, row] = 0.0
        self._unknown.add(row)
        self._assume_speeds()
        self.capacity[row], self.delay[row] = capacity, self._first_delay_s
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
        """Return the row for a request, whose cached tokens are in the column `cached`; -1 if no replica is open. `sticky` is
        the row of its session, or -1."""
        rows = ffi.new("int64_t[]", list(excluded)) if excluded else ffi.NULL
        return int(lib.penstock_fleet_choose(self.c, num_tokens, now_s, sticky, rows, len(excluded)))

    def learn(self, row: int, speed: float) -> None:
        self.speed[row] = speed
        self._unknown.discard(row)
        if self._unknown:
            self._assume_speeds()

    def _assume_speeds(self) -> None:
        """Give replicas whose speed is unknown the mean of the known ones: a fixed guess that is too low would keep such a
        replica idle, and its speed can only be learned from requests."""
        known = set(range(self.num_rows)) - self._unknown - set(self._free)
        self.speed[list(self._unknown)] = self.speed[list(known)].mean() if known else self._first_speed

    def backlog_of(self, row: int, now_s: float) -> float:
        """Return the queued tokens, less what has been computed of the oldest request since its turn came."""
        done = min((now_s - self.head_since[row]) * self.speed[row], self.head[row])
        return float(self.queued[row] - max(done, 0.0))

    def _count_rows(self) -> None:
        self.c.num_in_use = self.num_rows - len(self._free)
        self.c.total_capacity = (1.0 / self.per_capacity[self.per_capacity > 0]).sum()

    def _name_columns(self) -> None:
        start, stride = ffi.from_buffer("double[]", self._columns), self._columns.shape[1]
        for index, field in enumerate(COLUMNS):
            setattr(self, field, self._columns[index, : self.num_rows])
            setattr(self.c, field, start + index * stride)
        self.c.num_rows = self.num_rows


COLUMNS = tuple(get_annotations(LoadTable))


class PredictionTotals(msgspec.Struct):
    """Sums over all charges of predicted and actual values. The fields are the names of the metrics."""

    decisions_total: int = 0
    # Decisions without a match, so by the session or by load alone:
    no_match_decisions_total: int = 0  # no replica has the beginning of the prompt
    no_ids_decisions_total: int = 0  # the prompt's token ids are unknown, and the replica reports blocks of token ids
    no_prompt_decisions_total: int = 0  # the request has no prompt
    requests_ok_total: int = 0
    requests_failed_total: int = 0
    compared_requests_total: int = 0
    compared_prompt_tokens_total: int = 0
    predicted_cached_tokens_total: int = 0
    actual_cached_tokens_total: int = 0
    cached_tokens_error_total: int = 0
    predicted_ttft_seconds_total: float = 0.0
    actual_ttft_seconds_total: float = 0.0

    def count(self, charge: "Charge", cached_tokens: int) -> None:
        self.compared_requests_total += 1
        self.compared_prompt_tokens_total += charge.num_tokens
        self.predicted_cached_tokens_total += charge.predicted_cached_tokens
        self.actual_cached_tokens_total += cached_tokens
        self.cached_tokens_error_total += abs(cached_tokens - charge.predicted_cached_tokens)


class ReplicaLoad:
    """One replica's row, its charges in order of placement, and what is learned from them."""

    def __init__(self, table: LoadTable, row: int, totals: PredictionTotals, clock: Callable[[], float]) -> None:
        self.table = table
        self.row = row
        self.totals = totals
        self.clock = clock
        self.is_gone = False  # removed: charges still in flight count for nothing
        self._waiting: dict[Charge, None] = {}  # no first token yet, oldest first
        self._sample_tokens = self._sample_s = 0.0

    def add(self, charge: "Charge") -> None:
        self._waiting[charge] = None
        lib.penstock_fleet_place(self.table.c, self.row, charge.own_tokens, charge.held_tokens, charge.placed_s)

    def answer(self, charge: "Charge", now_s: float) -> None:
        """Stop counting the charge as waiting: its first token has come, or never will."""
        oldest = next(iter(self._waiting), None)
        if self._waiting.pop(charge, self) is self or self.is_gone:
            return
        lib.penstock_fleet_answer(self.table.c, self.row, charge.own_tokens)
        if charge is oldest:
            following = next(iter(self._waiting), None)
            own_tokens = 0.0 if following is None else following.own_tokens
            lib.penstock_fleet_new_head(self.table.c, self.row, own_tokens, now_s)

    def reduce_work(self, charge: "Charge", own_tokens: float) -> None:
        """Lower the work that a waiting request is for this replica."""
        if not self.is_gone:
            self.table.queued[self.row] -= charge.own_tokens - own_tokens
            if next(iter(self._waiting)) is charge:
                self.table.head[self.row] = own_tokens
        charge.own_tokens = own_tokens

    def leave(self, charge: "Charge") -> None:
        if not self.is_gone:
            lib.penstock_fleet_leave(self.table.c, self.row, charge.held_tokens)

    def learn(self, num_tokens: float, seconds: float) -> None:
        """Learn the speed from prefill tokens, queued ones included, and the seconds that they took."""
        if num_tokens < MIN_SAMPLE_TOKENS or seconds <= 0 or self.is_gone:
            return
        self._sample_tokens = SPEED_MEMORY * self._sample_tokens + num_tokens
        self._sample_s = SPEED_MEMORY * self._sample_s + seconds
        self.table.learn(self.row, self._sample_tokens / self._sample_s)

    def learn_delay(self, num_tokens: int, seconds: float) -> None:
        """Learn the delay per request in flight from the tokens of an answer and the seconds that they took. Follow the median,
        because a client that reads slowly would distort a mean."""
        if num_tokens >= MIN_STREAM_TOKENS and not self.is_gone:
            delay, share_s = self.table.delay, seconds / num_tokens / self.table.active[self.row]
            delay[self.row] *= DELAY_STEP if share_s > delay[self.row] else 1 / DELAY_STEP

    def check(self) -> None:
        if not self.is_gone:
            queued = sum(charge.own_tokens for charge in self._waiting)
            assert abs(self.table.queued[self.row] - queued) < 1e-3, (self.table.queued[self.row], queued)
            assert self.table.active[self.row] >= len(self._waiting) == self.table.waiting[self.row]
            assert self.table.speed[self.row] > 0


class Charge:
    """One request at one replica. Call `first_token`, then `tokens` as they come, or `answered` for an answer that comes
    whole; call `release` at the end, at any time. A second release does nothing."""

    def __init__(self, load: ReplicaLoad, replica: str, num_tokens: int, now_s: float) -> None:
        """Charge the replica that was just chosen for the request."""
        columns, row = load.table.c, load.row
        cached_tokens: float = columns.cached[row]
        self.ahead_tokens, self.predicted_ttft_s = columns.backlog[row], columns.ttft[row]
        self.replica = replica
        self.num_tokens = num_tokens
        self.predicted_cached_tokens = int(cached_tokens)
        self.own_tokens = max(num_tokens - cached_tokens, 1.0)
        self.held_tokens = float(num_tokens)
        self.is_answered = self.is_released = self.is_handed_over = False
        self._load = load
        self.placed_s = now_s
        self.answered_s: float | None = None  # when the first token came, if that is known
        load.totals.decisions_total += 1
        load.add(self)

    def hand_over(self, ttft_s: float) -> None:
        """Note that another replica computes the prompt, in `ttft_s` by its own prediction. In the queue here the request then
        counts as one token, and this replica's speed is not learned from it."""
        assert not self.is_answered and not self.is_released, "only a prompt that waits can be computed elsewhere"
        self.is_handed_over = True
        self._load.reduce_work(self, 1.0)
        self.predicted_cached_tokens, self.predicted_ttft_s = self.num_tokens - 1, ttft_s

    def first_token(self, cached_tokens: int | None = None) -> None:
        """Record the first token, and learn from its time."""
        load, now_s = self._load, self._load.clock()
        self.answered_s = now_s
        own = self.own_tokens if cached_tokens is None else max(self.num_tokens - cached_tokens, 1)
        if not self.is_handed_over:
            load.learn(self.ahead_tokens + own, now_s - self.placed_s)
        load.totals.predicted_ttft_seconds_total += self.predicted_ttft_s
        load.totals.actual_ttft_seconds_total += now_s - self.placed_s
        self.answered(cached_tokens)

    def answered(self, cached_tokens: int | None = None) -> None:
        """Record that the request no longer waits. `cached_tokens`: as the replica reports them, if it does."""
        assert not self.is_released and not self.is_answered, "an answer begins once, before the release"
        self.is_answered = True
        self._load.answer(self, self._load.clock())
        if cached_tokens is not None:
            self._load.totals.count(self, cached_tokens)

    def counted(self, cached_tokens: int) -> None:
        """Record the cached tokens of a replica that reports them at the end of its answer."""
        if not self.is_handed_over:
            self._load.totals.count(self, cached_tokens)

    def tokens(self, count: int) -> None:
        """Record `count` more tokens of the answer. Each holds a place in the replica's cache."""
        if not self.is_released and not self._load.is_gone:
            self.held_tokens += count
            self._load.table.held[self._load.row] += count

    def streamed(self, num_tokens: int) -> None:
        """Record the end of a streamed answer of `num_tokens` tokens."""
        if self.answered_s is not None:
            self._load.learn_delay(num_tokens - 1, self._load.clock() - self.answered_s)

    def release(self, ok: bool | None = True) -> None:
        """End the charge, which the replica has answered or not, or (None) which was never sent."""
        if self.is_released:
            return
        self.is_released = True
        if not self.is_answered:
            self._load.answer(self, self._load.clock())
        self._load.leave(self)
        if ok:
            self._load.totals.requests_ok_total += 1
        elif ok is not None:
            self._load.totals.requests_failed_total += 1

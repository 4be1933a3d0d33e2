"""Changing a placement that is in use by as few copies as will do.

Both phases make one change per row (layer) and step, in all rows at once. First an expert whose copies carry more than
the target can bear gets one more copy, in the slot that is missed least. Then the heaviest rank of a row either trades
a slot with one of the lightest ranks, or hands part of an expert to it, where a copy that its expert can do without
makes room; whichever helps most.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order
from penstock.eplb.maps import Plan, max_copies
from penstock.eplb.order import Ids, Indices, Shares
from penstock.eplb.planner import copies, floor_of

_NEVER = np.float32(3e38)
_LIGHTEST = 6  # how many of the lightest ranks are tried as partners; more find little more
_PATIENCE = np.float32(1.15)  # copies may carry this much more than the best counts would give
_LEAST_GAIN = np.float32(1e-5)  # of the heaviest rank's load; below it a row is stuck
_MAX_STEPS = 400


class SearchedRows:
    """The layers of a plan for a smoothed load, and how good their placements can get."""

    def __init__(self, plan: Plan, load: Shares) -> None:
        self._load, self._ranks = load, plan.ranks
        self._may_copy = plan.slots > plan.experts
        shares = copies(load, plan.slots, max_copies(plan.experts, plan.slots, plan.ranks))[1]
        self._floor = floor_of(shares, plan.ranks, self._may_copy)  # [layers]: the heaviest rank carries at least this
        self._least_share = shares[:, 0]
        mean = load.sum(1) / plan.ranks
        self.reach = np.minimum(mean / self._floor, 1).astype(np.float64)  # [layers]: the balance at that floor

    def improved(self, layers: Indices, phy2log: Ids, aim: float, budget: Indices) -> Ids:
        """Search these layers for a heaviest rank load of floor / aim; return their placements."""
        rows = _Rows(
            load=self._load[layers],
            ids=phy2log.astype(np.int64).reshape(len(layers), self._ranks, -1),
            target=self._floor[layers] / np.float32(aim),
            least_share=self._least_share[layers],
            budget=budget,
            may_copy=self._may_copy,
        )
        _improve(rows)
        return rows.ids.reshape(phy2log.shape).astype(np.int16)


@dataclass
class _Rows:
    """Placements under change; `at` arguments below are indices of rows."""

    load: Shares  # [rows, experts]
    ids: Indices  # [rows, ranks, slots per rank]
    target: Shares  # [rows]: a heaviest rank this light is enough
    least_share: Shares  # [rows]: of the largest copy, with the best counts
    budget: Indices  # [rows]: slots that may still change
    may_copy: bool  # whether counts may change

    def __post_init__(self) -> None:
        rows, experts = self.load.shape
        cells = self.ids.reshape(rows, -1) + np.arange(0, rows * experts, experts)[:, None]
        self.count = np.bincount(cells.ravel(), minlength=rows * experts).reshape(rows, experts)
        self.share = np.zeros_like(self.load)
        np.divide(self.load, self.count, out=self.share, where=self.count > 0)
        self.carried = np.empty(self.ids.shape, np.float32)
        self.rank_load = np.empty(self.ids.shape[:2], np.float32)
        self.weigh(np.arange(rows))

    def weigh(self, at: Indices) -> None:
        """Set what slots and ranks carry from counts and placement."""
        ids = self.ids[at]
        self.carried[at] = self.share[at[:, None, None], ids]
        self.rank_load[at] = self.carried[at].sum(2)

    def above(self, at: Indices) -> Indices:
        """Those of the rows whose heaviest rank is above the target."""
        heavy: Indices = at[self.rank_load[at].max(1) > self.target[at]]
        return heavy

    def replace(self, at: Indices, rank: Indices, slot: Indices, expert: Indices) -> None:
        """Put one more copy of an expert in place of another's, in each of these rows."""
        old = self.ids[at, rank, slot]
        self.ids[at, rank, slot] = expert
        self.count[at, expert] += 1
        self.count[at, old] -= 1
        self.share[at, expert] = self.load[at, expert] / self.count[at, expert]
        self.share[at, old] = self.load[at, old] / self.count[at, old]
        self.budget[at] -= 1
        self.weigh(at)

    def trade(self, at: Indices, rank: Indices, slot: Indices, other: Indices, other_slot: Indices) -> None:
        """Exchange the experts of two slots in each of these rows."""
        ours, theirs = (at, rank, slot), (at, other, other_slot)
        self.ids[ours], self.ids[theirs] = self.ids[theirs], self.ids[ours]
        self.carried[ours], self.carried[theirs] = self.carried[theirs], self.carried[ours]
        self.budget[at] -= 2
        for touched in (rank, other):
            self.rank_load[at, touched] = self.carried[at, touched].sum(1)


def _improve(rows: _Rows) -> None:
    """Bring every row to its target, or as near as single changes within its budget get it."""
    at = rows.above(np.arange(len(rows.load)))
    if rows.may_copy:
        _relieve(rows, at)
    at = rows.above(at)
    for _ in range(_MAX_STEPS):
        if not at.size:
            return
        at = rows.above(_change(rows, at))


def _relieve(rows: _Rows, at: Indices) -> None:
    """More copies for experts whose copies are too large, one per row and step."""
    limit = rows.least_share * _PATIENCE
    for _ in range(rows.ids[0].size):
        at = at[(rows.share[at].max(1) > limit[at]) & (rows.budget[at] > 0)]
        if not at.size:
            return
        expert = rows.share[at].argmax(1)
        cost = _cost_of_slots(rows, at, expert, limit[at])
        place = cost.argmin(1)
        possible = cost[np.arange(len(at)), place] < _NEVER
        at, place, expert = at[possible], place[possible], expert[possible]
        rank, slot = np.divmod(place, rows.ids.shape[2])
        rows.replace(at, rank, slot, expert)


def _cost_of_slots(rows: _Rows, at: Indices, expert: Indices, limit: Shares) -> Shares:
    """How little each slot may be given up for a copy of `expert`: its rank's load without it; _NEVER if it may not.

    A slot's expert must be left with a copy, and the copies it is left with should not be too large themselves;
    where they all would be, smaller than the expert's that needs relief will do.
    """
    ids = rows.ids[at]
    flat = ids.reshape(len(at), -1)
    needy = np.take_along_axis(rows.share[at], expert[:, None], axis=1)
    left = rows.load[at] / np.maximum(rows.count[at] - 1, 1)
    left = np.take_along_axis(np.where(rows.count[at] >= 2, left, _NEVER), flat, axis=1)
    has = (ids == expert[:, None, None]).any(2)
    rank_load = np.where(has, _NEVER, rows.rank_load[at])
    cost = np.repeat(rank_load, ids.shape[2], axis=1) - rows.carried[at].reshape(flat.shape)
    penalty = rows.rank_load[at].sum(1)[:, None] * np.float32(10)
    cost = np.where(left <= limit[:, None], cost, np.where(left < needy * np.float32(0.999), cost + penalty, _NEVER))
    return np.where(cost < _NEVER / 2, cost, _NEVER)


def _change(rows: _Rows, at: Indices) -> Indices:
    """One change in each row that gains by it; returns those rows."""
    depth = rows.ids.shape[2]
    view = _View(rows, at)
    gain, choice = view.best(view.after_trade(), rows.budget[at] >= 2)
    gain *= np.float32(0.5)  # a trade changes two slots, a copy one
    is_copy = np.zeros(len(at), bool)
    if rows.may_copy:
        copy_gain, copy_choice = view.best(view.after_copy(), rows.budget[at] >= 1)
        is_copy = copy_gain > gain
        gain, choice = np.where(is_copy, copy_gain, gain), np.where(is_copy, copy_choice, choice)
    partner, rest = np.divmod(choice, depth * depth)
    slot, other_slot = np.divmod(rest, depth)
    other = view.light[np.arange(len(at)), partner]
    helps = gain > view.heaviest * _LEAST_GAIN
    do = np.nonzero(helps & ~is_copy)[0]
    rows.trade(at[do], view.heavy[do], slot[do], other[do], other_slot[do])
    do = np.nonzero(helps & is_copy)[0]
    if do.size:
        rows.replace(at[do], other[do], other_slot[do], view.heavy_ids[do, slot[do]])
    changed: Indices = at[helps]
    return changed


class _View:
    """The heaviest rank of each row beside its lightest ones. Options are [rows, partner, slot, partner's slot]."""

    def __init__(self, rows: _Rows, at: Indices) -> None:
        self.rows, self.at = rows, at
        load = rows.rank_load[at]
        num_partners = min(_LIGHTEST, load.shape[1] - 1)
        self.every = np.arange(len(at))
        self.heavy = load.argmax(1)
        self.heaviest = load[self.every, self.heavy]
        self.light = order.roughly_ascending(load)[:, :num_partners].astype(np.int64)
        self.light_load = np.take_along_axis(load, self.light, axis=1)[:, :, None, None]
        self.heavy_ids = rows.ids[at, self.heavy]
        self.light_ids = rows.ids[at[:, None], self.light]
        self.gives = rows.carried[at, self.heavy][:, None, :, None]
        self.takes = rows.carried[at[:, None], self.light][:, :, None, :]
        same = self.heavy_ids[:, None, :, None] == self.light_ids[:, :, None, :]
        # Neither rank may get an expert that it has.
        self.is_refused = same.any(3, keepdims=True) | same.any(2, keepdims=True)
        self.is_held = same.any(3, keepdims=True)

    def after_trade(self) -> Shares:
        """The heavier of the two ranks after each trade."""
        shift = self.gives - self.takes
        after: Shares = np.maximum(self.heaviest[:, None, None, None] - shift, self.light_load + shift)
        after[self.is_refused] = _NEVER
        return after

    def after_copy(self) -> Shares:
        """The heaviest rank that changes when the light one gets a copy instead of what lies in the slot."""
        rows, at = self.rows, self.at
        copies = rows.count[at[:, None], self.heavy_ids].astype(np.float32)[:, None, :, None]
        dropped = rows.count[at[:, None, None], self.light_ids].astype(np.float32)[:, :, None, :]
        heavy = self.heaviest[:, None, None, None] - self.gives / (copies + 1)
        light = self.light_load - self.takes + self.gives * copies / (copies + 1)
        after = np.maximum(heavy, light)
        if (dropped > 1).any():
            # The other copies of what is dropped grow, on ranks that may be heavy already.
            grown = self._heaviest_holder()[self.every[:, None, None], self.light_ids][:, :, None, :]
            after = np.maximum(after, grown + self.takes / np.maximum(dropped - 1, 1))
        return np.where(self.is_held | (dropped < 2), _NEVER, after)

    def _heaviest_holder(self) -> Shares:
        """The load of the heaviest rank that has each expert: [rows, experts]."""
        rows, at = self.rows, self.at
        held = np.zeros(rows.load[at].shape, np.float32)
        ids = rows.ids[at].reshape(len(at), -1)
        np.maximum.at(held, (self.every[:, None], ids), np.repeat(rows.rank_load[at], rows.ids.shape[2], axis=1))
        return held

    def best(self, after: Shares, is_affordable: NDArray[np.bool_]) -> tuple[Shares, Indices]:
        """(gain, option) per row. What a rank gets below the target is no gain."""
        target = self.rows.target[self.at][:, None, None, None]
        gain = (self.heaviest[:, None, None, None] - np.maximum(after, target)).reshape(len(self.at), -1)
        option = gain.argmax(1)
        return np.where(is_affordable, gain[self.every, option], -_NEVER), option

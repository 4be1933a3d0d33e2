"""Improves a placement that is in use with as few changed slots as possible.

Both phases make one change per row (layer) and step, in all rows at once. First, an expert whose copies are larger than
the target allows gets one more copy, in the slot that is cheapest to give up. Then the heaviest rank of a row either
trades a slot with one of the lightest ranks, or a light rank takes a copy of one of its experts in place of a copy that
another expert can do without, whichever gains more.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import order
from penstock.eplb.maps import Plan, max_copies
from penstock.eplb.order import Ids, Indices, Shares
from penstock.eplb.planner import copies, rank_load_bound

_NEVER = np.float32(3e38)
_LIGHTEST = 6  # number of lightest ranks tried as partners; more of them gain little
_PATIENCE = np.float32(1.15)  # copies may be this much larger than with the best counts
_LEAST_GAIN = np.float32(1e-5)  # as a fraction of the heaviest rank's load; below it, a row is finished
_MAX_STEPS = 400


class SearchedRows:
    """The layers of a plan with a smoothed load, and the best balance that each can reach."""

    def __init__(self, plan: Plan, load: Shares) -> None:
        self._load, self._ranks = load, plan.ranks
        self._may_copy = plan.slots > plan.experts
        shares = copies(load, plan.slots, max_copies(plan.experts, plan.slots, plan.ranks))[1]
        self._floor = rank_load_bound(shares, plan.ranks, self._may_copy)  # [layers]: bound of the largest rank load
        self._least_share = shares[:, 0]
        mean = load.sum(1) / plan.ranks
        self.reach = np.minimum(mean / self._floor, 1).astype(np.float64)  # [layers]: the balance at this bound

    def improve(self, layers: Indices, phy2log: Ids, aim: float, budget: Indices) -> Ids:
        """Return placements of these layers, searched for a largest rank load of at most floor / aim."""
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
    """Placements being changed; the `at` arguments below are row indices."""

    load: Shares  # [rows, experts]
    ids: Indices  # [rows, ranks, slots per rank]
    target: Shares  # [rows]: the largest rank load to reach
    least_share: Shares  # [rows]: the largest share with the best counts
    budget: Indices  # [rows]: the number of slots that may still change
    may_copy: bool  # whether the number of copies of an expert may change

    def __post_init__(self) -> None:
        rows, experts = self.load.shape
        cells = self.ids.reshape(rows, -1) + np.arange(0, rows * experts, experts)[:, None]
        self.count = np.bincount(cells.ravel(), minlength=rows * experts).reshape(rows, experts)
        self.share = np.zeros_like(self.load)
        np.divide(self.load, self.count, out=self.share, where=self.count > 0)
        self.carried = np.empty(self.ids.shape, np.float32)
        self.rank_load = np.empty(self.ids.shape[:2], np.float32)
        self.update_loads(np.arange(rows))

    def update_loads(self, at: Indices) -> None:
        """Recompute the loads of slots and ranks from the shares and the placement."""
        ids = self.ids[at]
        self.carried[at] = self.share[at[:, None, None], ids]
        self.rank_load[at] = self.carried[at].sum(2)

    def above_target(self, at: Indices) -> Indices:
        """Return the given rows whose heaviest rank is above the target."""
        heavy: Indices = at[self.rank_load[at].max(1) > self.target[at]]
        return heavy

    def replace(self, at: Indices, rank: Indices, slot: Indices, expert: Indices) -> None:
        """Replace the expert in a slot with one more copy of another expert, in each of these rows."""
        old = self.ids[at, rank, slot]
        self.ids[at, rank, slot] = expert
        self.count[at, expert] += 1
        self.count[at, old] -= 1
        self.share[at, expert] = self.load[at, expert] / self.count[at, expert]
        self.share[at, old] = self.load[at, old] / self.count[at, old]
        self.budget[at] -= 1
        self.update_loads(at)

    def trade(self, at: Indices, rank: Indices, slot: Indices, other: Indices, other_slot: Indices) -> None:
        """Exchange the experts of two slots in each of these rows."""
        ours, theirs = (at, rank, slot), (at, other, other_slot)
        self.ids[ours], self.ids[theirs] = self.ids[theirs], self.ids[ours]
        self.carried[ours], self.carried[theirs] = self.carried[theirs], self.carried[ours]
        self.budget[at] -= 2
        for touched in (rank, other):
            self.rank_load[at, touched] = self.carried[at, touched].sum(1)


def _improve(rows: _Rows) -> None:
    """Bring every row to its target, or as close as single changes within its budget allow."""
    at = rows.above_target(np.arange(len(rows.load)))
    if rows.may_copy:
        _relieve(rows, at)
    at = rows.above_target(at)
    for _ in range(_MAX_STEPS):
        if not at.size:
            return
        at = rows.above_target(_change(rows, at))


def _relieve(rows: _Rows, at: Indices) -> None:
    """Add copies of experts whose copies are too large, one per row and step."""
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
    """Return the cost of using each slot for a copy of `expert`: the rest of its rank's load, or _NEVER.

    The slot's expert must keep at least one copy, and its remaining copies should not be too large. If every slot would
    violate the latter, copies smaller than those of `expert` are accepted with a penalty.
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
    """Make one change in each row that gains from it; return those rows."""
    depth = rows.ids.shape[2]
    view = _View(rows, at)
    gain, choice = view.best(view.after_trade(), rows.budget[at] >= 2)
    gain *= np.float32(0.5)  # a trade changes two slots, a new copy one
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
    """The heaviest rank of each row and its lightest ranks. Options are [rows, partner, slot, partner's slot]."""

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
        # No rank may get an expert that it already has.
        self.is_refused = same.any(3, keepdims=True) | same.any(2, keepdims=True)
        self.is_held = same.any(3, keepdims=True)

    def after_trade(self) -> Shares:
        """Return the larger load of the two ranks after each trade."""
        shift = self.gives - self.takes
        after: Shares = np.maximum(self.heaviest[:, None, None, None] - shift, self.light_load + shift)
        after[self.is_refused] = _NEVER
        return after

    def after_copy(self) -> Shares:
        """Return the largest changed rank load after a copy of the heavy rank's expert replaces the light rank's."""
        rows, at = self.rows, self.at
        copies = rows.count[at[:, None], self.heavy_ids].astype(np.float32)[:, None, :, None]
        dropped = rows.count[at[:, None, None], self.light_ids].astype(np.float32)[:, :, None, :]
        heavy = self.heaviest[:, None, None, None] - self.gives / (copies + 1)
        light = self.light_load - self.takes + self.gives * copies / (copies + 1)
        after = np.maximum(heavy, light)
        if (dropped > 1).any():
            # The other copies of the dropped expert grow, on ranks that may already be heavy.
            grown = self._heaviest_holder()[self.every[:, None, None], self.light_ids][:, :, None, :]
            after = np.maximum(after, grown + self.takes / np.maximum(dropped - 1, 1))
        return np.where(self.is_held | (dropped < 2), _NEVER, after)

    def _heaviest_holder(self) -> Shares:
        """Return the load of the heaviest rank that holds each expert: [rows, experts]."""
        rows, at = self.rows, self.at
        held = np.zeros(rows.load[at].shape, np.float32)
        ids = rows.ids[at].reshape(len(at), -1)
        np.maximum.at(held, (self.every[:, None], ids), np.repeat(rows.rank_load[at], rows.ids.shape[2], axis=1))
        return held

    def best(self, after: Shares, is_affordable: NDArray[np.bool_]) -> tuple[Shares, Indices]:
        """Return (gain, option) per row. Going below the target is not a gain."""
        target = self.rows.target[self.at][:, None, None, None]
        gain = (self.heaviest[:, None, None, None] - np.maximum(after, target)).reshape(len(self.at), -1)
        option = gain.argmax(1)
        return np.where(is_affordable, gain[self.every, option], -_NEVER), option

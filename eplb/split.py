"""How an expert's tokens are split over its copies: balance that costs no move.

Equal shares are best only for the load that a plan was made for. When the load drifts, a copy on a rank that has
become light can take more than one on a rank that has become heavy. All layers step together: every copy's share
moves against how much heavier its rank is than the ranks of the other copies, damped by the number of split experts
on the rank, because they all move at once.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.maps import WHOLE, Load, Plan, Weights, evenness, fitting
from penstock.eplb.order import Ids

_STEPS = 30
_RATE = 0.5  # 1 overshoots where a rank has a single split expert


def reweight(load: ArrayLike, plan: Plan) -> Plan:
    """The same placement with the shares of copies fitted to `load`; no layer's balance gets lower."""
    return plan.with_(plan.phy2log, split(fitting(load, plan), plan.phy2log, plan.weight, plan.ranks))


def split(load: Load, phy2log: Ids, weight: Weights, ranks: int) -> Weights:
    """Better weights for a placement: [layers, slots]. Layers that gain nothing keep theirs."""
    copies = _Copies(load, phy2log, ranks)
    if not len(copies.slot):
        return weight
    fitted = weight.copy()
    fitted.ravel()[copies.slot] = copies.quantise(copies.descend(weight))
    before = evenness(load, phy2log, weight, ranks)
    after = evenness(load, phy2log, fitted, ranks)
    return np.where((after > before)[:, None], fitted, weight)


class _Copies:
    """The copies of all experts that have more than one, sorted by layer, expert and slot."""

    def __init__(self, load: Load, phy2log: Ids, ranks: int) -> None:
        layers, slots = phy2log.shape
        cell = (phy2log + np.arange(0, load.size, load.shape[1])[:, None]).ravel()
        count = np.bincount(cell, minlength=load.size)
        copied = np.nonzero(count[cell] > 1)[0]
        self.slot = copied[np.argsort(cell[copied], kind="stable")]  # into the flat slots
        expert = cell[self.slot]
        self.first = np.ones(len(expert), bool)  # whether a copy opens its expert
        self.first[1:] = expert[1:] != expert[:-1]
        self.starts = np.nonzero(self.first)[0]
        self.owner = np.cumsum(self.first) - 1  # which of the split experts it belongs to
        self.num_copies = np.diff(self.starts, append=len(expert))
        self.total = load.ravel()[expert[self.starts]]  # per split expert
        self.rank = self.slot // (slots // ranks)  # layer · ranks + rank
        self.layer = self.slot // slots
        by_slot = np.where(count[cell] > 1, 0.0, load.ravel()[cell])
        self.base = by_slot.reshape(layers, ranks, slots // ranks).sum(2).ravel()  # what ranks carry besides
        self.ranks = ranks

    def descend(self, weight: Weights) -> NDArray[np.float64]:
        """The load of every copy, with the smallest largest rank load per layer that was met on the way."""
        carried: NDArray[np.float64] = weight.ravel()[self.slot] / WHOLE * self.total[self.owner]
        best, least = carried, np.full(len(self.base) // self.ranks, np.inf)
        crowd = np.bincount(self.rank, minlength=len(self.base))[self.rank]
        for _ in range(_STEPS):
            by_rank = self.base + np.bincount(self.rank, carried, len(self.base))
            largest = by_rank.reshape(-1, self.ranks).max(1)
            best = np.where((largest < least)[self.layer], carried, best)
            least = np.minimum(least, largest)
            around = by_rank[self.rank]
            middle = np.add.reduceat(around, self.starts) / self.num_copies
            carried = np.maximum(carried - _RATE * (around - middle[self.owner]) / crowd, 0)
            carried *= self._of_whole(carried, self.total)[self.owner]
        return best

    def quantise(self, carried: NDArray[np.float64]) -> Weights:
        """Weights in 65535ths: the sums over an expert's copies are rounded, so that they end at the whole."""
        unit = np.where(np.add.reduceat(carried, self.starts)[self.owner] > 0, carried, 1.0)
        part = unit * self._of_whole(unit, np.full(len(self.starts), float(WHOLE)))[self.owner]
        upto = np.cumsum(part)
        upto -= (upto - part)[self.starts][self.owner]
        upto = np.rint(upto).astype(np.int64)
        before = np.roll(upto, 1)
        before[self.starts] = 0
        weights: Weights = (upto - before).astype(np.uint16)
        return weights

    def _of_whole(self, carried: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
        """What every split expert's copies must be multiplied by to add up to the whole."""
        total = np.add.reduceat(carried, self.starts)
        return np.divide(whole, total, out=np.zeros_like(total), where=total > 0)

"""Fits the weights of an expert's copies to a load, which improves the balance without a move.

Equal shares are best only for the load that a plan was made for. When the load drifts, a copy on a lightly loaded rank
can take more tokens than one on a heavily loaded rank. All layers are fitted together: each step lowers a copy's share
in proportion to its rank's load above the mean of the ranks that hold its expert, divided by the number of replicated
experts on the rank, because they all change at once.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.maps import WHOLE, Load, Plan, Weights, evenness, validate_load_for
from penstock.eplb.order import Ids

_STEPS = 30
_RATE = 0.5  # 1 overshoots on a rank with a single replicated expert


def reweight(load: ArrayLike, plan: Plan) -> Plan:
    """Return the same placement with weights fitted to `load`; the balance of no layer decreases."""
    return plan.with_(plan.phy2log, split(validate_load_for(load, plan), plan.phy2log, plan.weight, plan.ranks))


def split(load: Load, phy2log: Ids, weight: Weights, ranks: int) -> Weights:
    """Return better weights [layers, slots] for a placement; layers that gain nothing keep their weights."""
    copies = _Copies(load, phy2log, ranks)
    if not len(copies.slot):
        return weight
    fitted = weight.copy()
    fitted.ravel()[copies.slot] = copies.quantize(copies.fit_loads(weight))
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
        self.slot = copied[np.argsort(cell[copied], kind="stable")]  # indices into the flattened slots
        expert = cell[self.slot]
        self.first = np.ones(len(expert), bool)  # whether a copy is the first of its expert
        self.first[1:] = expert[1:] != expert[:-1]
        self.starts = np.nonzero(self.first)[0]
        self.owner = np.cumsum(self.first) - 1  # index of its expert among the replicated experts
        self.num_copies = np.diff(self.starts, append=len(expert))
        self.total = load.ravel()[expert[self.starts]]  # load per replicated expert
        self.rank = self.slot // (slots // ranks)  # layer · ranks + rank
        self.layer = self.slot // slots
        by_slot = np.where(count[cell] > 1, 0.0, load.ravel()[cell])
        self.base = by_slot.reshape(layers, ranks, slots // ranks).sum(2).ravel()  # rank load of unreplicated experts
        self.ranks = ranks

    def fit_loads(self, weight: Weights) -> NDArray[np.float64]:
        """Return the load of every copy at the step with the smallest largest rank load, per layer."""
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
            carried *= self._scale_to(carried, self.total)[self.owner]
        return best

    def quantize(self, carried: NDArray[np.float64]) -> Weights:
        """Return weights in 65535ths, rounding cumulative sums so that each expert's weights add up exactly."""
        unit = np.where(np.add.reduceat(carried, self.starts)[self.owner] > 0, carried, 1.0)
        part = unit * self._scale_to(unit, np.full(len(self.starts), float(WHOLE)))[self.owner]
        upto = np.cumsum(part)
        upto -= (upto - part)[self.starts][self.owner]
        upto = np.rint(upto).astype(np.int64)
        before = np.roll(upto, 1)
        before[self.starts] = 0
        weights: Weights = (upto - before).astype(np.uint16)
        return weights

    def _scale_to(self, carried: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the factor per replicated expert that scales its copies to add up to `whole`."""
        total = np.add.reduceat(carried, self.starts)
        return np.divide(whole, total, out=np.zeros_like(total), where=total > 0)

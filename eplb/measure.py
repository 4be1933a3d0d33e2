"""How even a plan is for a load, and how even any plan could be: 1 is perfect, 1 / ranks is one rank doing it all."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.eplb.load import check_shape, checked
from penstock.eplb.maps import WHOLE, Plan, max_copies
from penstock.eplb.replicas import copies


def balance(load: ArrayLike, plan: Plan) -> NDArray[np.float64]:
    """Mean rank load / largest rank load, per layer; 1 for a layer without any load."""
    return evenness(rank_loads(fitting(load, plan), plan.phy2log, plan.weight, plan.ranks))


def evenness(by_rank: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean / largest of every row."""
    largest = by_rank.max(axis=1)
    return np.divide(by_rank.mean(axis=1), largest, out=np.ones_like(largest), where=largest > 0)


def rank_loads(
    load: NDArray[np.float64], phy2log: NDArray[np.int16], weight: NDArray[np.uint16], ranks: int
) -> NDArray[np.float64]:
    """What every rank carries: [layers, ranks]. Copies share an expert's load by their weights."""
    by_slot = np.take_along_axis(load, phy2log.astype(np.int64), axis=1) * (weight / WHOLE)
    return by_slot.reshape(len(load), ranks, by_slot.shape[1] // ranks).sum(axis=2)


def fitting(load: ArrayLike, plan: Plan) -> NDArray[np.float64]:
    """The load, checked, with as many layers and experts as the plan; else ValueError."""
    array = checked(load)
    if array.shape != (plan.layers, plan.experts):
        raise ValueError(f"load: shape {array.shape}, must be {(plan.layers, plan.experts)} as in the plan")
    return array


def bound(load: ArrayLike, slots: int, ranks: int) -> NDArray[np.float64]:
    """A balance per layer that no plan exceeds, however it splits load over copies. It need not be attainable.

    Some rank carries at least the mean, and some copy at least the smallest possible largest share. Without spare
    slots the hottest expert cannot be alone either: its rank has at least the coldest others beside it.
    """
    load = checked(load)
    layers, experts = load.shape
    check_shape(experts, slots, ranks)
    mean = load.sum(axis=1) / ranks
    least = _least_largest_share(load, slots, ranks)
    if slots == experts:
        least += np.sort(load, axis=1)[:, : slots // ranks - 1].sum(axis=1)
    floor = np.maximum(mean, least)
    return np.divide(mean, floor, out=np.ones(layers), where=floor > 0)


def _least_largest_share(load: NDArray[np.float64], slots: int, ranks: int) -> NDArray[np.float64]:
    """The largest load of a copy when spare slots are given out best; at most one copy per rank helps."""
    limit = max_copies(load.shape[1], slots, ranks)
    scale = np.where(load.max(axis=1) > 0, load.max(axis=1), 1)[:, None]
    ids = copies((load / scale).astype(np.float32), slots, limit)[0].astype(np.int64)
    rows = np.arange(len(load))[:, None] * load.shape[1]
    count = np.bincount((ids + rows).ravel(), minlength=load.size).reshape(load.shape)
    # The counts are best in float32; a copy of a float64 load may then be a rounding below them.
    return (load / np.minimum(count, ranks)).max(axis=1) * (1 - 2.0**-22)

"""Loads that tests and benchmarks plan with: like those of real routers, and the awkward ones."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import Plan, plan
from tests.support.refusals import cases


class Shape(NamedTuple):
    layers: int
    experts: int
    slots: int
    ranks: int

    def load(self, kind: str = "zipf", seed: int = 0) -> NDArray[np.int64]:
        return skewed(kind, self.layers, self.experts, seed)

    def plan(self, kind: str = "zipf", seed: int = 0) -> Plan:
        return plan(self.load(kind, seed), self.slots, self.ranks)


SHAPES: list[Shape] = cases(__file__, "shapes of loads", Shape=Shape)


def skewed(kind: str, layers: int, experts: int, seed: int = 0, tokens: int = 1 << 20) -> NDArray[np.int64]:
    """Return counts of tokens over `zipf` or lognormal (`logn1`: sigma 1) popularity."""
    rng = np.random.default_rng(seed)
    if kind == "zipf":
        popularity = np.stack([rng.permutation(1 / np.arange(1, experts + 1)) for _ in range(layers)])
    else:
        popularity = np.exp(rng.normal(0, float(kind.removeprefix("logn")), (layers, experts)))
    counts: NDArray[np.int64] = rng.poisson(popularity / popularity.sum(1, keepdims=True) * tokens)
    return counts


def drifted(load: NDArray[np.int64], sigma: float, seed: int = 0) -> NDArray[np.int64]:
    rng = np.random.default_rng(seed)
    later: NDArray[np.int64] = rng.poisson(load * np.exp(rng.normal(0, sigma, load.shape)))
    return later


def awkward(layers: int, experts: int) -> dict[str, NDArray[np.float64]]:
    one_hot = np.zeros((layers, experts))
    one_hot[:, experts // 2] = 1e6
    return {
        "zero": np.zeros((layers, experts)),
        "one hot": one_hot,
        "ties": np.ones((layers, experts)) * 7,
        "tiny": np.full((layers, experts), 1e-300),
        "huge": np.full((layers, experts), 1e300),
        "half zero": np.where(np.arange(experts) % 2, 1000.0, 0.0) * np.ones((layers, 1)),
    }


def num_repeats(plan: Plan) -> int:
    """Count the slots whose expert lies in another slot of the same rank too."""
    by_rank = np.sort(plan.phy2log.reshape(plan.layers, plan.ranks, -1), axis=2)
    return int((by_rank[..., 1:] == by_rank[..., :-1]).sum())

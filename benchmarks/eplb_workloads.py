"""Workloads for the expert planner: model shapes, synthetic loads, and the published algorithm as loops.

The published algorithm: every expert gets one copy, and each spare slot goes to the expert with the largest load per
copy. Then copies are packed in falling order of load, each to the lightest rank that is not full.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tests.support import loads
from tests.support.loads import skewed

TOKENS = 1 << 20  # in the window that a load was counted over
KINDS = ("zipf", "logn1", "logn0.5")
DRIFTS = ("noise", "0.1", "0.3", "switch")


class Cell(NamedTuple):
    """A model on a number of ranks."""

    model: str
    layers: int
    experts: int
    experts_per_token: int
    slots: int
    ranks: int

    @property
    def name(self) -> str:
        return f"{self.model} {self.ranks} ranks, {self.slots} slots"

    @property
    def is_redundant(self) -> bool:
        return self.slots > self.experts


CELLS = tuple(Cell(*fields) for fields in json.loads(Path(__file__).with_suffix(".json").read_text()))
# Drift is compared with copies; without copies, moves alone cannot reach the target.
DRIFTING = tuple(cell for cell in CELLS if cell.is_redundant)


def load(cell: Cell, kind: str, seed: int) -> NDArray[np.int64]:
    return skewed(kind, cell.layers, cell.experts, seed, TOKENS * cell.experts_per_token)


def drifted(cell: Cell, kind: str, seed: int, drift: str) -> NDArray[np.int64]:
    """Return the load some time later: another sample, a lognormal factor per expert, or other hot experts."""
    if drift == "switch":
        return load(cell, kind, seed + 100)
    return loads.drifted(load(cell, kind, seed), 0.0 if drift == "noise" else float(drift), seed + 200)


def plan_by_definition(load: ArrayLike, slots: int, ranks: int) -> NDArray[np.int64]:
    """Return the expert in every slot: [layers, slots]."""
    placed = []
    for row in np.asarray(load, np.float64):
        copies, share = replicate(row, slots)
        placed.append([copies[item] for items in pack(share[copies], ranks) for item in items])
    return np.array(placed)


def replicate(
    load: NDArray[np.float64], slots: int, limit: int | None = None
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the expert of every copy and each expert's load per copy; `limit` is the maximum number of copies."""
    count = np.ones(len(load), np.int64)
    for _ in range(slots - len(load)):
        share = load / count
        if limit is not None:
            share[count >= limit] = -1
        count[share.argmax()] += 1
    return np.repeat(np.arange(len(load)), count), load / count


def pack(weights: NDArray[np.float64], num_packs: int) -> list[list[int]]:
    """Return the items of every pack, equally many in each."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable"):
        lightest = int(total.argmin())
        packs[lightest].append(int(item))
        total[lightest] += weights[item]
        if len(packs[lightest]) == len(weights) // num_packs:
            total[lightest] = np.inf
    return packs

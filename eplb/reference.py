"""The published way to plan, from its definition and slowly: the floor of quality that tests and benchmarks hold.

Copies: every expert has one; each spare slot goes to the expert with the largest load per copy. Packing: copies in
falling order, each to the lightest rank that is not full. In groups: groups are packed to nodes the same way, every
node gets as many spare slots, and packs its own copies to its own ranks. Nothing that serves imports this.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray


def plan_by_definition(load: ArrayLike, slots: int, ranks: int, groups: int = 1, nodes: int = 1) -> NDArray[np.int64]:
    """The expert in every slot: [layers, slots]."""
    return np.array([_layer(row, slots, ranks, groups, nodes) for row in np.asarray(load, np.float64)])


def _layer(load: NDArray[np.float64], slots: int, ranks: int, groups: int, nodes: int) -> list[int]:
    members = np.arange(len(load)).reshape(groups, -1)
    placed: list[int] = []
    for packed in pack(load[members].sum(1), nodes):
        experts = members[packed].ravel()
        copies, share = replicate(load[experts], slots // nodes)
        for rank in pack(share[copies], ranks // nodes):
            placed.extend(experts[copies[rank]])
    return placed


def replicate(load: NDArray[np.float64], slots: int, limit: int | None = None) -> tuple[NDArray[np.int64], NDArray]:
    """(the expert of every copy, the load per copy of every expert); with a limit no expert has more copies."""
    count = np.ones(len(load), np.int64)
    for _ in range(slots - len(load)):
        share = load / count
        if limit is not None:
            share[count >= limit] = -1
        count[share.argmax()] += 1
    return np.repeat(np.arange(len(load)), count), load / count


def pack(weights: NDArray[np.float64], num_packs: int) -> list[list[int]]:
    """The items of every pack, equally many in each."""
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    total = np.zeros(num_packs)
    for item in np.argsort(-weights, kind="stable"):
        lightest = int(total.argmin())
        packs[lightest].append(int(item))
        total[lightest] += weights[item]
        if len(packs[lightest]) == len(weights) // num_packs:
            total[lightest] = np.inf
    return packs

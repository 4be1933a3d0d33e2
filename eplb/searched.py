"""What `search` works on: whole layers, or nodes of layers where experts must stay on the node they are on.

In global plans a row is a layer. In group plans every node is a row that knows its own experts only. In soft plans a
node is a row too, and copies only change places within it: first copies stay at home, counts stay as they are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import search
from penstock.eplb.maps import Plan, max_copies
from penstock.eplb.replicas import Shares, copies


@dataclass
class SearchedRows:
    """How the layers of a plan are searched: as wholes, or each node for itself where experts must stay on theirs."""

    load: Shares  # [layers · nodes, experts of a row]
    local: NDArray[np.int64]  # [layers, experts]: an expert's number within its row
    names: NDArray[np.int64]  # [layers · nodes, experts of a row]: and back
    nodes: int
    ranks: int  # of a row
    floor: Shares  # [layers]: what the heaviest rank carries at best
    least_share: Shares  # [layers · nodes]
    reach: NDArray[np.float64]  # [layers]: the balance at that
    may_copy: bool

    def improved(
        self, layers: NDArray[np.int64], phy2log: NDArray[np.int16], aim: float, budget: NDArray[np.int64]
    ) -> NDArray[np.int16]:
        """The placements of these layers after a search for the heaviest rank load of floor / aim."""
        row = (layers[:, None] * self.nodes + np.arange(self.nodes)).ravel()
        ids = np.take_along_axis(self.local[layers], phy2log.astype(np.int64), axis=1)
        target = (self.floor[layers] / np.float32(aim)).repeat(self.nodes)
        # A budget is a layer's; nodes share it evenly.
        rows = search.Rows(
            load=self.load[row],
            ids=ids.reshape(len(row), self.ranks, -1),
            target=target,
            least_share=self.least_share[row],
            budget=(budget // self.nodes).repeat(self.nodes),
            may_copy=self.may_copy,
        )
        search.improve(rows)
        names = np.take_along_axis(self.names[row], rows.ids.reshape(len(row), -1), axis=1)
        return names.reshape(phy2log.shape).astype(np.int16)


def rows_of(plan: Plan, load: Shares) -> SearchedRows:
    """The rows of a plan for a smoothed load."""
    if plan.nodes == 1 or plan.locality == "global":
        local = np.broadcast_to(np.arange(plan.experts), load.shape)
        return _counted(load, local, local, 1, plan)
    if plan.locality == "group" or plan.slots == plan.experts:
        return _confined(load, plan)
    return _fixed(load, plan)


def _counted(load: Shares, local: NDArray[np.int64], names: NDArray[np.int64], nodes: int, plan: Plan) -> SearchedRows:
    """Rows that have all copies of their experts, so that counts may change."""
    slots, ranks = plan.slots // nodes, plan.ranks // nodes
    experts = load.shape[1]
    shares = copies(load, slots, max_copies(experts, slots, ranks))[1]
    floor = np.maximum(load.sum(1) / np.float32(ranks), shares[:, 0])
    if slots == experts:
        floor = np.maximum(floor, shares[:, 0] + shares[:, slots - slots // ranks + 1 :].sum(1))
    return _rows(load, local, names, nodes, ranks, floor, shares[:, 0], slots > experts)


def _confined(load: Shares, plan: Plan) -> SearchedRows:
    """Group plans: the rows are nodes, each with the experts that lie there."""
    layers, experts, nodes = plan.layers, plan.experts, plan.nodes
    node_of_slot = np.arange(plan.slots) // (plan.slots // nodes)
    home = node_of_slot[plan.log2phy[:, :, 0]]
    if (np.take_along_axis(home, plan.phy2log.astype(np.int64), axis=1) != node_of_slot).any():
        raise ValueError("plan: locality is group, but an expert lies on two nodes, must lie on one")
    names = np.argsort(home, axis=1, kind="stable")
    if (np.take_along_axis(home, names, axis=1) != np.arange(experts) // (experts // nodes)).any():
        raise ValueError(f"plan: locality is group, every node must have {experts // nodes} experts")
    local = np.empty_like(names)
    np.put_along_axis(local, names, np.arange(experts)[None] % (experts // nodes), axis=1)
    rows = np.take_along_axis(load, names, axis=1).reshape(layers * nodes, -1)
    return _counted(rows, local, names.reshape(rows.shape), nodes, plan)


def _fixed(load: Shares, plan: Plan) -> SearchedRows:
    """Soft plans: the rows are nodes, a copy carries what it carries."""
    experts, nodes = plan.experts, plan.nodes
    local = np.broadcast_to(np.arange(experts), load.shape)
    rows = plan.layers * nodes
    cells = plan.phy2log.reshape(rows, -1) + np.arange(0, rows * experts, experts)[:, None]
    here = np.bincount(cells.ravel(), minlength=rows * experts).reshape(rows, experts)
    share = (load / plan.count).repeat(nodes, axis=0).astype(np.float32)
    on_row = share * here.astype(np.float32)
    least = np.where(here > 0, share, 0).max(1)
    ranks = plan.ranks // nodes
    floor = np.maximum(on_row.sum(1) / np.float32(ranks), least)
    return _rows(on_row, local, local.repeat(nodes, axis=0), nodes, ranks, floor, least, False)


def _rows(
    load: Shares,
    local: NDArray[np.int64],
    names: NDArray[np.int64],
    nodes: int,
    ranks: int,
    floor: Shares,
    least_share: Shares,
    may_copy: bool,
) -> SearchedRows:
    of_layer = floor.reshape(-1, nodes).max(1)
    mean = load.sum(1).reshape(-1, nodes).sum(1) / (ranks * nodes)
    reach = np.minimum(mean / of_layer, 1).astype(np.float64)
    return SearchedRows(load, local, names, nodes, ranks, of_layer, least_share, reach, may_copy)

"""Transfers: carried out on experts' names they give the new plan, from the nearest sources, each once."""

from collections import Counter

import numpy as np
import pytest

from penstock.eplb import Plan, transfers
from tests.support.loads import SHAPES, Shape

FAR = 1  # ranks per node, so that all others are equally far
CASES = [
    *((shape, FAR) for shape in SHAPES),
    (Shape(8, 64, 72, 8), 4),
    (Shape(4, 256, 288, 32), 8),
    (Shape(4, 256, 320, 64), 8),
]
SMALL = Shape(3, 16, 24, 4)


@pytest.mark.parametrize(("shape", "ranks_per_node"), CASES, ids=str)
def test_copies_from_the_old_plan_give_the_new_one(shape: Shape, ranks_per_node: int) -> None:
    old, new = shape.plan(), shape.plan(seed=7)
    rows = transfers(old, new, ranks_per_node)
    layer, expert, source, to = rows.T
    weights = old.phy2log.copy()  # what lies in a slot, by its expert's name
    weights[layer, to] = old.phy2log[layer, source]
    assert (weights == new.phy2log).all()
    assert (old.phy2log[layer, source] == expert).all()
    assert len(rows) == (old.phy2log != new.phy2log).sum()
    assert (np.lexsort((to, layer)) == np.arange(len(rows))).all()


@pytest.mark.parametrize(("shape", "ranks_per_node"), CASES, ids=str)
def test_a_rank_receives_each_expert_from_one_source_the_nearest(shape: Shape, ranks_per_node: int) -> None:
    old, new = shape.plan(), shape.plan(seed=7)
    depth = old.slots_per_rank
    sources: dict[tuple[int, int, int], set[int]] = {}
    for layer, expert, source, to in transfers(old, new, ranks_per_node).tolist():
        holders = np.nonzero(old.phy2log[layer] == expert)[0]
        if to // depth in holders // depth:
            assert source // depth == to // depth
        elif to // depth // ranks_per_node in holders // depth // ranks_per_node:
            assert source // depth // ranks_per_node == to // depth // ranks_per_node
        if source // depth != to // depth:
            sources.setdefault((layer, expert, to // depth), set()).add(source)
    assert all(len(found) == 1 for found in sources.values())
    sent = Counter((layer, expert, min(found)) for (layer, expert, _), found in sources.items())
    if ranks_per_node == FAR:  # none sends more than one copy more than another
        for layer, expert in {(layer, expert) for layer, expert, _ in sent}:
            holders = np.nonzero(old.phy2log[layer] == expert)[0]
            loads = [sent[layer, expert, int(holder)] for holder in holders]
            assert max(loads) - min(loads) <= 1


def test_equal_plans_need_no_transfers() -> None:
    old = SMALL.plan()
    assert transfers(old, old, 2).shape == (0, 4)


def test_an_expert_that_a_rank_needs_twice_crosses_once() -> None:
    old = Plan.of([[0, 0, 1, 1, 0, 1]], 2, 3)
    new = Plan.of([[0, 0, 0, 0, 1, 1]], 2, 3)
    rows = transfers(old, new, 1)
    assert {source for _, _, source, to in rows.tolist() if to in (2, 3)} in ({0}, {1}, {4})
    assert [source for _, _, source, to in rows.tolist() if to == 4] == [5]


def test_without_a_number_of_ranks_per_node_all_ranks_are_equally_near() -> None:
    old, new = SHAPES[0].plan(), SHAPES[0].plan(seed=7)
    assert (transfers(old, new) == transfers(old, new, 8)).all()

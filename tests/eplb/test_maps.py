"""The tables of a plan, the choice of a copy, and the load as it is remembered. Transfers: carried out on experts' names they
give the new plan, from the nearest sources, each once."""

from collections import Counter

import numpy as np
import pytest

from penstock.eplb import LoadTracker, Plan, balance, choose, plan, reweight, transfers
from penstock.eplb.maps import WHOLE
from tests.support.loads import SHAPES, Shape, drifted, skewed
from tests.support.refusals import cases


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_tables_are_those_of_a_loop_over_slots(shape: Shape) -> None:
    made = shape.plan()
    for layer in range(shape.layers):
        of: list[list[int]] = [[] for _ in range(shape.experts)]
        for slot, expert in enumerate(made.phy2log[layer]):
            of[expert].append(slot)
        for expert, mine in enumerate(of):
            assert made.count[layer, expert] == len(mine)
            padding = made.log2phy.shape[2] - len(mine)
            assert made.log2phy[layer, expert].tolist() == mine + [-1] * padding
            upto = [(copy + 1) * WHOLE // len(mine) for copy in range(len(mine))]
            assert made.cdf[layer, expert].tolist() == upto + [WHOLE] * padding


def test_the_balance_is_that_of_a_loop_over_slots() -> None:
    load = skewed("zipf", 3, 16)
    made = reweight(drifted(load, 0.5), plan(load, 24, 4))
    for layer, value in enumerate(balance(load, made)):
        ranks = [0.0] * 4
        for slot, expert in enumerate(made.phy2log[layer]):
            ranks[slot // 6] += load[layer, expert] * made.weight[layer, slot] / WHOLE
        assert value == pytest.approx(sum(ranks) / 4 / max(ranks))
    assert (balance(np.zeros((3, 16)), made) == 1).all()


def test_a_plan_survives_a_trip_through_its_placement_and_weights() -> None:
    load = skewed("zipf", 4, 16)
    made = reweight(drifted(load, 0.5), plan(load, 24, 4))
    again = Plan.of(made.phy2log.copy(), 16, 4, weight=made.weight.copy())
    again.check()
    assert again.digest() == made.digest()
    assert (again.cdf == made.cdf).all() and (again.log2phy == made.log2phy).all()


@pytest.mark.parametrize("kind", ["zipf", "logn1"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reweighting_moves_nothing_and_lowers_no_layers_balance(shape: Shape, kind: str) -> None:
    made, later = shape.plan(kind), drifted(shape.load(kind), 0.3)
    fitted = reweight(later, made)
    fitted.check()
    assert (fitted.phy2log == made.phy2log).all()
    assert (balance(later, fitted) >= balance(later, made)).all()
    assert (balance(later, reweight(later, fitted)) >= balance(later, fitted)).all()


def test_reweighting_finds_the_shares_that_even_out_two_ranks() -> None:
    # Expert 0 lies on both ranks; rank 1 has 300 of its own, rank 0 has 100: 0 must give rank 0 three quarters.
    made = Plan.of([[0, 1, 0, 2]], 3, 2)
    fitted = reweight([[400.0, 100.0, 300.0]], made)
    assert fitted.weight[0, 0] / WHOLE == pytest.approx(0.75, abs=0.01)
    assert balance([[400.0, 100.0, 300.0]], fitted)[0] > 0.99


def test_reweighting_gains_most_of_what_drift_has_taken() -> None:
    load = skewed("logn1", 26, 128)
    made, later = plan(load, 160, 16), drifted(load, 0.2)
    assert balance(later, made).mean() < 0.95 < 0.98 < balance(later, reweight(later, made)).mean()


def test_experts_without_load_are_split_evenly_or_as_they_were() -> None:
    made = plan(np.zeros((1, 4)), 8, 4)
    assert reweight(np.zeros((1, 4)), made).digest() == made.digest()


def test_tokens_are_split_over_copies_by_their_weights() -> None:
    load = skewed("zipf", 2, 16)
    made = reweight(drifted(load, 0.7), plan(load, 32, 8))
    tokens = np.arange(1000, 9000)
    for layer in range(2):
        chosen = choose(made, layer, tokens[:, None], np.arange(16)[None])
        assert (made.phy2log[layer, chosen] == np.arange(16)).all()
        share = np.bincount(chosen.ravel(), minlength=32) / len(tokens)
        assert share == pytest.approx(made.weight[layer] / WHOLE, abs=0.003)


def test_a_copy_without_weight_is_never_chosen() -> None:
    made = Plan.of([[0, 1, 0, 1]], 2, 2, weight=[[0, 1, WHOLE, WHOLE - 1]])
    chosen = choose(made, 0, np.arange(200_000), 0)
    assert (chosen == 2).all()


def test_the_choice_depends_on_token_and_expert_alone() -> None:
    made = plan(skewed("zipf", 2, 16), 32, 8)
    tokens, experts = np.arange(500), np.random.default_rng(0).integers(0, 16, (500, 3))
    whole = choose(made, 1, tokens[:, None], experts)
    assert (choose(made, 1, tokens[100:103, None], experts[100:103]) == whole[100:103]).all()
    one_by_one = [[int(choose(made, 1, token, expert)) for expert in experts[token]] for token in range(50)]
    assert one_by_one == whole[:50].tolist()
    # With plain Python numbers, as a kernel would do it.
    hot = int(made.count[1].argmax())
    for token in (0, 1, 77, 2**31 - 1):
        draw = ((token * 2654435769 + hot * 1779033703) % 2**32) * 65535 >> 32
        copy = sum(int(upto) <= draw for upto in made.cdf[1, hot])
        assert choose(made, 1, token, hot) == made.log2phy[1, hot, copy]


def test_a_token_does_not_take_the_same_copy_of_all_its_experts() -> None:
    made = plan(np.ones((1, 8)), 16, 2)
    chosen = choose(made, 0, np.arange(1000)[:, None], np.arange(8)[None])
    is_first = chosen == made.log2phy[0, :, 0]
    together = [np.mean(is_first[:, 0] == is_first[:, other]) for other in range(1, 8)]
    assert max(together) < 0.98 and min(together) > 0.02 and 0.3 < np.mean(together) < 0.7


def test_counts_fade_by_their_age_and_the_steps_between() -> None:
    tracker = LoadTracker(1, 2, window=10)
    tracker.add([[100, 0]], 1)
    assert tracker.load().tolist() == [[100, 0]]
    tracker.add([[0, 0]], 10)  # steps without tokens age what was there
    assert tracker.load()[0, 0] == pytest.approx(100 / np.e)
    tracker.check()


@pytest.mark.parametrize("window", [50, 10**17])  # the second makes the decay of a step less than a float shows
def test_counts_of_several_steps_at_once_weigh_like_those_one_by_one(window: int) -> None:
    once, singly = LoadTracker(1, 1, window=window), LoadTracker(1, 1, window=window)
    for _ in range(20):
        once.add([[7 * 8]], 8)
        for _ in range(8):
            singly.add([[7]], 1)
    assert once.load()[0, 0] == pytest.approx(singly.load()[0, 0])


FAR = 1  # ranks per node, so that all others are equally far
CASES = [*((shape, FAR) for shape in SHAPES), *cases(__file__, "nodes of several ranks", Shape=Shape)]
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

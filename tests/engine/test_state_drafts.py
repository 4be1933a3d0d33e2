"""Drafts where layers keep a state: one that was wrong leaves nothing behind, whatever else happens."""

import random
from itertools import pairwise

import msgspec
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.executor.protocol import GroupInfo, Sampling, Step
from tests.engine.test_groups import FULL, STATE, WINDOW
from tests.engine.test_tiers import tier_storm
from tests.support.simulation import BLOCK_SIZE, World, alone, assert_reached, random_drafts, some_worlds, submit

NGRAM = SpeculativeConfig(method="ngram")
GROUPS = (FULL, STATE)
ALWAYS_7 = Sampling(temperature=0.0, allowed_ids=(7,))
EITHER = Sampling(temperature=0.0, allowed_ids=(7, 8))


def steps_of(world: World) -> list[Step]:
    """Run what is left, and return every step that it takes."""
    steps = []
    while world.scheduler.has_work():
        steps.append(world.run_step())
    return steps


def test_a_wrong_draft_is_gone_back_behind_and_what_was_right_is_sent_and_not_stored_again() -> None:
    world = World(max_in_flight=1, drafts=NGRAM, groups=GROUPS)
    message = submit("a", [7] * 6, max_tokens=50, sampling=EITHER)
    world.submit(message)
    rows = [step.rows[0] for step in steps_of(world)]
    assert world.tokens("a") == alone(message, groups=GROUPS)[0]
    again = [(before, row) for before, row in pairwise(rows) if row.start == before.start]
    assert again, "no draft was wrong"
    for before, row in again:
        assert row.count >= 2 and row.first_token == row.start + 1 and len(row.tokens) == row.count - 1
        assert row.write_from == row.start + row.count - 1, "the last token alone is new"
        assert row.states_out and row.states_out != before.states_out, "it writes the state that the drafts' row read"


def test_drafts_end_where_a_checkpoint_is_due_and_it_is_found() -> None:
    """Every third block: the answer's checkpoints, some of them behind drafts, are as without them."""
    found = []
    for drafts in (None, msgspec.structs.replace(NGRAM, num_speculative_tokens=5)):
        world = World(max_in_flight=1, drafts=drafts, groups=GROUPS)
        world.submit(submit("a", [1, 2, 3], max_tokens=50, sampling=ALWAYS_7))
        drafted = [step.rows[0] for step in steps_of(world) if len(step.rows) > 1]
        ends = [row.start + 1 + len(row.tokens) for row in drafted]
        assert all((row.start + 1) // 12 == (end - 1) // 12 for row, end in zip(drafted, ends, strict=True))
        assert drafts is None or any(end % 12 == 0 for end in ends), "none behind drafts"
        found.append([world.cached(f"{length}", [1, 2, 3, *[7] * length, 9]) for length in range(1, 50)])
    assert found[0] == found[1] and {0, 12, 24, 36, 48} <= set(found[1])


SHAPES: list[tuple[GroupInfo, ...]] = [
    (FULL, STATE),
    (FULL, GroupInfo("state", pages=1)),
    (FULL, WINDOW, GroupInfo("state", pages=5)),
    (WINDOW, STATE),
]


@pytest.mark.timeout(900)
@some_worlds(range(4, 8), 12)
def test_random_worlds_of_states_and_drafts_keep_every_invariant_and_every_token(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong drafts do not make them rarer here."""
    monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 1)
    runs: list[dict[str, int]] = []
    for seed in seeds:
        rng = random.Random(seed)
        groups, chunk = SHAPES[seed % len(SHAPES)], rng.choice([8, 16, 64])
        least = sum(group.most_pages(64, chunk, BLOCK_SIZE) for group in groups) + 1
        world = World(
            num_blocks=least + rng.choice([0, 10, 30, 100]),
            max_in_flight=rng.choice([1, 2, 3]),
            max_num_seqs=rng.choice([2, 3, 8]),
            max_num_batched_tokens=chunk,
            drafts=random_drafts(rng),
            groups=groups,
        )
        runs += [world.storm(rng, 300, f"seed {seed}", repeats=True), tier_storm(seed, 150, True, groups)]
    runs += [{"rejected": run["drafted"] - run["accepted"]} for run in runs]
    wanted = {"accepted": 250, "preempted": 100, "aborted": 100, "finished": 400, "hits_host": 5, "hits": 60}
    assert_reached(runs, wanted | {"rejected": 41}, len(seeds) / 12)

"""Drafts where layers keep a state: one that was wrong leaves nothing behind, whatever else happens."""

from itertools import pairwise

import msgspec
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.executor.protocol import Sampling, Step
from tests.engine.test_groups import FULL, STATE
from tests.support.simulation import CoreRig, World, alone, submit

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


def test_right_drafts_before_a_wrong_one_are_sent_and_not_stored_again() -> None:
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


@pytest.mark.parametrize(("enforce_eager", "is_off"), [(False, True), (True, False)])
def test_on_a_gpu_there_are_no_drafts_because_graphs_have_no_rows_for_them(
    enforce_eager: bool, is_off: bool, caplog: pytest.LogCaptureFixture
) -> None:
    rig = CoreRig(groups=GROUPS, drafts=NGRAM, options={"device": "cuda", "enforce_eager": enforce_eager})
    rig.submit(submit("a", [1, 2, 3], max_tokens=40, sampling=ALWAYS_7))
    rig.run()
    assert (rig.scheduler.stats().draft_tokens == 0) is is_off is ("drafts are off" in caplog.text)


def test_a_request_that_is_aborted_with_drafts_in_flight_frees_their_state() -> None:
    world = World(max_in_flight=1, drafts=NGRAM, groups=GROUPS)
    world.submit(submit("a", [7] * 6, max_tokens=50, sampling=ALWAYS_7))
    (request,) = world.scheduler.requests.values()
    while not request.kv.draft_state:
        if world.scheduler.in_flight:
            world.collect()
        world.executor.submit(world.plan())
    world.abort("a")
    world.collect()
    world.settle()
    assert world.scheduler.stats().num_used_blocks == 0

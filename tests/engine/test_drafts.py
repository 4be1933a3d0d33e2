"""Drafts from a request's own text: where they are found, who gets them, and that they change no tokens. Where layers keep
a state, one that was wrong leaves nothing behind."""

import random
from array import array
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from penstock.engine.config import SpeculativeConfig
from penstock.engine.core.drafts import WINDOW, find_repeat
from penstock.engine.messages import Submit
from penstock.executor.protocol import Sampling, Step
from tests.engine.test_groups import FULL, STATE
from tests.support.refusals import cases
from tests.support.simulation import BLOCK_SIZE, CoreRig, World, alone, submit

NGRAM = SpeculativeConfig(method="ngram")
ALWAYS_7 = Sampling(temperature=0.0, allowed_ids=(7,))


def drafted(message: Submit, **options: Any) -> World:
    """Run a request, with drafts that repeat its text unless the options name others, and check its tokens."""
    world = World(**{"max_in_flight": 1, "drafts": NGRAM, **options})
    world.submit(message)
    world.run()
    assert world.tokens(message.request_id) == alone(message)[0]
    return world


def slow_find_repeat(tokens: list[int], least: int, most: int) -> int:
    for length in range(most, least - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if length <= len(tokens) and tokens[start : start + length] == tokens[len(tokens) - length :]:
                return start + length
    return -1


def test_the_longest_repeat_nearest_to_the_end_is_found() -> None:
    rng = random.Random(5)
    num_repeats = 0
    for _ in range(4000):
        letters = rng.choice([2, 3, 10, 1000])
        tokens = [rng.randrange(letters) for _ in range(rng.randint(0, 90))]
        least = rng.randint(1, 4)
        most = least + rng.randint(0, 5)
        index = find_repeat(array("i", tokens), least, most)
        assert index == slow_find_repeat(tokens, least, most), (tokens, least, most)
        num_repeats += index >= 0
    assert 1000 < num_repeats < 3500


@pytest.mark.parametrize(("length", "position"), [(WINDOW, 3), (WINDOW + 1, -1)])
def test_a_repeat_is_found_within_a_window(length: int, position: int) -> None:
    tokens = [-1, -2, -3, *range(length - 6), -1, -2, -3]
    assert find_repeat(array("i", tokens), 3, 4) == position


def test_right_drafts_bring_several_tokens_a_step() -> None:
    message = submit("a", [1, 2, 3], max_tokens=39, sampling=ALWAYS_7)
    assert drafted(message, drafts=None).scheduler.stats().num_steps == 39
    world = drafted(message)
    assert world.tokens("a") == [7] * 39
    stats = world.scheduler.stats()
    assert stats.num_steps == 12  # 3 for a repeat, 1 as expected, 2, 3 and 6 × 5 tokens
    assert stats.draft_tokens == stats.accepted_tokens == 39 - 12 and stats.generation_tokens == 39
    assert len(world.outputs["a"][-1].tokens) == 5, "those of the last step count too"


def test_drafts_are_rows_of_one_token_behind_those_of_all_requests() -> None:
    world = World(max_in_flight=1, drafts=NGRAM)
    world.submit(submit("a", [1, 2], sampling=ALWAYS_7, max_tokens=30))
    world.submit(submit("b", [3, 4, 5], max_tokens=30))
    while world.scheduler.stats().num_drafts < 3:
        step = world.run_step()
    first, other, *drafts = step.rows
    assert first.tokens == (7, 7, 7, 7) and first.first_token == first.start + 1 and other.tokens == ()
    fields = [(row.slot, row.start, row.count, row.sample) for row in drafts]
    assert fields == [(first.slot, first.start + 1 + i, 1, True) for i in range(4)]


def test_wrong_drafts_are_sent_less_and_less_and_then_no_more() -> None:
    message = submit("a", [1, 2] * 10, max_tokens=40, sampling=Sampling(temperature=0.0, allowed_ids=(1, 2)))
    stats = drafted(message).scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.draft_tokens < 60
    assert drafted(submit("a", list(range(20)), max_tokens=40)).scheduler.stats().draft_tokens <= 2


def test_only_a_request_with_a_repeat_waits_for_its_token() -> None:
    world = World(max_in_flight=2, drafts=NGRAM)
    world.submit(submit("free", [1, 2, 3], max_tokens=30))
    world.submit(submit("copy", [4, 5, 6], max_tokens=30, sampling=ALWAYS_7))
    num_planned = []
    while world.scheduler.has_work():
        world.step()
        ahead = world.scheduler.in_flight[-1] if world.scheduler.in_flight else None
        for request in world.scheduler.running:
            if request.drafts:
                assert request.num_pending <= 1, "something is planned beside drafts"
        num_planned.append({} if ahead is None else {request.message.request_id for request in ahead.requests})
    assert {"free"} in num_planned and {"free", "copy"} in num_planned
    assert world.scheduler.stats().accepted_tokens > 10


@pytest.mark.parametrize("options", cases(__file__, "no room for drafts"))
def test_some_options_leave_no_room_for_drafts(options: dict[str, Any]) -> None:
    sampling = msgspec.structs.replace(ALWAYS_7, **options)
    world = drafted(submit("a", [1, 2, 3], max_tokens=30, sampling=sampling), max_in_flight=2)
    assert world.tokens("a") == [7] * 30 and world.scheduler.stats().num_drafts == 0


def test_every_token_of_a_draft_has_its_log_probabilities() -> None:
    sampling = msgspec.structs.replace(ALWAYS_7, logprobs=2)
    world = drafted(submit("a", [1, 2, 3], max_tokens=30, sampling=sampling), max_in_flight=2)
    assert all(len(output.logprobs or ()) == len(output.tokens) for output in world.outputs["a"])
    assert max(len(output.tokens) for output in world.outputs["a"]) == 5


def test_a_stop_token_is_no_draft_and_ends_the_request() -> None:
    prompt = [7, 7, 7, 9, 7, 7, 7, 9, 7, 7, 7]
    world = World(max_in_flight=1, drafts=NGRAM)
    message = submit("a", prompt, max_tokens=40, sampling=Sampling(temperature=0.0, stop_ids=(9,), allowed_ids=(7, 9)))
    world.submit(message)
    while world.scheduler.has_work():
        assert all(9 not in request.drafts for request in world.scheduler.running)
        world.step()
    assert world.tokens("a") == alone(message)[0] and world.last("a").stop_token == 9


def test_a_draft_that_fails_is_computed_again_alone_and_its_request_ends_there() -> None:
    world = World(max_in_flight=1, drafts=NGRAM)
    world.submit(submit("a", [1, 2, 3], max_tokens=40, sampling=ALWAYS_7))
    failed_at = 0
    while world.scheduler.has_work():
        step = world.plan()
        world.executor.submit(step)
        result = world.executor.collect()
        if len(step.rows) == 5:
            failed_at = failed_at or step.rows[2].start
        for index, row in enumerate(step.rows):
            if failed_at and row.start >= failed_at:
                result.errors[index] = "not finite"
        world.keep(*world.scheduler.apply(result))
        world.scheduler.check()
    assert world.last("a").error == "not finite" and len(world.tokens("a")) == failed_at - 3 + 1


def test_drafts_take_no_block_that_a_waiting_prompt_could_have() -> None:
    world = World(num_blocks=17, max_in_flight=1, drafts=NGRAM, max_num_seqs=4)
    world.submit(submit("a", [1] * 7, max_tokens=40, sampling=ALWAYS_7))
    for _ in range(5):
        world.step()
    world.submit(submit("b", list(range(50)), max_tokens=4))  # waits for nearly all there is
    (request,) = world.scheduler.running
    num_drafts = 0
    while world.scheduler.waiting:
        step = world.plan()
        if not step.admissions:
            row, *drafts = step.rows
            assert len(request.kv.blocks) == -(-(row.start + 1) // BLOCK_SIZE), "a block for drafts alone"
            num_drafts += len(drafts)
        world.executor.submit(step)
        world.collect()
    assert num_drafts > 0, "where there is room in its own last block, they are sent"


def test_drafts_of_a_step_are_bounded() -> None:
    world = World(max_in_flight=1, max_num_batched_tokens=64, drafts=msgspec.structs.replace(NGRAM, max_draft_rows=5))
    for name in "abcd":
        world.submit(submit(name, [1, 2], max_tokens=40, sampling=ALWAYS_7))
    most = 0
    while world.scheduler.has_work():
        most = max(most, sum(len(row.tokens) for row in world.run_step().rows))
    assert most == 4  # one place of each slot is taken by its request: 8 - 4, and the oracle would object to more


GROUPS = (FULL, STATE)
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
def test_states_have_no_drafts_in_graphs(enforce_eager: bool, is_off: bool, caplog: pytest.LogCaptureFixture) -> None:
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


# No text of these tests repeats so many tokens, so all drafts are the layer's.
LAYER = SpeculativeConfig(method="mtp", num_speculative_tokens=3, prompt_lookup_min=2500, prompt_lookup_max=2500)


def test_right_drafts_of_the_layer_bring_several_tokens_a_step() -> None:
    world = drafted(submit("a", [1, 2, 3], max_tokens=60, sampling=ALWAYS_7), drafts=LAYER)
    stats, told = world.scheduler.stats(), [output.accepted_drafts for output in world.outputs["a"]]
    assert stats.draft_tokens == stats.accepted_tokens == 60 - stats.num_steps
    assert sum(told) == sum(stats.accepted_at) == stats.accepted_tokens
    assert stats.num_steps <= 25  # three plain ones to know their cost, then up to four tokens a step


def test_text_that_repeats_is_drafted_without_the_layer() -> None:
    world = World(max_in_flight=1, drafts=msgspec.structs.replace(LAYER, prompt_lookup_min=1))
    world.submit(submit("a", [1, 2, 3], max_tokens=60, sampling=ALWAYS_7))
    num_asked = 0
    while world.scheduler.has_work():
        num_asked += any(row.drafts for row in world.run_step().rows)
    assert num_asked == 0 and world.scheduler.stats().accepted_tokens > 30


def test_a_request_that_awaits_drafts_is_not_planned_ahead() -> None:
    world = World(max_in_flight=2, drafts=LAYER)
    world.submit(submit("a", [1, 2, 3], max_tokens=30))
    while world.scheduler.has_work():
        world.step()
        in_flight = [plan.step.rows[0] for plan in world.scheduler.in_flight]
        assert not any(row.drafts for row in in_flight[:-1]), "a step is planned behind one that asks"
    assert world.scheduler.stats().draft_tokens > 10


@pytest.mark.parametrize(("options", "max_tokens", "most"), cases(__file__, "room for drafts"))
def test_the_layer_is_asked_for_what_there_is_room_for(options: dict[str, Any], max_tokens: int, most: int) -> None:
    """Three requests run. A draft needs a free row, and a token behind it that may be sampled."""
    world = World(max_in_flight=1, drafts=LAYER, **options)
    for name in "abc":
        world.submit(submit(name, [1, 2, ord(name) % 50], max_tokens))
    num_asked = []
    while world.scheduler.has_work():
        step = world.run_step()
        num_asked.append(sum({row.slot: row.drafts for row in step.rows}.values()))
        assert all(row.start + row.count + row.drafts < 3 + max_tokens for row in step.rows if row.drafts)
    assert max(num_asked) <= most and (max(num_asked) > 0) == (most > 0)


def time_steps(world: World, more_s: Callable[[Step, bool], float]) -> None:
    """Let a step take as much longer as `more_s` tells of it, and of whether it was planned while another one ran."""
    collect, queues = world.executor.collect, [[Step(0, [], [])]]

    def timed() -> Any:
        queues.append([*world.executor._queue])
        world.now_s += more_s(queues[-1][0], len(queues[-2]) > 1)
        return collect()

    world.executor.collect = timed


@pytest.mark.parametrize(("allowed", "pays"), [((7,), True), (tuple(range(10, 40)), False)])
def test_the_layer_drafts_only_where_that_pays(allowed: tuple[int, ...], pays: bool) -> None:
    """A step with drafts takes 3.4 times as long as one without; of 30 tokens a draft is rarely the right one. The time
    before the first request is no step's, though its prompt is as short as the row of an answer."""
    world = World(max_in_flight=1, drafts=LAYER, max_model_len=2500, num_blocks=700)
    time_steps(world, lambda step, _: 2.4 * any(row.drafts for row in step.rows))
    began_s = world.now_s = 1e6
    world.submit(submit("a", [1], max_tokens=2400, sampling=Sampling(temperature=0.0, allowed_ids=allowed)))
    world.run(check=False)
    num_drafts = world.scheduler.stats().draft_tokens
    assert (num_drafts > 1600) if pays else (num_drafts < 300)
    assert world.now_s - began_s < (2200 if pays else 2700)


def test_the_layer_is_compared_with_steps_that_are_planned_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps planned only after the last result take twice as long: if all did, drafts would pay, as they seem to at first,
    when each step is slow."""
    monkeypatch.setattr("penstock.engine.core.drafts.PERIOD", 40)
    world = World(drafts=msgspec.structs.replace(LAYER, num_speculative_tokens=1), max_model_len=1000, num_blocks=400)
    time_steps(world, lambda step, ahead: (world.now_s < 12) + (not ahead) + 0.5 * any(row.drafts for row in step.rows))
    world.submit(submit("a", [1, 2, 3], max_tokens=900, sampling=ALWAYS_7))
    world.run(check=False)
    drafted = [output.accepted_drafts for output in world.outputs["a"]]
    assert sum(drafted[:100]) > 20 > sum(drafted[-100:])

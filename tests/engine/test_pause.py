"""Pause, sleep and other weights in the core, over the oracle: what it samples shows every block of other weights.
The scheduler over the oracle executor: exact plans for the rules, random worlds for everything else."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.messages import PauseMode, Submit
from penstock.executor.protocol import NOTHING_LEFT, Part, Sampling, SleepLevel, Step, WeightsError
from tests.support.oracle import OracleExecutor, content_folder
from tests.support.oracle_engine import oracle_llm
from tests.support.refusals import cases
from tests.support.simulation import BLOCK_SIZE, CoreRig, World, alone, submit

PROMPT = list(range(40))
ALL: tuple[Part, ...] = ("weights", "kv_cache")


class Rig(CoreRig):
    """A core with room for everything that these tests ask for."""

    def __init__(self) -> None:
        super().__init__(num_blocks=512, max_num_batched_tokens=64, max_model_len=2048)
        self.pauses = self.core.pauses

    def ask(self, name: str, prompt: list[int] = PROMPT) -> None:
        self.submit(submit(name, prompt, max_tokens=12))

    def take_steps(self) -> None:
        """Compute a part of what runs."""
        for _ in range(3):
            self.step()

    def pause(self, mode: PauseMode, sleeps: bool) -> None:
        if sleeps:
            self.sleep(1, mode)
        else:
            self.keep(*self.pauses.pause(mode))

    def sleep(self, level: SleepLevel, mode: PauseMode) -> None:
        self.keep(*self.pauses.drain())
        self.keep(*self.pauses.sleep(level, mode))

    def assert_answered(self, *names: str) -> None:
        """Check that these requests, all with the same prompt, have ended with what they get alone."""
        expected = alone(submit("alone", PROMPT, max_tokens=12), max_model_len=2048)[0]
        for name in names:
            assert self.tokens(name) == expected and self.end(name) == "length"


BY_MODE = pytest.mark.parametrize("mode", ["keep", "abort", "wait"])


@BY_MODE
@pytest.mark.parametrize("sleeps", [False, True], ids=["pause", "sleep"])
def test_a_pause_or_a_sleep_keeps_ends_or_waits_for_what_runs(mode: PauseMode, sleeps: bool) -> None:
    rig = Rig()
    rig.ask("a")
    rig.ask("waiting", prompt=PROMPT * 5)
    rig.take_steps()
    rig.pause(mode, sleeps)
    if mode == "wait":
        assert rig.pauses.is_pausing and not rig.pauses.is_paused
        rig.ask("late")
        assert rig.end("late") is None
        rig.run()
        assert rig.pauses.is_paused and not rig.pauses.asleep
        rig.pause(mode, sleeps)
    assert rig.pauses.is_paused and not rig.core.has_work()
    assert rig.pauses.asleep == (["weights", "kv_cache"] if sleeps else [])
    rig.core.scheduler.check()
    assert rig.end("a") == rig.end("waiting") == {"keep": None, "abort": "abort", "wait": "length"}[mode]
    rig.ask("new")
    assert not rig.core.has_work() and (sleeps or rig.core.step() == [])
    rig.pauses.wake(ALL) if sleeps else rig.pauses.resume()
    rig.run()
    rig.assert_answered(*{"keep": ("a", "new"), "abort": ("new",), "wait": ("a", "late", "new")}[mode])
    assert rig.core.scheduler.pool.num_free == rig.core.scheduler.pool.num_usable


@BY_MODE
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_refused_sleep_changes_nothing(mode: PauseMode, is_paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    if mode != "wait":
        rig.ask("a")
        rig.take_steps()
    if is_paused:
        rig.keep(*rig.pauses.pause("keep"))
    monkeypatch.setattr(OracleExecutor, "sleep", Mock(side_effect=WeightsError("enable_eplb: given")))
    with pytest.raises(WeightsError, match="enable_eplb"):
        rig.sleep(1, mode)
    assert rig.pauses.is_paused is is_paused and not rig.pauses.asleep
    rig.pauses.resume()
    rig.run()
    if mode != "wait":
        rig.assert_answered("a")


def test_the_offline_api_updates_sleeps_and_names_the_versions(folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def answer(llm: LLM) -> tuple[list[int], list[int] | None]:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs
        return output.token_ids, output.weights_versions

    path = content_folder(tmp_path, "a")
    with oracle_llm(folder) as llm:
        first = answer(llm)
        assert first[1] is None
        assert llm.update_weights(path) == 1
        second = answer(llm)
        assert second[0] != first[0] and second[1] == [1] * 8
        llm.sleep()
        with pytest.raises(RuntimeError, match="this LLM sleeps; wake_up comes first"):
            answer(llm)
        with pytest.raises(WeightsError, match="sleeps already"):
            llm.sleep()
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert answer(llm) == second
        llm.sleep(level=2)
        llm.update_weights(path)
        llm.wake_up(["kv_cache"])
        assert answer(llm) == (second[0], [2] * 8)


def rows(step: Step | None) -> list[tuple[int, int, int, bool]]:
    return [(row.slot, row.start, row.count, row.sample) for row in (step.rows if step else ())]


@pytest.mark.parametrize(("options", "actions", "planned"), cases(__file__, "plans", **globals()))
def test_steps_are_planned_by_these_rules(
    options: dict[str, int], actions: list[Submit | str], planned: list[list[tuple[int, int, int, bool]]]
) -> None:
    world, steps = World(**options), []  # type: ignore[arg-type]
    for action in actions:
        if isinstance(action, Submit):
            world.submit(action)
        elif action == "step":
            world.step()
        else:
            steps.append(rows(world.scheduler.schedule()))
    assert steps == planned


def test_a_full_hit_computes_the_last_token_and_does_not_write_it_again() -> None:
    world = World(max_in_flight=1)
    prompt = list(range(2 * BLOCK_SIZE))
    world.submit(submit("a", prompt))
    world.run()
    world.submit(submit("b", prompt))
    (row,) = world.run_step().rows
    assert (row.start, row.count, row.write_from, len(row.blocks)) == (7, 1, 8, 2)
    world.run()
    assert world.num_cached("b") == 7
    assert world.tokens("a") == world.tokens("b")


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    world = World(num_blocks=17, max_in_flight=1, max_num_seqs=4, max_num_batched_tokens=64)
    for name in "abc":
        world.submit(submit(name, [ord(name) % 50] * 15, max_tokens=30))
    world.submit(submit("d", [7] * 4))
    preemptions = 0
    while world.scheduler.has_work():
        before = world.scheduler.stats().num_preemptions
        step = world.run_step()
        if world.scheduler.stats().num_preemptions > before:
            preemptions += 1
            assert step.admissions == []
    assert preemptions > 0


@pytest.mark.parametrize("num_host_blocks", [0, 100])
def test_the_first_to_come_is_never_preempted_while_another_runs(num_host_blocks: int) -> None:
    """Neither does saving to a tier take a block that a running request is about to need."""
    world = World(num_blocks=17, max_num_seqs=6, num_host_blocks=num_host_blocks)
    for number in range(6):
        world.submit(submit(f"r{number}", [number] * 6, max_tokens=50))
    world.run()
    assert world.last("r0").num_preemptions == 0
    assert world.scheduler.stats().num_preemptions > 0


def test_urgent_requests_are_admitted_first_but_cannot_starve_the_others() -> None:
    world = World(max_num_seqs=1, max_in_flight=1, patience_s=30.0)
    world.submit(submit("patient", [1], max_tokens=1, priority=5))
    for number in range(100):
        world.submit(submit(f"urgent{number}", [2], max_tokens=1, priority=0))
    order = []
    while world.scheduler.has_work():
        world.step()
        order += [name for name, outputs in world.outputs.items() if outputs and name not in order]
    assert 20 < order.index("patient") < 40


def test_the_context_length_ends_a_request_that_asks_for_more() -> None:
    world = World(max_model_len=64)
    world.submit(submit("a", [1] * 60, max_tokens=100))
    world.run()
    assert len(world.tokens("a")) == 4 and world.last("a").finish_reason == "length"


@pytest.mark.parametrize(("error", "is_refusal"), [(NOTHING_LEFT, True), ("the logits are not finite", False)])
def test_a_failure_of_one_row_ends_that_request_alone(error: str, is_refusal: bool) -> None:
    world = World(max_in_flight=1, max_num_batched_tokens=64)
    for name in "abc":
        world.submit(submit(name, [ord(name) % 50] * 5, max_tokens=6))
    step = world.plan()
    world.executor.submit(step)
    result = world.executor.collect()
    result.errors[1] = error
    world.keep(*world.scheduler.apply(result))
    assert world.last("b").finish_reason == "error" and world.last("b").error == error
    assert world.last("b").is_refusal == is_refusal
    world.run()
    assert len(world.tokens("a")) == len(world.tokens("c")) == 6


def test_a_length_of_nothing_ends_where_the_prompt_does() -> None:
    world = World(max_num_batched_tokens=7, max_in_flight=2)
    sampling = Sampling(temperature=0.0, prompt_logprobs=1)
    world.submit(submit("scored", list(range(20)), max_tokens=0, sampling=sampling))
    world.run()
    world.submit(submit("warmed", list(range(20)), max_tokens=0))
    assert rows(world.run_step()) == [(0, 19, 1, False)], "the rest is cached"
    for name in ("scored", "warmed"):
        (output,) = world.outputs[name]
        assert output.tokens == [] and output.finish_reason == "length"
    assert [entry.ids[0] for entry in world.outputs["scored"][0].prompt_logprobs or ()] == list(range(1, 20))
    assert world.scheduler.stats().generation_tokens == 0 and world.scheduler.stats().num_used_blocks == 0


def test_a_prompt_that_is_preempted_half_way_has_each_log_probability_once() -> None:
    world = World(max_num_batched_tokens=8, max_in_flight=1)
    world.submit(submit("a", list(range(16)), sampling=Sampling(temperature=0.0, prompt_logprobs=1)))
    world.step()
    world.scheduler._preempt(next(iter(world.scheduler.running)))
    world.run()
    assert [entry.ids[0] for entry in world.outputs["a"][0].prompt_logprobs or ()] == list(range(1, 16))

"""Pause, sleep and other weights in the core, over the oracle: what it samples shows every block of other weights."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.messages import PauseMode
from penstock.executor.protocol import Part, SleepLevel, WeightsError
from tests.support.oracle import OracleExecutor, content_folder
from tests.support.oracle_engine import oracle_llm
from tests.support.simulation import CoreRig, alone, submit

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

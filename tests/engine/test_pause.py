"""Pause, sleep and other weights in the core, over the oracle: what it samples shows every block of other weights."""

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from penstock import LLM, SamplingParams
from penstock.engine.config import SpeculativeConfig
from penstock.engine.messages import PauseMode
from penstock.executor.protocol import GroupInfo, Part, SleepLevel, WeightsError
from tests.support.oracle import OracleExecutor, content_folder
from tests.support.oracle_engine import oracle_llm
from tests.support.refusals import hardest
from tests.support.simulation import CoreRig, submit

PROMPT = list(range(40))
ALL: tuple[Part, ...] = ("weights", "kv_cache")
GROUPS = {
    "one group": [GroupInfo()],
    "windows": [GroupInfo(), GroupInfo("window", 9)],
    "states": [GroupInfo(), GroupInfo("state", pages=2)],
}


class Rig(CoreRig):
    """A core with room for everything that these tests ask for."""

    def __init__(
        self, groups: str = "one group", num_host_blocks: int = 0, drafts: SpeculativeConfig | None = None
    ) -> None:
        sizes: dict[str, Any] = {"num_blocks": 512, "max_num_batched_tokens": 64, "max_model_len": 2048}
        super().__init__(**sizes, groups=GROUPS[groups], drafts=drafts, num_host_blocks=num_host_blocks)
        self.pauses = self.core.pauses

    def ask(self, name: str, max_tokens: int = 12, prompt: list[int] = PROMPT) -> None:
        self.submit(submit(name, prompt, max_tokens))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            super().step()
            self.keep(*self.pauses.finish_pause())

    def update(self, path: str) -> None:
        self.keep(*self.pauses.drain())
        self.pauses.update_weights(path)
        self.core.scheduler.check()

    def sleep(self, level: SleepLevel, mode: PauseMode) -> None:
        self.keep(*self.pauses.drain())
        self.keep(*self.pauses.sleep(level, mode))

    def versions(self, name: str) -> list[int]:
        return [output.weights_version for output in self.outputs[name] for _ in output.tokens]


def fresh(path: str | None, prompt: list[int], max_tokens: int, groups: str = "one group") -> list[int]:
    """Return the answer of an engine that never had other weights."""
    rig = Rig(groups)
    if path is not None:
        rig.update(path)
    rig.ask("alone", max_tokens, prompt)
    rig.run()
    return rig.tokens("alone")


@pytest.mark.parametrize("seed", hardest(range(40), 0, 2, 5, 6, 12, 19))
def test_through_a_random_life_every_token_is_of_the_version_that_it_names(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    groups = rng.choice([*GROUPS])
    drafts = SpeculativeConfig(method="ngram") if rng.random() < 0.3 else None
    rig = Rig(groups, rng.choice([0, 2, 16]), drafts)
    beginnings = [[rng.randrange(50) for _ in range(30)] for _ in range(3)]
    prompts: dict[str, list[int]] = {}
    weights: list[str | None] = [None]  # by version

    def ask() -> None:
        name = str(len(prompts))
        prompts[name] = rng.choice(beginnings)[: rng.randrange(1, 31)] + [rng.randrange(50) for _ in range(4)]
        rig.ask(name, prompt=prompts[name])

    def step() -> None:
        for _ in range(rng.randrange(1, 5)):
            if rig.core.has_work():
                rig.step()

    def update() -> None:
        weights.append(content_folder(tmp_path, rng.choice("abc")))
        rig.update(str(weights[-1]))

    def abort() -> None:
        if prompts:
            rig.abort(rng.choice([*prompts]))

    acts: dict[Callable[[], None], int] = {
        ask: 35, step: 25, update: 10, abort: 4,
        lambda: rig.keep(*rig.pauses.pause(rng.choice(["abort", "wait", "keep"]))): 5,
        lambda: rig.pauses.resume(): 10,
        lambda: rig.sleep(rng.choice([1, 2]), rng.choice(["abort", "wait", "keep"])): 8,
        lambda: rig.pauses.wake(ALL): 6,
    }  # fmt: skip
    for act in rng.choices([*acts], [*acts.values()], k=50):
        with contextlib.suppress(WeightsError):  # some are refused, as it sleeps or does not
            act()
        rig.core.scheduler.check()
    update()
    rig.pauses.wake(ALL)
    rig.pauses.resume()
    rig.run()

    for name, prompt in prompts.items():
        tokens, versions = rig.tokens(name), rig.versions(name)
        assert rig.end(name) == "abort" or len(tokens) == 12
        assert versions == sorted(versions)
        for version in sorted({*versions}):
            first, count = versions.index(version), versions.count(version)
            expected = fresh(weights[version], prompt + tokens[:first], count, groups)
            assert tokens[first : first + count] == expected
    pool = rig.core.scheduler.pool
    assert pool.num_free == pool.num_usable


def test_a_pause_keeps_ends_or_waits_for_what_runs() -> None:
    for mode in ("keep", "abort", "wait"):
        rig = Rig()
        rig.ask("a")
        rig.ask("waiting", prompt=PROMPT * 5)
        rig.step(3)
        rig.keep(*rig.pauses.pause(mode))
        if mode == "wait":
            assert rig.pauses.is_pausing and not rig.pauses.is_paused
            rig.ask("late")
            assert rig.end("late") is None
            rig.run()
            assert rig.end("a") == rig.end("waiting") == "length"
        assert rig.pauses.is_paused and not rig.core.has_work()
        rig.core.scheduler.check()
        done = "abort" if mode == "abort" else "length" if mode == "wait" else None
        assert rig.end("a") == rig.end("waiting") == done
        rig.ask("new")
        assert not rig.core.has_work() and rig.core.step() == []
        rig.pauses.resume()
        rig.run()
        expected = fresh(None, PROMPT, 12)
        names = {"keep": ("a", "new"), "abort": ("new",), "wait": ("a", "late", "new")}[mode]
        for name in names:
            assert rig.tokens(name) == expected and rig.end(name) == "length"
        assert rig.core.scheduler.pool.num_free == rig.core.scheduler.pool.num_usable


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_sleep_keeps_ends_or_waits_for_what_runs(mode: PauseMode) -> None:
    rig = Rig()
    rig.ask("a")
    rig.step(3)
    rig.sleep(1, mode)
    if mode == "wait":
        assert rig.pauses.is_pausing and not rig.pauses.asleep
        rig.run()
        assert rig.pauses.is_paused and not rig.pauses.asleep
        rig.sleep(1, mode)
    assert rig.pauses.is_paused and rig.pauses.asleep == ["weights", "kv_cache"]
    assert rig.end("a") == {"keep": None, "abort": "abort", "wait": "length"}[mode]
    rig.pauses.wake(ALL)
    rig.run()
    if mode != "abort":
        assert rig.tokens("a") == fresh(None, PROMPT, 12)


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_refused_sleep_changes_nothing(mode: PauseMode, is_paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    if mode != "wait":
        rig.ask("a")
        rig.step(3)
    if is_paused:
        rig.keep(*rig.pauses.pause("keep"))
    monkeypatch.setattr(OracleExecutor, "sleep", Mock(side_effect=WeightsError("enable_eplb: given")))
    with pytest.raises(WeightsError, match="enable_eplb"):
        rig.sleep(1, mode)
    assert rig.pauses.is_paused is is_paused and not rig.pauses.asleep
    rig.pauses.resume()
    rig.run()
    assert mode == "wait" or rig.tokens("a") == fresh(None, PROMPT, 12)


def test_the_offline_api_updates_sleeps_and_says_the_versions(folder: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def said(llm: LLM) -> tuple[list[int], list[int] | None]:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)[0].outputs
        return output.token_ids, output.weights_versions

    path = content_folder(tmp_path, "a")
    with oracle_llm(folder) as llm:
        first = said(llm)
        assert first[1] is None
        assert llm.update_weights(path) == 1
        second = said(llm)
        assert second[0] != first[0] and second[1] == [1] * 8
        llm.sleep()
        with pytest.raises(RuntimeError, match="this LLM sleeps; wake_up comes first"):
            said(llm)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert said(llm) == second
        llm.sleep(level=2)
        llm.update_weights(path)
        llm.wake_up(["kv_cache"])
        assert said(llm) == (second[0], [2] * 8)


def test_an_llm_whose_sleep_is_refused_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with oracle_llm(folder) as llm:
        monkeypatch.setattr(OracleExecutor, "sleep", Mock(side_effect=WeightsError("enable_lora: given")))
        with pytest.raises(WeightsError, match="enable_lora"):
            llm.sleep()
        assert not llm._running().pauses.is_paused
        assert llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished
        monkeypatch.undo()
        llm.sleep()
        with pytest.raises(WeightsError, match="sleeps already"):
            llm.sleep()
        with pytest.raises(RuntimeError, match="wake_up comes first"):
            llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)

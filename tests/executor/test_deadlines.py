"""How long a step may take, and how long it took, where two are in flight."""

import time
from collections.abc import Iterator
from typing import Any, cast

import pytest

from penstock.executor.protocol import STEP_DEADLINE_S, Row, Step, StepResult
from penstock.executor.ranks import ranked
from penstock.executor.ranks.wire import Done, ModelLoaded
from penstock.executor.step.runner import LaunchedStep, ModelRunner
from tests.support.fake_engine import INFO


class Ranks:
    """One rank that is watched, and that time passes only by waiting for. It answers all steps but the last."""

    def __init__(self, num_answers: int) -> None:
        self.workers = [None]
        self.error = None
        self.now_s = 0.0
        self._results = iter(Done(0, StepResult(step_id, [0])) for step_id in range(num_answers))

    def monotonic(self) -> float:
        return self.now_s

    def wait_loaded(self, _progress: object) -> list[ModelLoaded]:
        return [ModelLoaded(INFO)]

    def send(self, message: tuple[Any, ...], timeout_s: float) -> None:
        assert message and timeout_s > 0

    def receive(self, timeout_s: float) -> Iterator[Done]:
        if (done := next(self._results, None)) is None:
            self.now_s += timeout_s
        else:
            yield done

    def whereabouts(self) -> str:
        return ""

    def give_up(self, why: str) -> None:
        raise TimeoutError(why)


def test_a_step_that_hangs_after_many_is_noticed_as_soon_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(100)
    monkeypatch.setattr(ranked, "time", ranks)
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    for step_id in range(101):
        executor.submit(Step(step_id, [], [Row(0, step_id, 1, True)]))
        if step_id:
            assert executor.collect().step_id == step_id - 1
    with pytest.raises(TimeoutError, match="step 100 of 1 rows"):
        executor.collect()
    assert STEP_DEADLINE_S <= ranks.now_s <= STEP_DEADLINE_S + 2


def test_the_time_of_a_step_does_not_count_that_of_the_step_before_it() -> None:
    runner = object.__new__(ModelRunner)
    runner._transfers = runner._rebalancer = None
    runner._finished_s = 0.0
    begun_s = time.monotonic() - 1000.0
    first, second = (runner.finish(LaunchedStep(Step(1, [], []), begun_s, StepResult(1, []), False)) for _ in range(2))
    assert first.elapsed_s >= 1000.0 > second.elapsed_s

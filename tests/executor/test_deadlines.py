"""What executor and ranks tell each other of steps: how long one may take, how long it took, what stores report."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.executor.protocol import STEP_DEADLINE_S, Row, Step, StepResult, TransferResult, step_deadline_s
from penstock.executor.ranks import ranked
from penstock.executor.ranks.wire import Done, ModelLoaded
from penstock.executor.step.runner import LaunchedStep, ModelRunner
from tests.support.fake_engine import INFO


class Ranks:
    """Ranks that are watched, and what they report. Time passes only while the executor waits for more."""

    def __init__(self, *reports: Done) -> None:
        self.workers = [None] * (1 + max(report.rank for report in reports))
        self.error = None
        self.now_s = 0.0
        self._results = iter(reports)

    def monotonic(self) -> float:
        return self.now_s

    def wait_loaded(self, _progress: object) -> list[ModelLoaded]:
        return [ModelLoaded(INFO)] * len(self.workers)

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
    ranks = Ranks(*(Done(0, StepResult(step_id, [0])) for step_id in range(100)))
    monkeypatch.setattr(ranked, "time", ranks)
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    for step_id in range(101):
        executor.submit(Step(step_id, [], [Row(0, step_id, 1, True)]))
        if step_id:
            assert executor.collect().step_id == step_id - 1
    with pytest.raises(TimeoutError, match="step 100 of 1 rows"):
        executor.collect()
    assert STEP_DEADLINE_S <= ranks.now_s <= STEP_DEADLINE_S + 2


def test_a_step_on_a_gpu_hangs_for_two_minutes_at_most_and_has_five_milliseconds_a_token() -> None:
    assert [step_deadline_s(count, "cuda") for count in (0, 1000, 8000, 100_000)] == [60.0, 65.0, 100.0, 120.0]
    assert step_deadline_s(8192, "cpu") == 4156.0


def test_ranks_on_a_gpu_are_given_up_after_the_time_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(Done(0, StepResult(0, [0])))
    monkeypatch.setattr(ranked, "time", ranks)
    monkeypatch.setattr(ranks, "wait_loaded", lambda _: [ModelLoaded(msgspec.structs.replace(INFO, device="cuda"))])
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    executor.submit(Step(0, [], [Row(0, 0, 1, True)]))
    executor.collect()
    executor.submit(Step(1, [], [Row(0, 0, 20_000, True)]))
    with pytest.raises(TimeoutError, match="step 1 of 1 rows"):
        executor.collect()
    assert 120.0 <= ranks.now_s <= 122.0


def test_a_step_without_rows_is_done_when_every_rank_has_said_what_its_stores_hold() -> None:
    found = TransferResult(gained={"disk": [b"key"]})
    ranks = Ranks(*(Done(rank, StepResult(0, [], transfers=found)) for rank in range(3)))
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    executor.submit(Step(0, [], []))
    transfers = executor.collect().transfers
    assert transfers is not None and transfers.gained == {"disk": [b"key"]}


def test_statistics_of_stores_are_those_of_the_first_rank() -> None:
    def report(rank: int, step_id: int, **numbers: float) -> Done:
        return Done(
            rank, StepResult(step_id, [0], transfers=TransferResult(store_stats={"disk": numbers} if numbers else {}))
        )

    ranks = Ranks(report(0, 0, hits=1.0), report(1, 0, hits=900.0), report(0, 1))
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    seen = []
    for step_id in range(2):
        executor.submit(Step(step_id, [], [Row(0, step_id, 1, True)]))
        transfers = executor.collect().transfers
        assert transfers is not None
        seen.append(transfers.store_stats)
    assert seen == [{"disk": {"hits": 1.0}}, {}]


def test_the_time_of_a_step_does_not_count_that_of_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_s = iter([7.0, 9.0])
    monkeypatch.setattr("penstock.executor.step.runner.time", SimpleNamespace(monotonic=lambda: next(ends_s)))
    runner = object.__new__(ModelRunner)
    runner._transfers = runner._rebalancer = None
    runner._finished_s = 0.0
    first, second = (runner.finish(LaunchedStep(Step(1, [], []), 4.0, StepResult(1, []), False)) for _ in range(2))
    assert (first.elapsed_s, second.elapsed_s) == (3.0, 2.0)

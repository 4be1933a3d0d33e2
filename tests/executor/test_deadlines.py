"""Messages between executor and ranks: how long a step may take and took, the reports of stores, answers that differ."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from penstock.executor import protocol
from penstock.executor.protocol import AdapterError, AdapterInfo, Row, Step, StepResult, TransferResult, step_deadline_s
from penstock.executor.ranks import ranked
from penstock.executor.ranks.wire import Done, MessageKind, ModelLoaded, RankAnswer
from penstock.executor.step.runner import LaunchedStep, ModelRunner
from tests.support.fake_engine import INFO
from tests.support.refusals import cases, table


class Ranks:
    """Ranks that are watched, and their reports. Time passes only while the executor waits for more."""

    def __init__(self, *reports: Done | RankAnswer, device: str = "cpu") -> None:
        self.workers = [None] * (1 + max(report.rank for report in reports))
        self.error = None
        self.now_s = 0.0
        self.sent: list[tuple[Any, ...]] = []
        self._results = iter(reports)
        self._info = msgspec.structs.replace(INFO, device=device)

    def monotonic(self) -> float:
        return self.now_s

    def wait_loaded(self, _progress: object) -> list[ModelLoaded]:
        return [ModelLoaded(self._info)] * len(self.workers)

    def send(self, message: tuple[Any, ...], timeout_s: float) -> None:
        assert timeout_s > 0
        self.sent.append(message)

    def receive(self, timeout_s: float) -> Iterator[Done | RankAnswer]:
        if (done := next(self._results, None)) is None:
            self.now_s += timeout_s
        else:
            yield done

    def whereabouts(self) -> str:
        return ""

    def give_up(self, why: str) -> None:
        raise TimeoutError(why)


@pytest.mark.parametrize(
    ("device", "num_tokens", "deadline_s"), cases(__file__, "deadlines of steps", **vars(protocol))
)
def test_a_step_that_hangs_after_many_is_given_up_as_soon_as_the_first(
    device: str, num_tokens: int, deadline_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(*(Done(0, StepResult(step_id, [0])) for step_id in range(100)), device=device)
    monkeypatch.setattr(ranked, "time", ranks)
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    for step_id in range(101):
        executor.submit(Step(step_id, [], [Row(0, step_id, 1 if step_id < 100 else num_tokens, True)]))
        if step_id:
            assert executor.collect().step_id == step_id - 1
    with pytest.raises(TimeoutError, match="step 100 of 1 rows"):
        executor.collect()
    assert deadline_s <= ranks.now_s <= deadline_s + 2


def test_a_step_on_a_gpu_has_five_milliseconds_a_token_and_two_minutes_at_most() -> None:
    assert [step_deadline_s(count, "cuda") for count in (0, 1000, 8000, 100_000)] == [60.0, 65.0, 100.0, 120.0]
    assert step_deadline_s(8192, "cpu") == 4156.0


def test_a_step_without_rows_ends_when_every_rank_has_reported_its_stores() -> None:
    gained = TransferResult(gained={"disk": [b"key"]})
    ranks = Ranks(*(Done(rank, StepResult(0, [], transfers=gained)) for rank in range(3)))
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    executor.submit(Step(0, [], []))
    transfers = executor.collect().transfers
    assert transfers is not None and transfers.gained == {"disk": [b"key"]}


def test_statistics_of_stores_are_those_of_the_first_rank() -> None:
    def report(rank: int, step_id: int, **stats: float) -> Done:
        transfers = TransferResult(store_stats={"disk": stats} if stats else {})
        return Done(rank, StepResult(step_id, [0], transfers=transfers))

    ranks = Ranks(report(0, 0, hits=1.0), report(1, 0, hits=900.0), report(0, 1))
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    seen = []
    for step_id in range(2):
        executor.submit(Step(step_id, [], [Row(0, step_id, 1, True)]))
        transfers = executor.collect().transfers
        assert transfers is not None
        seen.append(transfers.store_stats)
    assert seen == [{"disk": {"hits": 1.0}}, {}]


def test_an_adapter_that_not_all_ranks_hold_is_unloaded_everywhere() -> None:
    """An adapter that requests may already use stays, also if one rank refuses to load it once more."""
    refusal = RankAnswer(1, "no memory for it")

    def info(rank: int, key: str) -> RankAnswer:
        return RankAnswer(rank, value=AdapterInfo(key, 4, 100))

    ranks = Ranks(
        *(info(1, "held"), info(0, "held")),
        *(info(0, "refused"), refusal),
        *(info(0, "changed"), info(1, "changed meanwhile")),
        *2 * (refusal, info(0, "held")),
    )
    executor = ranked.RankedExecutor(cast(Any, ranks), cast(Any, ranks), print)
    assert executor.load_adapter("first").key == "held"
    ranks.sent.clear()
    for path, message in table(__file__, "adapters that ranks refuse"):
        with pytest.raises(AdapterError, match=message):
            executor.load_adapter(path)
    unloaded = sorted(key.decode() for kind, key in ranks.sent if kind == MessageKind.UNLOAD)
    assert unloaded == ["changed", "changed meanwhile", "refused"]
    executor.unload_adapter("held")
    with pytest.raises(AdapterError):
        executor.load_adapter("first")
    assert ranks.sent[-1] == (MessageKind.UNLOAD, b"held")


def test_the_time_of_a_step_does_not_count_that_of_the_step_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ends_s = iter([7.0, 9.0])
    monkeypatch.setattr("penstock.executor.step.runner.time", SimpleNamespace(monotonic=lambda: next(ends_s)))
    runner = object.__new__(ModelRunner)
    runner._transfers = runner._rebalancer = None
    runner._finished_s = 0.0
    first, second = (runner.finish(LaunchedStep(Step(1, [], []), 4.0, StepResult(1, []), False)) for _ in range(2))
    assert (first.elapsed_s, second.elapsed_s) == (3.0, 2.0)

"""The states of a replica, and the budget of retries, in virtual time."""

import asyncio
import errno
import socket
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from penstock.router.backend import Backend
from penstock.router.fleet.fleet import RetryBudget
from penstock.router.fleet.replica import (
    EJECTION_S,
    FAILURES_TO_EJECT,
    MAX_EJECTION_S,
    MAX_SILENT_PROBES,
    Replica,
    State,
)
from penstock.router.http.upstream import ConnectFailed
from tests.support.router_stub import Hold, stub


def up() -> Replica:
    replica = Replica(Backend("http://127.0.0.1:1"), connect_timeout_s=1.0)
    replica.probe_passed(0.0)
    return replica


def state(replica: Replica) -> State:
    """Return the state, read again: a type checker assumes the last value that it saw."""
    return replica.state


EVENTS: dict[str, Callable[[Replica], None]] = {
    "passed": lambda replica: replica.probe_passed(1.0),
    "refused": lambda replica: replica.probe_refused("no", is_draining=False),
    "silent": Replica.probe_timed_out,
    "broke": lambda replica: replica.connection_broke("reset", 0.0),
    "failed": lambda replica: replica.failed("500", 0.0),
    "answered": Replica.answered,
    "draining": Replica.reported_draining,
    "removed": Replica.remove,
}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("silent", "up"),  # one unanswered probe is a busy moment
        (MAX_SILENT_PROBES * "silent ", "down"),
        (MAX_SILENT_PROBES * "silent " + "passed", "up"),
        ("silent passed silent", "up"),
        ("broke", "suspect"),
        ("broke passed", "up"),
        (FAILURES_TO_EJECT * "failed ", "ejected"),
        (5 * FAILURES_TO_EJECT * "failed answered ", "up"),
        ("removed passed refused silent silent broke draining", "removing"),
    ],
)
def test_the_state_follows_from_probes_and_requests(events: str, expected: State) -> None:
    replica = up()
    for event in events.split():
        EVENTS[event](replica)
    assert (state(replica), replica.is_up) == (expected, expected == "up")


def test_each_ejection_is_longer_until_a_trial_succeeds() -> None:
    replica, now_s = up(), 0.0
    lengths: list[float] = []
    for _ in range(8):
        while replica.state != "ejected":
            replica.failed("500", now_s)
        begun_s = now_s
        while replica.state == "ejected":
            now_s += 0.25
            replica.probe_passed(now_s)
        lengths.append(now_s - begun_s)
        assert state(replica) == "trial"
    assert lengths == [min(EJECTION_S * 2**index, MAX_EJECTION_S) for index in range(8)]
    replica.answered()
    assert state(replica) == "up"
    for _ in range(FAILURES_TO_EJECT):
        replica.failed("500", now_s)
    replica.probe_passed(now_s + EJECTION_S)
    assert state(replica) == "trial"  # after the first, short ejection again


def died(url: str, patience_s: float = 60.0) -> bool:
    async def ask() -> bool:
        replica = Replica(Backend(url), connect_timeout_s=patience_s)
        answer = await replica.has_died(patience_s)
        replica.pool.close()
        await asyncio.sleep(0)
        return answer

    return asyncio.run(ask())


def test_a_process_that_connects_or_sends_a_byte_has_not_died() -> None:
    with stub() as backend:
        url = backend.url
        assert not died(url)
        backend.questions[b"/health"] = lambda _seen, _sock: b"\0\1\2"
        assert not died(url)  # something is there
        backend.questions[b"/health"] = Hold()
        assert not died(url, patience_s=0.3)  # perhaps it is busy
        backend.is_dying = True
        assert died(url)
    assert died(url)


@pytest.mark.parametrize(
    ("error", "is_local"), [(OSError(errno.EMFILE, "Too many open files"), True), (socket.gaierror(-3, "no"), False)]
)
def test_a_failure_of_the_router_itself_is_no_death_of_a_replica(
    error: OSError, is_local: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", Mock(side_effect=error))
    with pytest.raises(ConnectFailed) as failure:
        asyncio.run(up().pool.connect())
    assert (failure.value.is_local, failure.value.is_dead) == (is_local, False)


def test_the_budget_suffices_for_a_replica_that_dies_in_a_busy_fleet() -> None:
    budget = RetryBudget(0.15)
    for _ in range(1000):
        budget.deposit(num_in_flight=128)
    assert all(budget.take() for _ in range(128 // 8))

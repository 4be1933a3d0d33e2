"""The disk tier on a disk that fails, hangs or lies. No byte that it serves may ever be wrong."""

import contextlib
import errno
import random
import threading
import time
from pathlib import Path

import pytest

from penstock.cache.tiers.disk.record import cell_bytes
from penstock.cache.tiers.disk.tier import NUM_WORKERS, DiskLimits
from penstock.cache.tiers.health import FailureLog, HealthLimits, TierHealth
from tests.support.disk_faults import ERRORS, Fault, FaultyCalls
from tests.support.disk_rig import CHUNK, Rig, key_of
from tests.support.programs import open_files
from tests.support.refusals import cases, hardest

QUICK = DiskLimits(health=HealthLimits(stall_s=0.05, first_pause_s=0.01, longest_pause_s=0.05))
# Where no call hangs: a busy machine is not taken for a disk that does, which ends a life before its last calls.
PATIENT = QUICK._replace(health=QUICK.health._replace(stall_s=60.0))
FAULTS = [Fault(error=error) for error in ERRORS] + [Fault(points=("writev", "readv"), short=True)]


def names(fault: Fault) -> str:
    return errno.errorcode.get(fault.error, "short" if fault.short else "flip")


def open_with(path: Path, calls: FaultyCalls, limits: DiskLimits = PATIENT, cells: int = 16) -> Rig:
    return Rig(path, cells, calls=calls, limits=limits)


def reopened_serves_only_what_is_right(path: Path) -> None:
    with Rig(path) as rig:
        rig.finish_scan()
        rig.hits(*range(40))  # each is compared
        assert rig.store("after") == 1 and rig.hits("after") == 1
        rig.tier.check()


def run_through(path: Path, calls: FaultyCalls) -> None:
    """Fill, read, overflow, read and close a tier. Every store and load ends once, whichever call fails."""
    try:
        rig = Rig(path, calls=calls, limits=PATIENT)
    except OSError:
        return  # said at once and clearly: nothing is left open
    rig.store(*range(10))
    rig.hits(*range(10))
    rig.store(*range(10, 30))
    rig.hits(*range(5, 25))
    assert rig.tier.flush()
    rig.tier.check()
    assert rig.tier.stats()["loading"] == 0
    rig.close()


@pytest.mark.parametrize("fails_each", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("fault", FAULTS, ids=names)
def test_after_any_failed_call_the_tier_serves_nothing_wrong(tmp_path: Path, fault: Fault, fails_each: bool) -> None:
    """In each run another call fails, until a run has no call of that number."""
    stride = 1 if fails_each else 5 if fault.error == errno.EIO else 11
    number = 0
    while True:
        calls = FaultyCalls(fault._replace(at=number))
        run_through(tmp_path / str(number), calls)
        if number >= calls.num_calls:
            break
        reopened_serves_only_what_is_right(tmp_path / str(number))
        number += stride
    assert number > 40


@pytest.mark.parametrize("seed", hardest(range(6), 0, 4))
def test_a_disk_that_fails_now_and_then_is_survived_without_a_leak(tmp_path: Path, seed: int) -> None:
    calls = FaultyCalls(*cases(__file__, "faults now and then", Fault=Fault, errno=errno), seed=seed)
    calls.is_on = False
    with open_with(tmp_path, calls) as rig:
        calls.is_on = True
        draw = random.Random(seed)
        while calls.num_struck < 60:
            (rig.store if draw.random() < 0.5 else rig.load)(draw.randrange(40))
            wait_until_open(rig)
        assert rig.tier.flush()
        rig.tier.check()
        stats = rig.tier.stats()
        assert stats["loading"] == stats["pinned"] == stats["queue_bytes"] == 0
    reopened_serves_only_what_is_right(tmp_path)


def wait_until_open(rig: Rig) -> None:
    while not rig.tier.stats()["is_open"]:
        assert rig.tier.poll() == []
        time.sleep(0.001)


@pytest.mark.parametrize("error", [errno.EIO, errno.EROFS, errno.ENOENT])
def test_a_disk_that_keeps_failing_is_bypassed_and_comes_back(tmp_path: Path, error: int) -> None:
    calls = FaultyCalls()
    with open_with(tmp_path, calls) as rig:
        rig.store(*range(8))
        rig.tier.changes()
        calls.faults.append(Fault(points=("readv", "writev"), error=error))
        assert rig.store("a", "b", "c") == 0
        assert not rig.tier.stats()["is_open"]
        assert set(rig.tier.changes()[1]) == {key_of(name) for name in range(8)}
        assert not rig.tier.put(key_of("d"), rig.buffer())
        assert rig.tier.start_load(key_of(1), rig.buffer()) is None
        calls.faults.clear()
        wait_until_open(rig)
        assert set(rig.tier.changes()[0]) == {key_of(name) for name in range(8)}
        assert rig.hits(*range(8)) == 8 and rig.store("d") == 1
        assert rig.tier.stats()["drops"]["bypassed"] >= 1
        rig.tier.check()


def test_a_file_system_without_direct_access_is_read_and_written_through_its_cache(tmp_path: Path) -> None:
    with open_with(tmp_path, FaultyCalls(Fault(points=("open",), error=errno.EINVAL, at=1))) as rig:
        assert rig.store(*range(3)) == rig.hits(*range(3)) == 3


def test_a_hanging_read_keeps_its_buffer_and_everything_else_goes_on(tmp_path: Path) -> None:
    calls, is_over = FaultyCalls(), threading.Event()
    with open_with(tmp_path, calls, QUICK, cells=64) as rig, contextlib.ExitStack() as stack:
        stack.callback(is_over.set)  # also where an assertion fails, or the tier would wait for ever
        while len(rig.tier) < 20:
            rig.store(*range(20))
            wait_until_open(rig)
        calls.faults.append(Fault(points=("readv",), until=is_over))
        outs = {rig.tier.start_load(key_of(name), rig.buffer()) for name in range(10)}
        while calls.num_struck < NUM_WORKERS:  # every thread hangs in one
            time.sleep(0.001)
        ended = []
        while rig.tier.stats()["is_open"]:
            ended += rig.tier.poll()
        ended += rig.tier.poll()
        # Some are in the system's hands, and their buffers with them; those behind them are given back at once.
        assert len(ended) == 10 - NUM_WORKERS and not any(completion.ok for completion in ended)
        assert rig.tier.stats()["loading"] == NUM_WORKERS
        assert not rig.tier.put(key_of("x"), rig.buffer())
        calls.faults.clear()
        is_over.set()
        ended += rig.wait(NUM_WORKERS)
        assert {completion.ticket for completion in ended} == outs
        left = set(range(20))  # each is there; where a busy machine passes for a disk that hangs, after a while
        while left := {name for name in left if rig.load(name) is None}:
            wait_until_open(rig)
        rig.tier.check()


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_file_system_or_quota_stops_growth_and_not_the_tier(tmp_path: Path, error: int) -> None:
    limits = PATIENT._replace(slab_bytes=8 * cell_bytes(CHUNK))
    calls = FaultyCalls()
    with Rig(tmp_path, cells=64, calls=calls, limits=limits) as rig:
        assert rig.store(*range(8)) == 8
        calls.faults.append(Fault(points=("allocate",), error=error))
        assert rig.store("no room") == 0
        assert rig.store(*range(10, 14)) == 4  # in place of others
        assert rig.tier.stats()["is_open"] and rig.tier.stats()["evictions"] >= 4
        assert rig.tier.stats()["drops"] == {"no room to grow": 1}
        calls.faults.clear()
        assert rig.store(*range(20, 60)) == 40 and len(rig.tier) == 8
        rig.tier.check()
    with Rig(tmp_path, cells=64, limits=limits) as rig:
        assert rig.store(*range(60, 100)) == 40 and len(rig.tier) == 48
        rig.tier.check()


def test_a_record_that_was_written_in_part_is_not_stored(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with open_with(tmp_path, calls) as rig:
        calls.faults.append(Fault(points=("writev",), short=True))
        assert rig.store("a") == 0 and rig.tier.start_load(key_of("a"), rig.buffer()) is None
        calls.faults.clear()
        assert rig.store("a") == 1 and rig.hits("a") == 1
        rig.tier.check()


def test_a_slow_disk_drops_stores_instead_of_queueing_them(tmp_path: Path) -> None:
    calls = FaultyCalls(Fault(points=("writev",), delay_s=0.02))
    limits = DiskLimits(queue_s=0.1)
    with Rig(tmp_path, cells=300, calls=calls, limits=limits) as rig:
        rig.store(*range(5))
        taken = [name for name in range(10, 200) if rig.tier.put(key_of(name), rig.buffer())]
        assert len(taken) <= 16
        assert rig.tier.stats()["drops"]["queue is full"] == 190 - len(taken)
        rig.wait(len(taken))
    with Rig(tmp_path / "bytes", cells=300, calls=calls, limits=DiskLimits(queue_bytes=4 * CHUNK)) as rig:
        taken = [name for name in range(10, 200) if rig.tier.put(key_of(name), rig.buffer())]
        assert len(taken) == 4
        rig.wait(4)


def test_loads_overtake_stores(tmp_path: Path) -> None:
    calls = FaultyCalls()
    with Rig(tmp_path, cells=64, calls=calls) as rig:
        rig.store("a")
        calls.faults.append(Fault(points=("writev",), delay_s=0.02))
        puts = sum(rig.tier.put(key_of(name), rig.buffer()) for name in range(20))
        rig.tier.start_load(key_of("a"), rig.buffer())
        kinds = [completion.kind for completion in rig.wait(puts + 1)]
        assert kinds.index("load") <= 2 * NUM_WORKERS


def test_failed_opening_leaves_nothing_locked_or_open(tmp_path: Path) -> None:
    Rig(tmp_path).close()
    before = open_files()
    for number in range(8):
        with pytest.raises(OSError, match="on purpose"):
            Rig(tmp_path, calls=FaultyCalls(Fault(error=errno.EMFILE, at=number)))
            raise OSError("on purpose: this call may fail without harm")
    assert not open_files() - before
    Rig(tmp_path).close()


def test_failed_loads_leave_few_lines_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    failures = FailureLog(str(tmp_path))
    for number in range(209):
        failures.add(number / 100, "corrupt")
    failures.add(100.0, "EIO")
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        f"failed to load a block: {reason} (failed loads so far: {num})"
        for num, reason in ((1, "corrupt"), (10, "corrupt"), (100, "corrupt"), (210, "EIO"))
    ]


def test_pauses_double_while_probes_fail_and_are_forgotten_later() -> None:
    health = TierHealth(HealthLimits(max_errors=2, stall_s=1, first_pause_s=1, longest_pause_s=4), "a tier")
    health.record_failure(0, "EIO")
    health.record_success()
    health.record_failure(0, "EIO")
    assert health.is_open
    health.record_failure(0, "EIO")
    assert not health.is_open
    now_s = 0.0
    for pause_s in (1, 2, 4, 4):
        assert not health.start_probe(now_s + pause_s - 0.1)
        now_s += pause_s
        assert health.start_probe(now_s) and not health.start_probe(now_s)
        health.finish_probe(now_s, ok=False)
    health.finish_probe(now_s, ok=True)
    assert health.is_open
    health.check_stall(now_s + 100, now_s)
    assert not health.is_open
    assert health.start_probe(now_s + 101)

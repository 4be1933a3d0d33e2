"""The core loop: what its heartbeat may conclude from a step's age. A silent core is starved or lost, as /proc shows for its
process."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from penstock.cache.tiers.base import Store
from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core import engine_core
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.core.process import CONTROL_DEADLINES_S, Duty, _take, heartbeat
from penstock.engine.front import liveness
from penstock.engine.front.client import AsyncEngine
from penstock.engine.front.liveness import SILENCE_S, STUCK_S, TICK_S, Liveness, ProcessLook, look_at
from penstock.engine.http.kv_stream import keys_in
from penstock.engine.messages import CacheUpdate, Control, ControlReply, Heartbeat, Ready, WatchCache, Withdraw
from penstock.executor.protocol import ExecutorConfig, Step, step_deadline_s
from penstock.executor.tiers.open_tiers import ALIGNMENT
from tests.support.flaky_store import FlakyStore
from tests.support.oracle import OracleExecutor, content_folder
from tests.support.programs import EndlessProgram, Program
from tests.support.refusals import cases
from tests.support.running_server import until
from tests.support.simulation import serve, submit

CONFIG = EngineConfig(
    executor=ExecutorConfig(max_model_len=4096, hf_overrides={"vocab_size": 50}), scheduler=SchedulerConfig()
)


class Watched(OracleExecutor):
    """Looks at the core while a step runs."""

    def __init__(self, max_in_flight: int) -> None:
        super().__init__(CONFIG.executor, max_in_flight)
        self.core: EngineCore | None = None
        self.now_s = 0.0
        self.seen: list[float] = []
        self.sizes: list[int] = []

    def submit(self, step: Step) -> None:
        super().submit(step)
        assert self.core is not None and self.core.step_ends_s is not None
        self.seen.append(self.core.step_ends_s)
        self.now_s += 10.0


def run(max_in_flight: int, prompt: list[int]) -> Watched:
    executor = Watched(max_in_flight)
    core = executor.core = EngineCore(CONFIG, executor, clock=lambda: executor.now_s)
    core.submit(submit("a", prompt, max_tokens=3))
    while core.has_work():
        core.step()
        executor.sizes.append(core.last_step_tokens)
    assert core.step_ends_s is None, "an idle core has no step that could be overdue"
    return executor


def test_a_step_is_timed_from_its_submission_or_the_previous_result() -> None:
    deadline_s = step_deadline_s(1, "cpu")
    assert run(1, [1]).seen == [start + deadline_s for start in (0.0, 10.0, 20.0)]
    assert run(2, [1]).seen == [start + deadline_s for start in (0.0, 0.0, 20.0)]


def test_deadline_and_size_are_those_of_the_older_step_in_flight() -> None:
    """Not of the one behind it, which is submitted while a long prompt is computed."""
    executor, starts_s = run(2, [1] * 2048), (0.0, 0.0, 20.0)
    assert executor.seen[:3] == [s + step_deadline_s(n, "cpu") for s, n in zip(starts_s, (2048, 2048, 1), strict=True)]
    assert executor.sizes[0] == 2048 and set(executor.sizes[1:]) == {1}


@pytest.mark.parametrize("is_paused", [False, True])
def test_a_core_with_a_step_in_flight_settles_and_forgets(is_paused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last requests' blocks are in flight to a slow disk, and a step asks after them, now and then."""
    pauses_s = list[float]()
    monkeypatch.setattr(time, "sleep", pauses_s.append)
    monkeypatch.setattr(engine_core, "RESET_S", 0.2)
    executor_config = msgspec.structs.replace(CONFIG.executor, kv_host_bytes=64 * ALIGNMENT)
    store = FlakyStore(is_stalled=True)
    stores: dict[str, Store] = {"disk": cast(Store, store)}
    core = EngineCore(CONFIG, OracleExecutor(executor_config, 2, stores))
    core.submit(submit("a", list(range(40)), max_tokens=4))
    while core.has_work():
        core.step()
    for _ in range(9):
        core.step()
    assert pauses_s and not core.is_settled and not core.reset_prefix_cache()
    if is_paused:
        core.pauses.pause("keep")
    else:
        step = core.scheduler.schedule()
        assert step is not None
        core.executor.submit(step)
    store.is_stalled = False
    core.settle(60.0)
    assert core.is_settled and not core.has_work()
    assert core.reset_prefix_cache()


def test_blocks_that_an_idle_core_still_saves_are_reported_at_once() -> None:
    executor_config = msgspec.structs.replace(CONFIG.executor, kv_host_bytes=64 * ALIGNMENT)
    core = EngineCore(CONFIG, OracleExecutor(executor_config, 1))
    sent = serve(core, [WatchCache(True), submit("a", [1] * 64, max_tokens=1)])
    updates = [message for message in sent if isinstance(message, CacheUpdate) and message.tier == "host"]
    reported = {key for update in updates for key in keys_in(update.stored)}
    host = core.scheduler.kv.pools["host"]
    assert reported == {key[:8] for key in host.cached_keys()} and len(reported) == 4


def test_a_sleep_that_is_withdrawn_in_the_same_turn_is_not_begun() -> None:
    core = EngineCore(CONFIG, OracleExecutor(CONFIG.executor))
    sent = serve(core, [Control(1, "sleep", mode="wait"), Withdraw(1)])
    (reply,) = (message for message in sent if isinstance(message, ControlReply))
    assert reply.error == "the caller has left" and not core.pauses.is_paused and not core.pauses.asleep


@pytest.mark.parametrize("message", [Control(1, "pause", mode="keep"), Control(1, "load_adapter")])
def test_a_control_message_may_take_as_long_as_the_steps_that_it_collects(
    message: Control, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(CONTROL_DEADLINES_S, message.operation, -1.0)
    config = msgspec.structs.replace(CONFIG.executor, enable_lora=True)
    core, duty = EngineCore(CONFIG, OracleExecutor(config, 2)), Duty()
    executor = core.executor
    core.submit(submit("a", [1], max_tokens=3))
    core.step()
    seen: list[tuple[str, str, bool]] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append((name, heartbeat(core, duty).job, core.step_ends_s is not None))
            return method(*arguments)

        return call

    for name in ("collect", "load_adapter"):
        monkeypatch.setattr(executor, name, watched(name, getattr(executor, name)))
    done: list[ControlReply] = []
    duty.begin("a turn", -1.0)
    (output,) = _take(core, msgspec.structs.replace(message, path=content_folder(tmp_path, "a")), duty, [], done)
    assert output is not None and output.request_id == "a"
    loads = [("load_adapter", "load_adapter", False)] if done[0].adapter else []
    assert seen == [("collect", "a step", True), *loads] and bool(loads) == (message.operation == "load_adapter")


def test_a_step_or_a_job_that_hangs_fails_the_health_check_by_its_name() -> None:
    core = EngineCore(CONFIG, OracleExecutor(CONFIG.executor))
    duty = Duty()
    duty.begin("load_adapter", deadline_s=1000.0)
    assert heartbeat(core, duty).overdue_s == 0.0
    duty.begin("load_adapter", deadline_s=-12.0)
    beat = heartbeat(core, duty)
    assert beat.job == "load_adapter" and beat.overdue_s >= 12.0
    duty.end()
    assert heartbeat(core, duty).overdue_s == 0.0
    engine = AsyncEngine(CONFIG)
    assert engine.health().reason == "the model is loading" and engine.health().alive
    engine._receive(Ready(core.info))
    for overdue, job in ((beat, "load_adapter"), (Heartbeat(overdue_s=12.0), "a step")):
        engine._receive(Heartbeat(overdue_s=0.0))
        assert engine.health().ready
        engine._receive(overdue)
        assert not engine.health().alive and f"{job} of the engine core is 12 s beyond its" in engine.health().reason


class Rig:
    """A liveness with a clock and a process of the test's own."""

    def __init__(self, look: ProcessLook | None) -> None:
        self.now_s, self.cpu_share, self.look = 0.0, 0.0, look
        self.liveness = Liveness(self._look_at, lambda: self.now_s)
        self.liveness.pid = 1

    def _look_at(self, _pid: int) -> ProcessLook | None:
        return self.look and self.look._replace(cpu_s=self.cpu_share * self.now_s)

    def run(self, seconds: float) -> str:
        for _ in range(int(seconds / TICK_S)):
            self.now_s += TICK_S
            self.liveness.tick()
        return self.liveness.verdict


SLEEPING = ProcessLook("S", False, 0.0)


@pytest.mark.parametrize(("look", "cpu_share", "verdicts"), cases(__file__, "silences", **vars(liveness) | globals()))
def test_a_silent_core_is_lost_when_it_cannot_go_on_and_starved_until_a_limit_where_it_can(
    look: ProcessLook | None, cpu_share: float, verdicts: list[tuple[float, str]]
) -> None:
    rig = Rig(look)
    rig.cpu_share = cpu_share
    for seconds, verdict in verdicts:
        assert rig.run(seconds) == verdict
        assert verdict != "starved" or "too little CPU" in rig.liveness.reason


def test_a_message_ends_the_silence() -> None:
    rig = Rig(SLEEPING)
    rig.run(SILENCE_S + STUCK_S + 3.0)
    rig.liveness.heard()
    assert rig.liveness.verdict == "heard" and rig.run(SILENCE_S) == "heard"


def test_the_delay_of_the_server_itself_is_not_the_cores_silence() -> None:
    rig = Rig(SLEEPING._replace(state="T"))
    rig.now_s += 1000.0
    rig.liveness.tick()
    assert rig.liveness.verdict == "heard" and rig.liveness.silent_s < 1.0


def seen(program: Program, state: str) -> ProcessLook:
    """Return what is seen of a program once it is in this state."""
    while (look := look_at(program.process.pid)) is None or look.state != state:
        time.sleep(0.01)
    return look


def test_real_processes_are_seen_as_they_are() -> None:
    with EndlessProgram("-c", "print('on', flush=True)\nwhile True: pass") as busy:
        busy.line("on")
        first = seen(busy, "R")
        assert first.is_runnable
        until(lambda: seen(busy, "R").cpu_s >= first.cpu_s + 0.05)
        os.kill(busy.process.pid, signal.SIGSTOP)
        assert not seen(busy, "T").is_runnable
    with EndlessProgram("-c", "import time; print('on', flush=True); time.sleep(600)") as asleep:
        asleep.line("on")
        assert not seen(asleep, "S").is_runnable
    assert look_at(asleep.process.pid) is None

"""A silent core is starved or lost, as /proc shows for its process."""

import os
import signal
import time

import pytest

from penstock.engine.front import liveness
from penstock.engine.front.liveness import SILENCE_S, STUCK_S, TICK_S, Liveness, ProcessLook, look_at
from tests.support.programs import EndlessProgram, Program
from tests.support.refusals import cases
from tests.support.running_server import until


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


@pytest.mark.parametrize(
    ("look", "cpu_share", "verdicts"), cases(__file__, "silences", SLEEPING=SLEEPING, **vars(liveness))
)
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

"""The instructions that Python executes on the host for each scheduled row and each routed request.

Counts do not depend on the machine's speed or load, so a change that makes the host work 3 % more fails here. A count
may be raised together with a change that is worth it; its commit says why.
"""

import importlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from benchmarks import pairs

from penstock.router.config import Timeouts
from tests.support.router_fleet import running_router
from tests.support.router_stub import stub

SCHEDULED_ROW, ROUTED_REQUEST = 603, 3435
TOLERANCE = 1.03

pytestmark = [
    pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the counts are of the bytecode of Python 3.11"),
    pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage traces this process"),
]


class Instructions:
    """Counts the bytecode instructions of a thread between `start` and `stop`, which it calls itself."""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> None:
        sys.settrace(self._trace)

    def stop(self) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Callable[..., Any]:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.count += event == "opcode"
        return self._trace


def decoding(running: int) -> float:
    """Return the instructions of a step in which that many requests generate a token."""
    sys.path.insert(0, str(pairs.HERE))
    scheduler = importlib.import_module("bench_scheduler")
    load, prompt, instructions = scheduler.Load(running, running * 8), scheduler.Prompts(), Instructions()
    for _ in range(running):
        load.submit(prompt(32), 64)
    for _ in range(8):
        load.step()
    instructions.start()
    for _ in range(32):
        load.step()
    instructions.stop()
    return instructions.count / 32


def test_a_scheduled_row_takes_no_more_instructions() -> None:
    assert (decoding(48) - decoding(16)) / 32 <= SCHEDULED_ROW * TOLERANCE


def test_a_routed_request_takes_no_more_instructions() -> None:
    counts = []
    timeouts = Timeouts(probe_interval_s=3600.0)  # so that no probe is counted
    with stub() as replica, running_router(replica.url, timeouts=timeouts) as router:
        for _ in range(100):
            instructions = Instructions()
            router.call(instructions.start)
            assert router.complete(model="m").status_code == 200
            router.call(instructions.stop)
            counts.append(instructions.count)
    assert min(counts) <= ROUTED_REQUEST * TOLERANCE  # others came in more pieces

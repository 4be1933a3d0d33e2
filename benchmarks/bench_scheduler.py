"""Measures the scheduler and the block pool alone, with an executor that answers at once.

    python benchmarks/bench_scheduler.py [--running 256] [--steps 400] [--pairs 10]

The figures are microseconds per request and step; the floor to hold is 8 at 256 running requests. In `decode` requests
only generate. In `mixed`, finished requests are replaced by new prompts at once, so that admission, prefill chunks,
block keys, eviction and release are in the figure too. In `tight`, short prompts get long answers from a pool half as
large as they need, so that they preempt each other.
"""

import random
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from pairs import main, rounds, table
from tests.support.oracle import OracleExecutor

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.engine_core import settle_garbage
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Output, Submit
from penstock.executor.protocol import ExecutorConfig, Sampling, Step, StepResult

FLOOR_US = 8.0
BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
IN_FLIGHT = 2
GREEDY = Sampling(temperature=0.0, stop_ids=(2,))


class Load:
    """A scheduler with a pipeline kept full as EngineCore.step keeps it. Times are of the scheduler alone."""

    def __init__(self, running: int, num_blocks: int) -> None:
        self.running = running
        model = {"max_model_len": 8192, "block_size": BLOCK_SIZE, "hf_overrides": {"vocab_size": VOCAB_SIZE}}
        info = OracleExecutor(ExecutorConfig(**model, kv_cache_bytes=8 * BLOCK_SIZE * num_blocks), IN_FLIGHT).info
        config = SchedulerConfig(max_num_seqs=running, max_num_batched_tokens=8192)
        self.scheduler = Scheduler(config, info, time.monotonic)
        self._in_flight: deque[Step] = deque()
        self._num_submitted = 0
        self.reset_clock()

    def submit(self, tokens: bytes, max_tokens: int) -> None:
        message = Submit(f"{self._num_submitted:x}.0", tokens, GREEDY, max_tokens)
        self._num_submitted += 1
        self._timed("submit", self.scheduler.submit, message)

    def step(self) -> list[Output]:
        while len(self._in_flight) < IN_FLIGHT:
            step = self._timed("schedule", self.scheduler.schedule)
            if step is None:
                break
            self.num_rows += len(step.rows)
            self._in_flight.append(step)
        step = self._in_flight.popleft()
        result = StepResult(step.step_id, [7 if row.sample else -1 for row in step.rows])
        return self._timed("apply", self.scheduler.apply, result)  # type: ignore[no-any-return]

    def _timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments)
        self.times[part] += time.perf_counter() - started
        return result

    def reset_clock(self) -> None:
        self.num_rows = 0
        self.times = dict.fromkeys(("submit", "schedule", "apply"), 0.0)

    def per_row_us(self) -> dict[str, float]:
        parts = {name: seconds / self.num_rows * 1e6 for name, seconds in self.times.items()}
        return {"total": sum(parts.values()), **parts}


# -- steps -------------------------------------------------------------------------------------------------------


class Prompts:
    """Random prompts, half of which share a prefix, so that prefix-cache lookups hit as often as in practice."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._num = 0

    def __call__(self, length: int) -> bytes:
        shared = length // 2 if self._num % 2 else 0
        self._num += 1
        return array("i", [9] * shared + self._rng.choices(range(8, VOCAB_SIZE), k=length - shared)).tobytes()


def decode(running: int, steps: int) -> Load:
    """Measure steps in which every request has completed its prompt and generates one token."""
    load, prompt = Load(running, running * 80), Prompts()
    for _ in range(running):
        load.submit(prompt(512), 4096)
    for _ in range(running * 512 // 8192 + 8):
        load.step()
    load.reset_clock()
    for _ in range(steps):
        load.step()
    assert load.num_rows == running * steps, (load.num_rows, running * steps)
    return load


def mixed(running: int, steps: int) -> Load:
    return _turnover(Load(running, running * 80), steps, prompts=(64, 1024), answers=(16, 256))


def tight(running: int, steps: int) -> Load:
    load = _turnover(Load(running, running * 16), steps, prompts=(32, 96), answers=(128, 1024))
    assert load.scheduler.stats().num_preemptions > 0, "the pool is not tight"
    return load


def _turnover(load: Load, steps: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
    """Replace requests that end at once; measure after 200 steps, when requests are in all phases."""
    lengths, prompt = random.Random(1), Prompts()
    for _ in range(load.running):
        load.submit(prompt(lengths.randint(*prompts)), lengths.randint(*answers))
    for index in range(200 + steps):
        if index == 200:
            load.reset_clock()
        for output in load.step():
            if output.finish_reason is not None:
                load.submit(prompt(lengths.randint(*prompts)), lengths.randint(*answers))
    return load


WORKLOADS = {"decode": decode, "mixed": mixed, "tight": tight}


def steps(running: int = 256, steps: int = 400, pairs: int = 10) -> dict[str, Any]:
    settle_garbage()
    runs = rounds({name: partial(work, running, steps) for name, work in WORKLOADS.items()}, pairs)
    rows, held = [], True
    for name, loads in runs.items():
        found = [load.per_row_us() for load in loads]
        totals = [each["total"] for each in found]
        figures = {part: statistics.median(each[part] for each in found) for part in found[0]} | {
            "least": min(totals),
            "most": max(totals),
        }
        held &= figures["total"] <= FLOOR_US
        rows.append({"µs per request and step": name, **figures})
    table(rows)
    print(f"floor: {FLOOR_US:g} µs: {'held' if held else 'NOT held'}")
    return {"running": running, "floor_us": FLOOR_US, "rows": rows}


if __name__ == "__main__":
    main(__doc__, "scheduler", steps)

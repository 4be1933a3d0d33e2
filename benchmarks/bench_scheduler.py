"""What the scheduler and the block pool cost per request and step, with an executor that answers at once.

Three workloads: in `decode`, --running requests only generate. In `mixed`, ended requests are replaced by new
prompts at once, so that admission, prefill chunks, block keys, eviction and release are in the figure too.
In `tight`, short prompts get long answers out of a pool half as large as they need, so they preempt each other.
The floor to hold is 8 µs per request and step at 256 running.

    python benchmarks/bench_scheduler.py [--running 256] [--runs 5] [--profile decode|mixed|tight]
"""

import argparse
import cProfile
import json
import platform
import pstats
import random
import statistics
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.config import SchedulerConfig
from penstock.engine.core.engine_core import settle_garbage
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Output, Submit
from penstock.executor.protocol import ModelInfo, Sampling, Step, StepResult

FLOOR_US = 8.0
BLOCK_SIZE = 16
VOCAB_SIZE = 50_000
GREEDY = Sampling(temperature=0.0, stop_ids=(2,))


class NullExecutor:
    """Answers at once, always with the same token: what is left is the scheduler's own time."""

    def __init__(self, num_blocks: int) -> None:
        self.info = ModelInfo(
            architecture="Null",
            dtype="none",
            device="cpu",
            vocab_size=VOCAB_SIZE,
            hidden_size=1,
            max_model_len=8192,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            block_bytes=0,
            fingerprint=b"null",
            max_in_flight=2,
        )
        self._queue: deque[Step] = deque()

    def submit(self, step: Step) -> None:
        self._queue.append(step)

    def collect(self) -> StepResult:
        step = self._queue.popleft()
        return StepResult(step.step_id, [7 if row.sample else -1 for row in step.rows])

    def close(self) -> None:
        self._queue.clear()


@dataclass
class Load:
    """A scheduler at work, its pipeline kept full as EngineCore.step keeps it. Times are of the scheduler alone."""

    running: int
    blocks_each: int
    scheduler: Scheduler = field(init=False)
    num_rows: int = 0
    num_tokens: int = 0
    times: dict[str, float] = field(default_factory=lambda: {"submit": 0.0, "schedule": 0.0, "apply": 0.0})
    _rng: random.Random = field(default_factory=lambda: random.Random(0))
    _num_submitted: int = 0

    def __post_init__(self) -> None:
        self.executor = NullExecutor(num_blocks=self.running * self.blocks_each)
        config = SchedulerConfig(max_num_seqs=self.running, max_num_batched_tokens=8192)
        self.scheduler = Scheduler(config, self.executor.info, time.monotonic)

    def submit(self, num_prompt: int, max_tokens: int) -> None:
        # Half of the prompts begin alike, so that lookups hit as they do in practice.
        shared = num_prompt // 2 if self._num_submitted % 2 else 0
        own = self._rng.choices(range(8, VOCAB_SIZE), k=num_prompt - shared)
        tokens = array("i", [9] * shared + own).tobytes()
        message = Submit(f"{self._num_submitted:x}.0", tokens, GREEDY, max_tokens)
        self._num_submitted += 1
        started = time.perf_counter()
        refusal = self.scheduler.submit(message)
        self.times["submit"] += time.perf_counter() - started
        assert refusal is None, refusal

    def step(self) -> list[Output]:
        scheduler, executor, times = self.scheduler, self.executor, self.times
        while scheduler.num_in_flight < executor.info.max_in_flight:
            started = time.perf_counter()
            step = scheduler.schedule()
            times["schedule"] += time.perf_counter() - started
            if step is None:
                break
            self.num_rows += len(step.rows)
            self.num_tokens += sum(row.count for row in step.rows)
            executor.submit(step)
        result = executor.collect()
        started = time.perf_counter()
        outputs = scheduler.apply(result)
        times["apply"] += time.perf_counter() - started
        return outputs

    def reset_clock(self) -> None:
        self.num_rows = self.num_tokens = 0
        self.times.update(submit=0.0, schedule=0.0, apply=0.0)

    def per_row_us(self) -> dict[str, float]:
        parts = {name: seconds / self.num_rows * 1e6 for name, seconds in self.times.items()}
        return {"total": sum(parts.values()), **parts}


def decode(running: int, steps: int) -> Load:
    """All requests are past their prompts; each step is one token for each of them."""
    load = Load(running, blocks_each=80)
    for _ in range(running):
        load.submit(num_prompt=512, max_tokens=4096)
    for _ in range(running * 512 // 8192 + 8):
        load.step()
    load.reset_clock()
    for _ in range(steps):
        load.step()
    assert load.num_rows == running * steps, (load.num_rows, running * steps)
    return load


def mixed(running: int, steps: int) -> Load:
    return _turnover(Load(running, blocks_each=80), steps, prompts=(64, 1024), answers=(16, 256))


def tight(running: int, steps: int) -> Load:
    load = _turnover(Load(running, blocks_each=16), steps, prompts=(32, 96), answers=(128, 1024))
    assert load.scheduler.stats().num_preemptions > 0, "the pool is not tight"
    return load


def _turnover(load: Load, steps: int, prompts: tuple[int, int], answers: tuple[int, int]) -> Load:
    """Whoever ends is replaced at once; measured after 200 steps, when the requests are at all points of their lives."""
    lengths = random.Random(1)
    for _ in range(load.running):
        load.submit(lengths.randint(*prompts), lengths.randint(*answers))
    for index in range(200 + steps):
        if index == 200:
            load.reset_clock()
        for output in load.step():
            if output.finish_reason is not None:
                load.submit(lengths.randint(*prompts), lengths.randint(*answers))
    return load


WORKLOADS = {"decode": decode, "mixed": mixed, "tight": tight}


def measure(name: str, running: int, steps: int, runs: int) -> dict[str, Any]:
    samples = []
    for _ in range(runs):
        load = WORKLOADS[name](running, steps)
        samples.append(load.per_row_us())
    samples.sort(key=lambda sample: sample["total"])
    median = samples[len(samples) // 2]
    totals = [sample["total"] for sample in samples]
    parts = "  ".join(f"{part} {median[part]:.2f}" for part in ("submit", "schedule", "apply"))
    print(
        f"{name:8s} {median['total']:6.2f} µs per request and step  ({parts}; {min(totals):.2f} to {max(totals):.2f})"
    )
    return {
        "median_us": round(statistics.median(totals), 3),
        "min_us": round(min(totals), 3),
        "max_us": round(max(totals), 3),
        "parts_us": {part: round(value, 3) for part, value in median.items() if part != "total"},
    }


def profile(name: str, running: int, steps: int) -> None:
    profiler = cProfile.Profile()
    profiler.runcall(WORKLOADS[name], running, steps)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=256, metavar="N")
    parser.add_argument("--steps", type=int, default=400, metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    parser.add_argument("--profile", choices=WORKLOADS, help="print where the time goes, instead of the figures")
    args = parser.parse_args()
    if args.profile:
        profile(args.profile, args.running, args.steps)
        return
    settle_garbage()
    figures = {name: measure(name, args.running, args.steps, args.runs) for name in WORKLOADS}
    held = all(figure["median_us"] <= FLOOR_US for figure in figures.values())
    print(f"floor: {FLOOR_US:g} µs: {'held' if held else 'NOT held'}")
    line = {"bench": "scheduler", "running": args.running, "python": platform.python_version(), "floor_us": FLOOR_US}
    print(json.dumps({**line, **figures}))


if __name__ == "__main__":
    main()

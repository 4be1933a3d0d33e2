"""The scheduler and the block pool, with an executor that answers at once: what is left is their own time.

    python benchmarks/bench_scheduler.py steps  [--running 256] [--steps 400] [--pairs 10] [--profile decode|mixed|tight]
    python benchmarks/bench_scheduler.py keys   [--requests 10000] [--pairs 10]

`steps`: microseconds per request and step; the floor to hold is 8 at 256 running. In `decode` requests only generate. In
`mixed`, ended requests are replaced by new prompts at once, so that admission, prefill chunks, block keys, eviction and
release are in the figure too. In `tight`, short prompts get long answers out of a pool half as large as they need, so they
preempt each other.

`keys`: block keys as digests beside block keys as objects. Only the function that makes keys differs. `objects` is what
engines used before digests: (hash, tuple of tokens), chained with the built-in hash; the collector walks every one of
them again and again. `hashlib` makes our keys one by one in Python, `digests` is `block_keys`. Each run is a process of its
own, measured in CPU seconds. Then plain hashing, in microseconds.
"""

import gc
import json
import random
import resource
import subprocess
import sys
import threading
import time
import timeit
from array import array
from collections import deque
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from pairs import main, medians, print_profile, rounded, rounds, summary, table

from penstock._csrc import ffi, lib
from penstock.cache.keys import block_keys
from penstock.engine.config import SchedulerConfig
from penstock.engine.core import holdings
from penstock.engine.core.engine_core import settle_garbage
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Output, Submit
from penstock.executor.oracle import OracleExecutor
from penstock.executor.protocol import ExecutorConfig, Sampling, Step, StepResult

FLOOR_US = 8.0
BLOCK_SIZE = 16
VOCAB_SIZE = 150_000
IN_FLIGHT = 2
GREEDY = Sampling(temperature=0.0, stop_ids=(2,))


class Load:
    """A scheduler at work, its pipeline kept full as EngineCore.step keeps it. Times are of the scheduler alone."""

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
        refusal = self._timed("submit", self.scheduler.submit, message)
        assert refusal is None, refusal

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

    def _timed(self, part: str, call: Callable[..., Any], *given: Any) -> Any:
        started = time.perf_counter()
        found = call(*given)
        self.times[part] += time.perf_counter() - started
        return found

    def reset_clock(self) -> None:
        self.num_rows = 0
        self.times = dict.fromkeys(("submit", "schedule", "apply"), 0.0)

    def per_row_us(self) -> dict[str, float]:
        parts = {name: seconds / self.num_rows * 1e6 for name, seconds in self.times.items()}
        return {"total": sum(parts.values()), **parts}


# -- steps -------------------------------------------------------------------------------------------------------


class Prompts:
    """Random ones, half of which begin alike, so that lookups hit as they do in practice."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._num = 0

    def __call__(self, length: int) -> bytes:
        shared = length // 2 if self._num % 2 else 0
        self._num += 1
        return array("i", [9] * shared + self._rng.choices(range(8, VOCAB_SIZE), k=length - shared)).tobytes()


def decode(running: int, steps: int) -> Load:
    """All requests are past their prompts; each step is one token for each of them."""
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
    """What ends is replaced at once; measured after 200 steps, when the requests are at all points of their lives."""
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


def steps(running: int = 256, steps: int = 400, pairs: int = 10, profile: str = "") -> dict[str, Any] | None:
    if profile:
        return print_profile(partial(WORKLOADS[profile], running, steps))
    settle_garbage()
    runs = rounds({name: partial(work, running, steps) for name, work in WORKLOADS.items()}, pairs)
    rows, held = [], True
    for name, loads in runs.items():
        found = [load.per_row_us() for load in loads]
        totals = [each["total"] for each in found]
        figures = medians(found) | {"least": min(totals), "most": max(totals)}
        held &= figures["total"] <= FLOOR_US
        rows.append({"µs per request and step": name, **figures})
    table(rows)
    print(f"floor: {FLOOR_US:g} µs: {'held' if held else 'NOT held'}")
    return {"running": running, "floor_us": FLOOR_US, "rows": rows}


# -- keys --------------------------------------------------------------------------------------------------------


class ObjectKey(NamedTuple):
    value: int
    tokens: tuple[int, ...]


def object_keys(tokens: memoryview, block_size: int, *, root: bytes | ObjectKey) -> list[ObjectKey]:
    """The design that lost: same chain, same interface, tuples instead of bytes."""
    ids, keys = tokens.tolist(), []
    value = root.value if isinstance(root, ObjectKey) else hash(root)
    for start in range(0, len(ids) - block_size + 1, block_size):
        block = tuple(ids[start : start + block_size])
        value = hash((value, block))
        keys.append(ObjectKey(value, block))
    return keys


def hashlib_keys(tokens: memoryview, block_size: int, *, root: bytes) -> list[bytes]:
    """The keys of `block_keys`, made one by one."""
    raw, keys = tokens.tobytes(), []
    for start in range(0, len(raw) - 4 * block_size + 1, 4 * block_size):
        root = sha256(root + raw[start : start + 4 * block_size]).digest()
        keys.append(root)
    return keys


DESIGNS: dict[str, Callable[..., Any]] = {"objects": object_keys, "hashlib": hashlib_keys, "digests": block_keys}


class Collections:
    """Counts garbage collections and the time they take."""

    def __init__(self) -> None:
        self.count = self.full = 0
        self.seconds = self._start = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.process_time()
        else:
            self.seconds += time.process_time() - self._start
            self.count += 1
            self.full += info["generation"] == 2


def design(name: str = "digests", requests: int = 10_000) -> None:
    """The process of one run: so many requests of 1,500 tokens with 150 out to their end, over a pool of a million tokens."""
    vars(holdings)["block_keys"] = DESIGNS[name]
    collections = Collections()
    settle_garbage()
    gc.callbacks.append(collections)
    start = time.process_time()
    load, rng, sent, done = Load(256, 65_536), np.random.default_rng(0), 0, 0
    while done < requests:
        while sent < requests and len(load.scheduler.waiting) < 16:
            load.submit(rng.integers(8, VOCAB_SIZE, 1500, dtype=np.int32).tobytes(), 150)
            sent += 1
        done += sum(output.finish_reason is not None for output in load.step())
    seconds = time.process_time() - start
    gc.callbacks.remove(collections)
    gc.collect()
    found = {
        "requests_per_s": requests / seconds,
        "gc_collections": collections.count,
        "gc_full_collections": collections.full,
        "gc_seconds": collections.seconds,
        "gc_share": collections.seconds / seconds,
        "tracked_objects": len(gc.get_objects()),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps(found))


def keys(requests: int = 10_000, pairs: int = 10, tokens: int = 39_000) -> dict[str, Any]:
    def run(name: str) -> dict[str, float]:
        command = [sys.executable, __file__, "design", "--name", name, "--requests", str(requests)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)  # type: ignore[no-any-return]

    runs = rounds({name: partial(run, name) for name in DESIGNS}, pairs)
    loop: dict[str, Any] = {"medians": {name: medians(found) for name, found in runs.items()}}
    rows = [{"scheduling loop, median": name} for name in runs["objects"][0]]
    table([row | {d: loop["medians"][d][row["scheduling loop, median"]] for d in DESIGNS} for row in rows])
    rates = {name: [each["requests_per_s"] for each in found] for name, found in runs.items()}
    for name in ("hashlib", "digests"):
        both = {side: rates[side] for side in (name, "objects")}
        loop[f"{name}_ratio"] = summary(f"{name} beside objects", both, "requests/s")
    times = hashing(tokens)
    table([{f"µs, a prompt of {tokens:,} tokens": name, "": value} for name, value in times.items()])
    return {"loop": loop, "hashing_us": {name: rounded(value) for name, value in times.items()}}


def hashing(num_tokens: int) -> dict[str, float]:
    """Microseconds for the keys of one long prompt, and for one block more."""
    ids = array("i", random.Random(0).choices(range(VOCAB_SIZE), k=num_tokens))
    raw, as_list, root = ids.tobytes(), ids.tolist(), bytes(32)
    num_blocks = num_tokens // BLOCK_SIZE
    out = ffi.new("uint8_t[]", 32 * num_blocks)
    view, block, one = memoryview(ids), memoryview(ids)[:BLOCK_SIZE], ffi.new("uint8_t[32]")

    def in_c(is_portable: int) -> None:
        lib.penstock_block_keys(root, raw, num_blocks, BLOCK_SIZE, is_portable, out)

    calls: dict[str, Callable[[], object]] = {
        "prompt: block_keys, int32 buffer": lambda: block_keys(view, BLOCK_SIZE),
        "prompt: block_keys, list": lambda: block_keys(as_list, BLOCK_SIZE),
        "prompt: C alone": lambda: in_c(0),
        "prompt: C alone, portable": lambda: in_c(1),
        "prompt: hashlib loop": lambda: hashlib_keys(view, BLOCK_SIZE, root=root),
        "prompt: objects, built-in hash": lambda: object_keys(view, BLOCK_SIZE, root=root),
        "one block: block_keys": lambda: block_keys(block, BLOCK_SIZE, root=root),
        "one block: object": lambda: object_keys(block, BLOCK_SIZE, root=root),
    }
    found = {}
    for name, call in calls.items():
        number = 10 if name.startswith("prompt") else 2000
        found[name] = min(timeit.repeat(call, number=number, repeat=15)) / number * 1e6
    return found | {
        "one block beside a busy thread: GIL kept": beside_a_busy_thread(lambda: sha256(root + raw[:64]).digest()),
        "one block beside a busy thread: GIL released": beside_a_busy_thread(
            lambda: lib.penstock_block_keys(root, raw, 1, BLOCK_SIZE, 0, one)
        ),
    }


def beside_a_busy_thread(call: Callable[[], object], number: int = 20_000) -> float:
    """Mean microseconds a call while another thread computes. A call that lets go of the GIL may wait long for it."""
    stop = False

    def compute() -> None:
        while not stop:
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    seconds = 0.0
    try:
        for _ in range(number):
            sum(range(300))  # the caller has other work, with the GIL
            start = time.perf_counter()
            call()
            seconds += time.perf_counter() - start
    finally:
        stop = True
        thread.join()
    return seconds / number * 1e6


if __name__ == "__main__":
    main(__doc__, "scheduler", steps, keys, design)

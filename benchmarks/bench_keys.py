"""Block keys as digests against block keys as objects: the garbage collector, a scheduling loop, and plain hashing.

Every design drives the real scheduler and block pool; only the function that makes keys differs. `objects` is what
engines used before digests: (hash, tuple of tokens), chained with the built-in hash; the collector walks every one
of them again and again. `hashlib` makes our keys one by one in Python, `digests` is `block_keys`. Each run is a
process of its own; designs alternate; the loop is measured in CPU seconds. Prints two tables and one line of JSON.

    python benchmarks/bench_keys.py [--requests 10000] [--pairs 10]
"""

import argparse
import gc
import json
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
import timeit
from array import array
from collections import deque
from collections.abc import Callable
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from pairs import record

from penstock._csrc import ffi, lib
from penstock.cache.keys import block_keys
from penstock.engine.config import SchedulerConfig
from penstock.engine.core import holdings
from penstock.engine.core.engine_core import settle_garbage
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.messages import Submit
from penstock.executor.protocol import ModelInfo, Sampling, Step, StepResult

BLOCK_SIZE = 16
DESIGNS = ("objects", "hashlib", "digests")


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


# -- the scheduling loop -----------------------------------------------------------------------------------------


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


def model_info(num_blocks: int) -> ModelInfo:
    return ModelInfo(
        architecture="none",
        dtype="none",
        device="none",
        vocab_size=150_000,
        hidden_size=1,
        max_model_len=8192,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        block_bytes=1,
        fingerprint=b"benchmark",
        max_in_flight=2,
    )


def serve(num_requests: int, prompt: int, outputs: int, num_blocks: int) -> Scheduler:
    """Run the requests to their end over an executor that answers at once: what is left is scheduling."""
    config = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    scheduler = Scheduler(config, model_info(num_blocks), time.monotonic)
    rng = np.random.default_rng(0)
    sampling = Sampling(temperature=0.0)
    under_way: deque[Step] = deque()
    sent = done = 0
    while done < num_requests:
        while sent < num_requests and len(scheduler.waiting) < 16:
            tokens = rng.integers(0, 150_000, prompt, dtype=np.int32).tobytes()
            scheduler.submit(Submit(str(sent), tokens, sampling, outputs))
            sent += 1
        while len(under_way) < 2 and (step := scheduler.schedule()) is not None:
            under_way.append(step)
        step = under_way.popleft()
        sampled = [step.step_id & 0xFFFF if row.sample else -1 for row in step.rows]
        news = scheduler.apply(StepResult(step.step_id, sampled))
        done += sum(output.finish_reason is not None for output in news)
    return scheduler


def run_design(design: str, args: argparse.Namespace) -> dict[str, float]:
    make_keys: dict[str, Any] = {"objects": object_keys, "hashlib": hashlib_keys, "digests": block_keys}
    holdings.block_keys = make_keys[design]
    collections = Collections()
    settle_garbage()
    gc.callbacks.append(collections)
    start = time.process_time()
    scheduler = serve(args.requests, args.prompt, args.outputs, args.blocks)
    seconds = time.process_time() - start
    gc.callbacks.remove(collections)
    gc.collect()
    return {
        "requests_per_s": args.requests / seconds,
        "gc_collections": collections.count,
        "gc_full_collections": collections.full,
        "gc_seconds": collections.seconds,
        "gc_share": collections.seconds / seconds,
        "tracked_objects": len(gc.get_objects()),
        "cached_blocks": scheduler.pool.num_cached,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def run_pairs(args: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The designs in turn, each run in a fresh process."""
    runs: dict[str, list[dict[str, float]]] = {design: [] for design in DESIGNS}
    for pair in range(args.pairs):
        for design in DESIGNS if pair % 2 == 0 else reversed(DESIGNS):
            command = [sys.executable, __file__, "--design", design, *sys.argv[1:]]
            answer = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[design].append(json.loads(answer.stdout))
            rate = runs[design][-1]["requests_per_s"]
            print(f"pair {pair + 1} of {args.pairs}: {design} {rate:.0f} requests/s", file=sys.stderr)
    return runs


def print_runs(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    names = list(runs["objects"][0])
    medians = {
        design: {name: statistics.median(run[name] for run in runs[design]) for name in names} for design in runs
    }
    print(f"{'scheduling loop, median':<24}" + "".join(f"{design:>12}" for design in DESIGNS))
    for name in names:
        print(f"{name:<24}" + "".join(f"{medians[design][name]:>12,.4g}" for design in DESIGNS))
    report: dict[str, Any] = {"medians": medians}
    print()
    for design in DESIGNS[1:]:
        pairs = zip(runs[design], runs["objects"], strict=True)
        ratios = [run["requests_per_s"] / base["requests_per_s"] for run, base in pairs]
        low, high = bootstrap(ratios)
        print(
            f"{design} / objects, requests/s: mean {statistics.mean(ratios):.3f}, 95% interval {low:.3f} … {high:.3f}"
        )
        report[f"{design}_ratio"] = {"mean": statistics.mean(ratios), "low": low, "high": high}
    print()
    return report


def bootstrap(values: list[float]) -> tuple[float, float]:
    """The 95% interval of the mean."""
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[1949]


# -- plain hashing -----------------------------------------------------------------------------------------------


def time_us(call: Callable[[], object], number: int = 10) -> float:
    return min(timeit.repeat(call, number=number, repeat=15)) / number * 1e6


def hashing(num_tokens: int) -> dict[str, float]:
    """Microseconds for the keys of one long prompt, and for one block more."""
    ids = array("i", random.Random(0).choices(range(150_000), k=num_tokens))
    raw, as_list, root = ids.tobytes(), ids.tolist(), bytes(32)
    num_blocks = num_tokens // BLOCK_SIZE
    out = ffi.new("uint8_t[]", 32 * num_blocks)
    view, block, one = memoryview(ids), memoryview(ids)[:BLOCK_SIZE], ffi.new("uint8_t[32]")

    def release_the_gil() -> None:
        lib.penstock_block_keys(root, raw, 1, BLOCK_SIZE, 0, one)

    def keep_the_gil() -> None:
        sha256(root + raw[:64]).digest()

    return {
        "prompt: block_keys, int32 buffer": time_us(lambda: block_keys(view, BLOCK_SIZE)),
        "prompt: block_keys, list": time_us(lambda: block_keys(as_list, BLOCK_SIZE)),
        "prompt: C alone": time_us(lambda: lib.penstock_block_keys(root, raw, num_blocks, BLOCK_SIZE, 0, out)),
        "prompt: C alone, portable": time_us(
            lambda: lib.penstock_block_keys(root, raw, num_blocks, BLOCK_SIZE, 1, out)
        ),
        "prompt: hashlib loop": time_us(lambda: hashlib_keys(view, BLOCK_SIZE, root=root)),
        "prompt: objects, built-in hash": time_us(lambda: object_keys(view, BLOCK_SIZE, root=root)),
        "one block: block_keys": time_us(lambda: block_keys(block, BLOCK_SIZE, root=root), 2000),
        "one block: object": time_us(lambda: object_keys(block, BLOCK_SIZE, root=root), 2000),
        "one block beside a busy thread: GIL kept": beside_a_busy_thread(keep_the_gil),
        "one block beside a busy thread: GIL released": beside_a_busy_thread(release_the_gil),
    }


def beside_a_busy_thread(call: Callable[[], None], number: int = 20_000) -> float:
    """Mean microseconds a call while another thread computes. Who lets go of the GIL may wait long to get it back."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=1500, help="tokens of each prompt")
    parser.add_argument("--outputs", type=int, default=150, help="tokens of each answer")
    parser.add_argument("--blocks", type=int, default=65_536, help="blocks of the pool: 1M tokens of 16")
    parser.add_argument("--pairs", type=int, default=10, help="runs of each design, alternating")
    parser.add_argument("--tokens", type=int, default=39_000, help="length of the prompt that is only hashed")
    parser.add_argument("--design", choices=DESIGNS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.design:
        print(json.dumps(run_design(args.design, args)))
        return
    loop = print_runs(run_pairs(args))
    times = hashing(args.tokens)
    print(f"{'hashing':<48}{'µs':>10}   ({args.tokens:,} tokens a prompt)")
    for name, value in times.items():
        print(f"{name:<48}{value:>10,.2f}")
    record("keys", {"loop": loop, "hashing_us": times})


if __name__ == "__main__":
    main()

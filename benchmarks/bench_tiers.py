"""What the cache tiers cost when they do not help, and what they save when they do.

    python benchmarks/bench_tiers.py cost       duration of a batch of new prompts: no tiers, host, host and disk
    python benchmarks/bench_tiers.py ttft       time to first token on a disk hit against computing the prompt
    python benchmarks/bench_tiers.py throttled  throughput with a disk of 50 MB/s against the host alone

All engines of a run live side by side in this process and take turns, so that a busy neighbour meets them all. Floors:
host / none ≤ 1.03, host+disk / host ≤ 1.01; disk hit / computing ≤ 1.05 always and ≤ 0.3 at 2,000 tokens on the default
model; throttled / host ≥ 0.98. Disks are temporary directories under --disk-path.
"""

import argparse
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from pairs import Pair, Verdict, judge, record

from penstock import LLM, SamplingParams
from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.tier import DiskTier

FIRST_ID = 1000
THROTTLE_BYTES_PER_S = 50e6
LAG = 5


class Bench:
    """The arguments, and a source of prompts that nobody has seen."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self._rng = random.Random(args.seed)
        self._stack = ExitStack()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def engine(self, host: bool = True, disk: bool = False, **options: Any) -> LLM:
        args = self.args
        options.setdefault("kv_cache_bytes", args.kv_cache_bytes or 2**30)
        if host:
            options.setdefault("kv_host_bytes", args.kv_host_bytes or "1GiB")
        if disk:
            path = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=args.disk_path))
            options |= {"kv_disk_path": path, "kv_disk_bytes": args.kv_disk_bytes}
        llm = LLM(args.model, load_format=args.load_format, skip_tokenizer=True, **options)
        return self._stack.enter_context(llm)

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self.args.vocab) for _ in range(length)]

    def prompts(self) -> list[list[int]]:
        return [self.prompt(self.args.input_len) for _ in range(self.args.prompts)]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds for the batch. What is still on its way to the tiers afterwards is not waited for by anybody."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    llm._running().settle()  # the next engine has the machine for itself
    return elapsed_s


def ratio(name: str, pairs: list[Pair], floor: float) -> dict[str, Any]:
    """How many times as long ours takes; the floor fails only when the interval lies beyond it."""
    # judge() says theirs / ours of durations: turned round, so that 1.03 means 3 % slower.
    verdict = judge([Pair(pair.theirs, pair.ours) for pair in pairs], higher_is_better=False)
    print(f"{name:28s} {verdict}   floor {floor}")
    return {**figures(verdict), "floor": floor}


def figures(verdict: Verdict) -> dict[str, Any]:
    return {name: value if value is None else round(value, 4) for name, value in verdict._asdict().items()}


def cost(bench: Bench) -> dict[str, Any]:
    engines = {"none": bench.engine(host=False), "host": bench.engine(), "host+disk": bench.engine(disk=True)}
    if bench.args.caller_writes:
        engines["host+disk, caller writes"] = bench.engine(disk=True)
        write_in_the_caller(disk_of(engines["host+disk, caller writes"]))
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(-1, bench.args.pairs):
        prompts = bench.prompts()
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            elapsed_s = run(engines[name], prompts, bench.args.output_len)
            if number >= 0:  # the first round warms up
                seconds[name].append(elapsed_s)
    medians = {name: round(statistics.median(values), 4) for name, values in seconds.items()}
    print("median seconds: " + "  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    host = [Pair(*pair) for pair in zip(seconds["host"], seconds["none"], strict=True)]
    disk = [Pair(*pair) for pair in zip(seconds["host+disk"], seconds["host"], strict=True)]
    stored = engines["host+disk"].get_metrics()["kv_disk_stored_blocks"]
    assert stored > 0, "the disk was never written"
    return {
        "median_s": medians,
        "host / none": ratio("host / none", host, 1.03),
        "host+disk / host": ratio("host+disk / host", disk, 1.01),
        "blocks_on_disk": stored,
    }


def disk_of(llm: LLM) -> DiskTier:
    return llm._running().executor._rank._tiers.transfers._stores["disk"]  # type: ignore[attr-defined,no-any-return]


def write_in_the_caller(disk: DiskTier) -> None:
    """As connectors did before they had workers: who stores a block waits until it is written."""
    put = disk.put

    def put_and_wait(key: bytes, buffer: Any) -> bool:
        is_taken = put(key, buffer)
        disk.flush()
        return is_taken

    disk.put = put_and_wait  # type: ignore[method-assign]


def ttft(bench: Bench) -> dict[str, Any]:
    results = {}
    llm = bench.engine(disk=True)
    run(llm, [bench.prompt(256)], 1)
    for length in bench.args.shared:
        pairs, cached = [], []
        for _ in range(bench.args.pairs):
            prompt, ends = bench.prompt(length), [bench.prompt(8) for _ in range(2)]
            computed_s = run(llm, [prompt + ends[0]], 1)
            forget_device_and_host(llm)
            before = llm.get_metrics()["kv_disk_hit_tokens"]
            pairs.append(Pair(run(llm, [prompt + ends[1]], 1), computed_s))
            cached.append(llm.get_metrics()["kv_disk_hit_tokens"] - before)
        floor = 0.3 if length >= 2000 else 1.05
        results[str(length)] = {
            **ratio(f"disk hit of {length} tokens", pairs, floor),
            "from_disk": statistics.median(cached),
            "computed_s": round(statistics.median(pair.theirs for pair in pairs), 4),
        }
    return results


def forget_device_and_host(llm: LLM) -> None:
    """As if everything else had pushed it out: what is left is on the disk."""
    scheduler = llm._running().scheduler
    assert scheduler.tiers is not None
    assert scheduler.pool.forget() and scheduler.tiers.index.host.forget()


def throttled(bench: Bench) -> dict[str, Any]:
    """Half of each batch was asked LAG batches ago. The device and the host have forgotten it; a slow disk has not."""
    args = bench.args
    room = {"kv_cache_bytes": args.kv_cache_bytes or 60_000_000, "kv_host_bytes": args.kv_host_bytes or "96MiB"}
    host, slow = bench.engine(**room), bench.engine(disk=True, **room)
    batch_blocks = args.prompts * args.input_len // host.info.block_size
    assert host.info.num_blocks + host.info.host_slots < (LAG - 1) * batch_blocks, "old prompts never leave the host"
    disk_of(slow)._transport._calls = SlowCalls(THROTTLE_BYTES_PER_S)
    batches: list[list[list[int]]] = []
    pairs = []
    for number in range(args.pairs + LAG):
        batches.append(bench.prompts())
        prompts = batches[-1]
        if number >= LAG:
            prompts = [*batches[-1][: args.prompts // 2], *batches[-1 - LAG][: args.prompts // 2]]
        order = (host, slow) if number % 2 else (slow, host)
        seconds = {id(llm): run(llm, prompts, args.output_len) for llm in order}
        if number >= LAG:
            pairs.append(Pair(seconds[id(slow)], seconds[id(host)]))
    metrics = {name: value for name, value in slow.get_metrics().items() if name.startswith("kv_disk_")}
    return {"throttled / host": ratio("50 MB/s disk / host", pairs, round(1 / 0.98, 4)), "disk": metrics}


class SlowCalls(SystemCalls):
    """A device that moves so many bytes a second, for all who ask together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return self._slowly(super().writev(file, parts, offset))

    def readv(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return self._slowly(super().readv(file, parts, offset))

    def _slowly(self, num_bytes: int) -> int:
        with self._lock:
            time.sleep(num_bytes / self._bytes_per_s)
        return num_bytes


@contextmanager
def timed(name: str) -> Iterator[None]:
    started_s = time.monotonic()
    yield
    print(f"{name}: {time.monotonic() - started_s:.0f} s in all")


MODES: dict[str, Callable[[Bench], dict[str, Any]]] = {"cost": cost, "ttft": ttft, "throttled": throttled}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("mode", choices=MODES, nargs="?", default="ttft")
    add("--model", help="default: the default model")
    add("--load-format", default="auto", choices=("auto", "dummy"))
    add("--pairs", type=int, default=10, metavar="N")
    add("--prompts", type=int, default=8, metavar="N", help="in a batch")
    add("--input-len", type=int, default=256, metavar="N")
    add("--output-len", type=int, default=16, metavar="N")
    add("--shared", type=int, nargs="+", default=[32, 128, 512, 2000], metavar="N", help="tokens found on the disk")
    add("--vocab", type=int, default=40_000, metavar="N", help="prompts are random ids below this")
    add("--kv-cache-bytes", type=int, help="default: 1 GiB, and as little as a batch needs for `throttled`")
    add("--kv-host-bytes", help="default: likewise")
    add("--kv-disk-bytes", default="8GiB")
    add("--caller-writes", action="store_true", help="`cost` also with a disk that the caller writes to itself")
    add("--disk-path", help="where the temporary directories are made")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    with timed(args.mode), Bench(args) as bench:
        results = MODES[args.mode](bench)
    record(f"tiers-{args.mode}", results)


if __name__ == "__main__":
    main()

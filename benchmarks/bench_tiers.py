"""What the cache tiers cost when they do not help, and what they save when they do.

    python benchmarks/bench_tiers.py cost   duration of a batch of new prompts: no tiers, host, host and disk; and with
                                            blocks written to the disk by the caller, as connectors once did
    python benchmarks/bench_tiers.py ttft   time to first token of a prompt found on the disk, and of one found at a peer,
                                            against computing it

All engines of a run live side by side in this process and take turns, so that a busy machine meets them all. Floors:
host / none ≤ 1.03, host+disk / host ≤ 1.01; found / computed ≤ 1.05 always and ≤ 0.3 at 2,000 tokens on the default
model. Disks are temporary directories under --disk-path.
"""

import argparse
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pairs import Pair, arguments, record, rounded, rounds, summary

from penstock import LLM, SamplingParams

FIRST_ID = 1000


class Bench:
    """The arguments, the engines, and a source of prompts that none of them has seen."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self._stack = args, stack
        self._rng = random.Random(args.seed)

    def engine(self, host: bool = True, disk: bool = False, **options: Any) -> LLM:
        args = self.args
        if host:
            options["kv_host_bytes"] = "1GiB"
        if disk:
            path = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=args.disk_path))
            options |= {"kv_disk_path": path, "kv_disk_bytes": "8GiB"}
        options |= {"load_format": args.load_format, "kv_cache_bytes": 2**30, "skip_tokenizer": True}
        return self._stack.enter_context(LLM(args.model, **options))

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self.args.vocab) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds for the batch. What is still in flight to the tiers afterwards is not in it."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    llm._running().settle()  # the next engine has the machine for itself
    return elapsed_s


def store_of(llm: LLM) -> Any:
    """What is below the host tier: here that is one thing."""
    (store,) = llm._running().executor._rank._tiers.transfers._stores.values()  # type: ignore[attr-defined]
    return store


def ratio(name: str, pairs: list[Pair], sides: tuple[str, str]) -> dict[str, Any]:
    """How many times as long the first of the sides takes: 1.03 means 3 % slower."""
    return summary(f"{name}, {' / '.join(sides)}", pairs, "s", higher_is_better=True, sides=sides)


# -- cost --------------------------------------------------------------------------------------------------------


def cost(bench: Bench) -> dict[str, Any]:
    args = bench.args
    engines = {"none": bench.engine(host=False), "host": bench.engine(), "host+disk": bench.engine(disk=True)}
    engines["host+disk, caller writes"] = caller = bench.engine(disk=True)
    write_in_the_caller(store_of(caller))
    batches = [[bench.prompt(args.input_len) for _ in range(args.prompts)] for _ in range(args.pairs + 1)]
    waiting = {name: iter(batches) for name in engines}  # every engine gets the same batches
    runs = {name: lambda n=name: run(engines[n], next(waiting[n]), args.output_len) for name in engines}
    rounds(runs, 1)  # warms up
    seconds = rounds(runs, args.pairs)
    medians = {name: rounded(statistics.median(values)) for name, values in seconds.items()}
    print("median seconds: " + "  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    stored = engines["host+disk"].get_metrics()["kv_disk_stored_blocks"]
    assert stored > 0, "the disk was never written"
    figures = {"median_s": medians, "blocks_on_disk": stored}
    for sides in (("host", "none"), ("host+disk", "host")):
        pairs = [Pair(*pair) for pair in zip(*(seconds[side] for side in sides), strict=True)]
        figures[" / ".join(sides)] = ratio("a batch of new prompts", pairs, sides)
    return figures


def write_in_the_caller(disk: Any) -> None:
    """As connectors did before they had workers: who stores a block waits until it is written."""
    put = disk.put

    def put_and_wait(key: bytes, buffer: Any) -> bool:
        is_taken = put(key, buffer)
        disk.flush()
        return is_taken  # type: ignore[no-any-return]

    disk.put = put_and_wait


# -- ttft --------------------------------------------------------------------------------------------------------


def ttft(bench: Bench) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    disk = bench.engine(disk=True)
    first, second = bench.engine(kv_peer_listen=address), bench.engine(kv_peers=[address])
    results = found_below(bench, "disk", disk, disk, lambda _: forget_device_and_host(disk))
    return results | found_below(bench, "peer", first, second, lambda blocks: wait_for_keys(second, blocks))


def found_below(
    bench: Bench, kind: str, computes: LLM, reads: LLM, between: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """A prompt is computed by one engine; the other, or the same once it has forgotten, finds it in a tier."""
    results = {}
    for length in bench.args.shared:
        pairs, found = [], []
        for number in range(bench.args.pairs + 1):
            prompt, ends = bench.prompt(length), [bench.prompt(8) for _ in range(2)]
            computed_s = run(computes, [prompt + ends[0]], 1)
            between(length // reads.info.block_size)
            before = reads.get_metrics()[f"kv_{kind}_hit_tokens"]
            found_s = run(reads, [prompt + ends[1]], 1)
            if number:  # the first warms up
                pairs.append(Pair(found_s, computed_s))
                found.append(reads.get_metrics()[f"kv_{kind}_hit_tokens"] - before)
            if computes is not reads:
                reads.reset_prefix_cache(), computes.reset_prefix_cache()
        name = f"{length} tokens, {kind}"
        results[name] = ratio(name, pairs, ("found", "computed")) | {"found_tokens": statistics.median(found)}
    return results


def forget_device_and_host(llm: LLM) -> None:
    """As if everything else had pushed it out: what is left is on the disk."""
    scheduler = llm._running().scheduler
    assert scheduler.tiers is not None
    assert scheduler.pool.forget() and scheduler.tiers.index.host.forget()


def wait_for_keys(llm: LLM, count: int) -> None:
    """Until the peer's announcement is here; the core takes it in with its next request."""
    while len(store_of(llm)) < count:
        time.sleep(0.001)


MODES = {"cost": cost, "ttft": ttft}


def main() -> None:
    options: dict[str, Any] = {
        "model": None,
        "load_format": "auto",
        "vocab": 40_000,
        "disk_path": None,
        "pairs": 10,
        "seed": 0,
    }
    options |= {"prompts": 8, "input_len": 256, "output_len": 16, "shared": [32, 128, 512, 2000]}
    args = arguments(__doc__, *MODES, **options)
    with ExitStack() as stack:
        record(f"tiers-{args.mode}", MODES[args.mode](Bench(args, stack)))


if __name__ == "__main__":
    main()

"""What the cache tiers cost when they do not help, and what they save when they do.

    python benchmarks/bench_tiers.py cost   duration of a batch of new prompts: no tiers, host, host and disk
    python benchmarks/bench_tiers.py ttft   time to first token of a prompt found on the disk, and of one found at a peer,
                                            against computing it
    python benchmarks/bench_tiers.py prefix time to first token behind a long prefix of a model with recurrent layers (the
                                            shape of Qwen3.5-0.8B): computed, found in memory, and on the disk after a
                                            restart; all answers must be the same
    python benchmarks/bench_tiers.py disk   the disk tier alone: what storing costs its caller; look-up; restart

All engines of a run live side by side in this process and take turns, so that a busy machine meets them all. Floors:
host / none ≤ 1.03, host+disk / host ≤ 1.01; found / computed ≤ 1.05 always and ≤ 0.3 at 2,000 tokens on the default
model, ≤ 0.2 for `prefix`. Disks are temporary directories under --disk-path.

`disk`: a store of 2,048 tokens is eight chunks of 8 MiB. Its cost on the calling thread is taken on an empty disk and with
20,000 resident chunks where every further one evicts, in turn; writing and unlinking are left out. A restart opens 100,000
records.
"""

import json
import os
import random
import socket
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from gpu.shapes import HYBRID
from pairs import main, quantile, rounded, rounds, summary

from penstock import LLM, SamplingParams
from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.record import cell_bytes
from penstock.cache.tiers.disk.tier import DiskTier
from penstock.cache.tiers.memory import huge_array

FIRST_ID = 1000


class Engines:
    """Engines that end with it, and a source of prompts that none of them has seen."""

    def __init__(
        self, stack: ExitStack, model: str | None, load_format: str, vocab: int, disk_path: str | None
    ) -> None:
        self._stack, self._model, self._vocab, self._disk_path = stack, model, vocab, disk_path
        self._options = {"load_format": load_format, "kv_cache_bytes": 2**30, "skip_tokenizer": True}
        self._rng = random.Random(0)

    def open(self, host: bool = True, disk: bool = False, **options: Any) -> LLM:
        if host:
            options["kv_host_bytes"] = "1GiB"
        if disk:
            path = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=self._disk_path))
            options |= {"kv_disk_path": path, "kv_disk_bytes": "8GiB"}
        return self._stack.enter_context(LLM(self._model, **self._options, **options))

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self._vocab) for _ in range(length)]


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


# -- cost --------------------------------------------------------------------------------------------------------


def cost(
    model: str | None = None,
    load_format: str = "auto",
    vocab: int = 40_000,
    disk_path: str | None = None,
    pairs: int = 10,
    prompts: int = 8,
    input_len: int = 256,
    output_len: int = 16,
) -> dict[str, Any]:
    with ExitStack() as stack:
        engines = Engines(stack, model, load_format, vocab, disk_path)
        sides = {"none": engines.open(host=False), "host": engines.open(), "host+disk": engines.open(disk=True)}
        batches = [[engines.prompt(input_len) for _ in range(prompts)] for _ in range(pairs + 1)]
        waiting = {name: iter(batches) for name in sides}  # every engine gets the same batches
        runs = {name: lambda n=name: run(sides[n], next(waiting[n]), output_len) for name in sides}
        rounds(runs, 1)  # warms up
        seconds = rounds(runs, pairs)
        stored = sides["host+disk"].get_metrics()["kv_disk_stored_blocks"]
    assert stored > 0, "the disk was never written"
    median_s = {name: rounded(statistics.median(values)) for name, values in seconds.items()}
    print("median seconds: " + "  ".join(f"{name} {value:.3f}" for name, value in median_s.items()))
    figures: dict[str, Any] = {"median_s": median_s, "blocks_on_disk": stored}
    for both in (("host", "none"), ("host+disk", "host")):
        figures[" / ".join(both)] = ratio("a batch of new prompts", {side: seconds[side] for side in both})
    return figures


def ratio(name: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """How many times as long the first of the sides takes: 1.03 means 3 % slower."""
    return summary(f"{name}, {' / '.join(seconds)}", seconds, "s", higher_is_better=True)


# -- ttft --------------------------------------------------------------------------------------------------------


def ttft(
    model: str | None = None,
    load_format: str = "auto",
    vocab: int = 40_000,
    disk_path: str | None = None,
    pairs: int = 10,
    shared: list[int] = [32, 128, 512, 2000],  # noqa: B006
) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ExitStack() as stack:
        engines = Engines(stack, model, load_format, vocab, disk_path)
        disk = engines.open(disk=True)
        first, second = engines.open(kv_peer_listen=address), engines.open(kv_peers=[address])
        ways = {
            "disk": (disk, disk, lambda _: forget_device_and_host(disk)),
            "peer": (first, second, partial(wait_for_keys, second)),
        }
        return {
            f"{length} tokens, {kind}": found_below(engines, kind, length, pairs, *way)
            for kind, way in ways.items()
            for length in shared
        }


def found_below(
    engines: Engines, kind: str, length: int, pairs: int, computes: LLM, reads: LLM, between: Callable[[int], None]
) -> dict[str, Any]:
    """A prompt is computed by one engine; the other, or the same once it has forgotten, finds it in a tier."""
    seconds: dict[str, list[float]] = {"found": [], "computed": []}
    tokens = []
    for _ in range(pairs + 1):
        prompt, ends = engines.prompt(length), [engines.prompt(8) for _ in range(2)]
        seconds["computed"].append(run(computes, [prompt + ends[0]], 1))
        between(length // reads.info.block_size)
        before = reads.get_metrics()[f"kv_{kind}_hit_tokens"]
        seconds["found"].append(run(reads, [prompt + ends[1]], 1))
        tokens.append(reads.get_metrics()[f"kv_{kind}_hit_tokens"] - before)
        if computes is not reads:
            reads.reset_prefix_cache(), computes.reset_prefix_cache()
    counted = {side: values[1:] for side, values in seconds.items()}  # the first warms up
    return ratio(f"{length} tokens, {kind}", counted) | {"found_tokens": statistics.median(tokens[1:])}


def forget_device_and_host(llm: LLM) -> None:
    """As if everything else had pushed it out: what is left is on the disk."""
    scheduler = llm._running().scheduler
    assert scheduler.tiers is not None
    assert scheduler.pool.forget() and scheduler.tiers.index.host.forget()


def wait_for_keys(llm: LLM, count: int) -> None:
    """Until the peer's announcement is here; the core takes it in with its next request."""
    while len(store_of(llm)) < count:
        time.sleep(0.001)


# -- prefix ------------------------------------------------------------------------------------------------------


def prefix(disk_path: str | None = None, pairs: int = 3, length: int = 2000, output_len: int = 16) -> dict[str, Any]:
    rng = random.Random(0)
    prompts = [rng.choices(range(FIRST_ID, HYBRID["vocab_size"]), k=length + 8) for _ in range(pairs)]
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False)
    seconds: dict[str, list[float]] = {"computed": [], "memory": [], "disk": []}
    answers: dict[str, list[list[int]]] = {way: [] for way in seconds}
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=disk_path) as folder:
        Path(folder, "config.json").write_text(json.dumps(HYBRID))
        Path(folder, "disk").mkdir()
        options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer": True, "kv_cache_bytes": 2**30}
        options |= {"kv_host_bytes": "1GiB", "kv_disk_path": f"{folder}/disk", "kv_disk_bytes": "8GiB"}
        for ways in (("computed", "memory"), ("disk",)):  # an engine each
            with LLM(folder, max_model_len=length + 64, **options) as llm:
                llm.generate([prompts[0][-64:]], params, use_tqdm=False)  # warms up
                for prompt in prompts:
                    for way in ways:
                        (result,) = llm.generate([prompt], params, use_tqdm=False)
                        llm._running().settle()
                        assert (result.num_cached_tokens or 0) == (0 if way == "computed" else length)
                        seconds[way].append(result.metrics.first_token_s or 0.0)
                        answers[way].append(result.outputs[0].token_ids)
    assert answers["computed"] == answers["memory"] == answers["disk"], "an answer has changed"
    found = {way: {"found": seconds[way], "computed": seconds["computed"]} for way in ("memory", "disk")}
    figures = {way: ratio(f"{length} tokens, {way}", both) for way, both in found.items()}
    return figures | {"seconds": seconds, "same_tokens": pairs * output_len}


# -- disk --------------------------------------------------------------------------------------------------------

CHUNK = 8 * 2**20
BATCH = 8
RESIDENT = 20_000
MANY = 100_000
BATCHES_A_ROUND = 30
FINGERPRINT = b"benchmark"


class NoWrites(SystemCalls):
    """Records go nowhere; all else is as always."""

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return sum(map(len, parts)) if len(parts) > 1 else super().writev(file, parts, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)


class Disk:
    """A tier that has stored so many records, real in everything but their bytes; `full`: every further one evicts."""

    def __init__(self, folder: Path, num_records: int, full: bool = False) -> None:
        self._options: dict[str, Any] = {"chunk_bytes": CHUNK, "fingerprint": FINGERPRINT}
        cells = num_records if full else num_records + 10**4
        self._options |= {"path": folder, "capacity_bytes": cells * (cell_bytes(CHUNK) + 4096) + 2**26}
        self._chunks = [memoryview(chunk) for chunk in huge_array(BATCH, CHUNK)]
        self.tier = DiskTier(**self._options, calls=NoWrites())
        self.polls: list[float] = []
        self.batches((self.tier.stats()["slots"] if full else num_records) // BATCH + full)
        self.tier._admission.admits = lambda key: True  # type: ignore[method-assign]  # every store evicts
        self.polls.clear()

    def reopened(self) -> DiskTier:
        return DiskTier(**self._options)

    def batches(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            keys = [os.urandom(32) for _ in range(BATCH)]
            put, chunks = self.tier.put, self._chunks
            started_s = time.perf_counter()
            for key, chunk in zip(keys, chunks, strict=True):
                put(key, chunk)
            seconds.append(time.perf_counter() - started_s)
            self._drain(BATCH)
        return seconds

    def _drain(self, count: int) -> None:
        while count:
            time.sleep(0.0002)
            started_s = time.perf_counter()
            count -= len(self.tier.poll())
            self.polls.append(time.perf_counter() - started_s)


def quantiles_us(seconds: Sequence[float]) -> dict[str, Any]:
    return {f"p{100 * share:.0f}_us": rounded(1e6 * quantile(seconds, share)) for share in (0.5, 0.99)}


def stored(folder: Path, count: int) -> dict[str, Any]:
    sides = {"empty": Disk(folder / "empty", 0), "full": Disk(folder / "full", RESIDENT, full=True)}
    rounds({name: partial(side.batches, 3) for name, side in sides.items()}, 1)
    runs = rounds({name: partial(side.batches, BATCHES_A_ROUND) for name, side in sides.items()}, count)
    figures = {name: quantiles_us([seconds for batch in values for seconds in batch]) for name, values in runs.items()}
    figures["poll"] = quantiles_us([*sides["empty"].polls, *sides["full"].polls])
    for side in sides.values():
        side.tier.close()
    return figures


def restarted(folder: Path, count: int) -> dict[str, Any]:
    """Seconds to open a disk of many records, nanoseconds of a look-up."""
    disk, seconds = Disk(folder, MANY), []
    disk.tier.close()
    for _ in range(count):
        started_s = time.perf_counter()
        tier = disk.reopened()
        seconds.append(time.perf_counter() - started_s)
        assert len(tier) == MANY
        keys = tier.keys()[::10]
        names = {"contains": tier.contains, "keys": keys}
        walk_s = min(timeit.repeat("[contains(key) for key in keys]", number=1, repeat=5, globals=names))
        tier.close()
    restart_s = {"median": round(statistics.median(seconds), 3), "worst": round(max(seconds), 3)}
    return {"entries": MANY, "restart_s": restart_s, "lookup_ns": round(walk_s / len(keys) * 1e9)}


def disk(disk_path: str | None = None, pairs: int = 10) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=disk_path) as folder:
        figures = {"store": stored(Path(folder), pairs), "restart": restarted(Path(folder) / "restart", pairs)}
    for values in figures.values():
        for name, value in values.items():
            print(f"  {name:20} {value}")
    return figures


if __name__ == "__main__":
    main(__doc__, "tiers", cost, ttft, prefix, disk)

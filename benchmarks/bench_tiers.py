"""Measures what the cache tiers cost when they do not help, and what they save when they do.

    python benchmarks/bench_tiers.py cost   duration of a batch of new prompts: no tiers, host, host and disk
    python benchmarks/bench_tiers.py reuse  time to first token of a prompt that is found in memory, at a peer, and on the disk
                                            after a restart, against computing it; on a CPU all answers must be the same.
                                            --model: hybrid (the shape of Qwen3.5-0.8B, which has recurrent layers), a
                                            shape of gpu/shapes.py, default, or any; --gib: of the cache, and of the host
    python benchmarks/bench_tiers.py disk   the disk tier alone: what storing costs its caller; look-up; restart

The engines of `cost` run in this process and take turns, so that a busy machine slows all of them. Floors:
host / none ≤ 1.03, host+disk / host ≤ 1.01; reused / computed at 2,000 tokens ≤ 0.3 on the default model and ≤ 0.2 with
recurrent layers, and on a GPU at 16,000 tokens of a dense model ≤ 0.4. Disks are temporary directories under --disk-path.

`disk`: a store of 2,048 tokens is eight chunks of 8 MiB. Its cost on the calling thread is taken on an empty disk and
with 20,000 resident chunks where every further one evicts, in turn; writing and unlinking are left out. A restart opens
100,000 records.
"""

import itertools
import json
import os
import random
import statistics
import tempfile
import time
import timeit
from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from gpu.shapes import HYBRID, MODELS
from pairs import free_port, main, quantile, rounded, rounds, summary, table

from penstock import LLM, RequestOutput, SamplingParams
from penstock.cache.tiers.disk.calls import SystemCalls
from penstock.cache.tiers.disk.record import cell_bytes
from penstock.cache.tiers.disk.tier import DiskTier
from penstock.cache.tiers.memory import huge_array

FIRST_ID = 1000


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[RequestOutput]]:
    """Return the seconds for the batch, excluding transfers to the tiers that are in flight afterwards, and its answers."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    llm._running().settle()  # so that it does not disturb the next engine
    return elapsed_s, outputs


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
    rng = random.Random(0)
    options: dict[str, Any] = {"load_format": load_format, "kv_cache_bytes": 2**30, "skip_tokenizer": True}
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=disk_path))
        host = {"kv_host_bytes": "1GiB"}
        tiers = {"none": {}, "host": host, "host+disk": host | {"kv_disk_path": path, "kv_disk_bytes": "8GiB"}}
        sides = {name: stack.enter_context(LLM(model, **options, **more)) for name, more in tiers.items()}
        batches = [[rng.choices(range(FIRST_ID, vocab), k=input_len) for _ in range(prompts)] for _ in range(pairs + 1)]
        waiting = {name: iter(batches) for name in sides}  # every engine gets the same batches
        runs = {name: lambda n=name: run(sides[n], next(waiting[n]), output_len)[0] for name in sides}
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
    """Return how many times as long the first of the sides takes: 1.03 means 3 % slower."""
    return summary(f"{name}, {' / '.join(seconds)}", seconds, "s", higher_is_better=True)


# -- reuse -------------------------------------------------------------------------------------------------------

WAYS = ("computed", "memory", "peer", "disk")


def reuse(
    model: str = "hybrid",
    disk_path: str | None = None,
    pairs: int = 3,
    shared: list[int] = [2000],  # noqa: B006
    output_len: int = 16,
    gib: int = 1,
) -> dict[str, Any]:
    address, shape = f"127.0.0.1:{free_port()}", (MODELS | {"hybrid": HYBRID}).get(model)
    rng, vocab = random.Random(0), shape["vocab_size"] if shape else 40_000
    prompts = [(length, rng.choices(range(FIRST_ID, vocab), k=length + 8)) for length in shared for _ in range(pairs)]
    warming = [rng.choices(range(FIRST_ID, vocab), k=64)]
    seconds: dict[tuple[str, int], list[float]] = {(way, length): [] for way in WAYS for length in shared}
    answers: dict[str, list[list[int]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=disk_path) as folder, ExitStack() as stack:
        Path(folder, "config.json").write_text(json.dumps(shape))
        options: dict[str, Any] = {"skip_tokenizer": True, "kv_cache_bytes": gib * 2**30, "kv_host_bytes": f"{gib}GiB"}
        options |= {"max_model_len": max(shared) + 64, "load_format": "dummy" if shape else "auto"}
        name = folder if shape else {"default": None}.get(model, model)
        on_disk = {"kv_disk_path": f"{folder}/disk", "kv_disk_bytes": "8GiB"}

        def ask(llm: LLM, way: str, length: int, prompt: list[int]) -> None:
            _, (result,) = run(llm, [prompt], output_len)
            assert (result.num_cached_tokens or 0) == (0 if way == "computed" else length), f"--shared {length}: {way}"
            seconds[way, length].append(result.metrics.first_token_s or 0.0)
            answers[way].append(result.outputs[0].token_ids)

        with LLM(name, kv_peer_listen=address, **on_disk, **options) as first:
            second = stack.enter_context(LLM(name, kv_peers=[address], **options))
            for llm in (first, second):
                run(llm, warming, 2)
            for length, prompt in prompts:
                ask(first, "computed", length, prompt)
                ask(first, "memory", length, prompt)
                wait_for_blocks(second, length // first.info.block_size)
                ask(second, "peer", length, prompt)
                second.reset_prefix_cache()
        with LLM(name, **on_disk, **options) as restarted:
            run(restarted, warming, 2)
            for length, prompt in prompts:
                ask(restarted, "disk", length, prompt)
            # A GPU rounds otherwise where a step has fewer tokens, and the best token may be another one.
            changed = sum(a != b for way in WAYS for a, b in zip(answers[way], answers["computed"], strict=True))
            assert not changed or restarted.info.device != "cpu", "an answer has changed"
    figures: dict[str, Any] = {"changed answers": changed}
    for way, length in itertools.product(WAYS[1:], shared):
        both = {"reused": seconds[way, length], "computed": seconds["computed", length]}
        figures[f"{length} tokens, {way}"] = ratio(f"{length} tokens, {way}", both) | {"seconds": both}
    return figures


def wait_for_blocks(llm: LLM, count: int) -> None:
    """Wait until the peer has announced as many blocks; the core processes that with its next request."""
    (peer,) = llm._running().executor._rank.tiers.transfers._stores.values()  # type: ignore[attr-defined]
    while len(peer) < count:
        time.sleep(0.001)


# -- disk --------------------------------------------------------------------------------------------------------

CHUNK = 8 * 2**20
BATCH = 8
RESIDENT = 20_000
MANY = 100_000
BATCHES_A_ROUND = 30


class NoWrites(SystemCalls):
    """System calls that skip the writes of records; everything else is real."""

    def writev(self, file: int, parts: Sequence[Any], offset: int) -> int:
        return sum(map(len, parts)) if len(parts) > 1 else super().writev(file, parts, offset)

    def allocate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)


def options_of(folder: Path, num_cells: int) -> dict[str, Any]:
    capacity_bytes = num_cells * (cell_bytes(CHUNK) + 4096) + 2**26
    return {"path": folder, "capacity_bytes": capacity_bytes, "chunk_bytes": CHUNK, "fingerprint": b"benchmark"}


def store(tier: DiskTier, chunks: Sequence[memoryview], count: int) -> list[float]:
    """Store `count` batches of new records; return the seconds that each took on the caller's thread."""
    seconds = []
    for _ in range(count):
        keys = [os.urandom(32) for _ in chunks]
        started_s = time.perf_counter()
        for key, chunk in zip(keys, chunks, strict=True):
            tier.put(key, chunk)
        seconds.append(time.perf_counter() - started_s)
        left = len(chunks)
        while left:
            time.sleep(0.0002)
            left -= len(tier.poll())
    return seconds


def disk(disk_path: str | None = None, pairs: int = 10) -> dict[str, Any]:
    chunks = [memoryview(chunk) for chunk in huge_array(BATCH, CHUNK)]
    with tempfile.TemporaryDirectory(prefix="tiers-", dir=disk_path) as folder, ExitStack() as stack:
        tiers = {}
        for name, cells in (("empty", RESIDENT), ("full", RESIDENT), ("restart", MANY + 2**10)):
            options = options_of(Path(folder, name), cells)
            tiers[name] = stack.enter_context(closing(DiskTier(**options, calls=NoWrites())))
        tiers["full"]._admission.admits = lambda key: True  # type: ignore[method-assign]  # every store evicts
        store(tiers["full"], chunks, tiers["full"].stats()["slots"] // BATCH + 1)
        sides = {name: partial(store, tiers[name], chunks, BATCHES_A_ROUND) for name in ("empty", "full")}
        found = rounds(sides, min(pairs, RESIDENT // BATCH // BATCHES_A_ROUND - 1))
        figures: dict[str, Any] = {
            f"{name} p{100 * share:.0f} us": rounded(1e6 * quantile([s for batch in batches for s in batch], share))
            for name, batches in found.items()
            for share in (0.5, 0.99)
        }
        store(tiers["restart"], chunks, MANY // BATCH)
        tiers["restart"].close()
        seconds = []
        for _ in range(pairs):
            started_s = time.perf_counter()
            with closing(DiskTier(**options)) as tier:
                seconds.append(time.perf_counter() - started_s)
                names = {"contains": tier.contains, "keys": tier.keys()[::10]}
                walk_s = min(timeit.repeat("[contains(key) for key in keys]", number=1, repeat=5, globals=names))
                assert len(tier) == MANY
    figures |= {"restart_s": statistics.median(seconds), "restart_worst_s": max(seconds)}
    figures["lookup_ns"] = 1e9 * walk_s / (MANY // 10)
    table([{"figure": name, "value": value} for name, value in figures.items()])
    return figures


if __name__ == "__main__":
    main(__doc__, "tiers", cost, reuse, disk)

"""The router's placement without sockets: the cost of a decision, its growth, and its benefit.

    python benchmarks/bench_placement.py decision [--tokens 39000] [--replicas 8] [--rounds 1000]
    python benchmarks/bench_placement.py scale [--blocks-each 8192]      8 to 1,000 replicas: memory, updates, decisions
    python benchmarks/bench_placement.py trace [--trace TRACE.jsonl]     Mooncake's format: timestamp, lengths, hash_ids

`decision`: keys of a long prompt, the match, and the complete choice of a replica, where every replica holds as many
other blocks as a real one; microseconds of this thread's CPU. `trace`: a recorded hour of requests, or half an hour of
agents, in simulated time (tests/support/route_model.py), with every policy, with and without cache events, by one router
and by two that take turns.
"""

import json
import resource
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
from pairs import main, quantile, table
from tests.support.route_model import BLOCK_SIZE, Arrival, Settings, Simulation, pooled_hit

from penstock._csrc import ffi
from penstock.cache.keys import block_keys
from penstock.engine.http.kv_stream import Changes, Snapshot
from penstock.router.config import PolicyName
from penstock.router.placement.load import POLICIES, PolicyConfig
from penstock.router.placement.placement import Placement, ReplicaInfo

BLOCKS_EACH = 65_536
UPDATE_BLOCKS = 64  # blocks stored, and blocks removed, per update


def filled(num_replicas: int, num_blocks: int, block_size: int, max_facts: int) -> tuple[Placement, dict[str, Any]]:
    """Return a placement of replicas that hold `num_blocks` each, and the keys of these blocks."""
    placement = Placement(PolicyConfig(max_facts=max_facts))
    rng = np.random.default_rng(0)
    held = {f"r{number}": rng.integers(0, 2**64, num_blocks, dtype=np.uint64) for number in range(num_replicas)}
    for name, keys in held.items():
        placement.add_replica(name, ReplicaInfo(b"model", block_size, num_blocks))
        placement.set_available(name, True)
        placement.apply_events(name, [Snapshot(0, "device", keys.tobytes(), True, True)])
    return placement, held


# -- decision ----------------------------------------------------------------------------------------------------


def measure(call: Callable[..., Any], rounds: int, inputs: Iterable[tuple[Any, ...]] = repeat(())) -> dict[str, float]:
    """Return the CPU microseconds of this thread per call, excluding the time to make its inputs."""
    times = []
    for words in islice(inputs, rounds):
        start = time.thread_time_ns()
        call(*words)
        times.append((time.thread_time_ns() - start) / 1000)
    return {"p50": quantile(times, 0.5), "p99": quantile(times, 0.99)}


def decision(tokens: int = 39_000, replicas: int = 8, rounds: int = 1000) -> dict[str, Any]:
    ids = np.random.default_rng(0).integers(0, 150_000, tokens, dtype="<i4")
    prompt, figures = ids.tobytes(), {}
    for block_size in (32, 16):
        keys = partial(block_keys, prompt, block_size)
        figures[f"SHA-256 keys, block {block_size}"] = measure(keys, rounds)
        placement, _ = filled(replicas, BLOCKS_EACH - 2**13, block_size, PolicyConfig().max_facts)
        rows = decisions(placement, prompt, rounds)
        figures |= {f"{name}, block {block_size}": each for name, each in rows.items()}
    table([{"µs": name} | row for name, row in figures.items()])
    return {"tokens": tokens, "replicas": replicas, "us": figures}


def decisions(placement: Placement, tokens: bytes, rounds: int) -> dict[str, dict[str, float]]:
    """Measure decisions where the replicas hold the prompt to different depths, one of them completely."""
    keys = placement.prepare(tokens).spaces[0][1]
    for number, replica in enumerate(placement.view()):
        run = keys[: len(keys) * (number + 1) // len(placement.view())].tobytes()
        placement.apply_events(replica, [Snapshot(0, "device", run, True, True)])

    def decide(prepared: Any) -> None:
        charge = placement.choose(prepared, num_tokens=len(tokens) // 4)
        assert charge is not None
        charge.release(True)

    index, prompt = placement.caches.index, placement.prepare(tokens)
    counts = ffi.new("int32_t[]", index.num_slots)
    fresh = np.random.default_rng(1).integers(0, 150_000, (rounds, 8), dtype="<i4")
    new = ((row.tobytes() + tokens[32:],) for row in fresh)
    return {
        f"match of {len(keys):,} keys": measure(lambda: index.match_into(counts, keys, len(keys)), 10 * rounds),
        "choose and charge": measure(lambda: decide(prompt), rounds),
        "whole decision, known prompt": measure(lambda: decide(placement.prepare(tokens)), rounds),
        "whole decision, new prompt": measure(lambda tokens: decide(placement.prepare(tokens)), rounds, new),
    }


# -- scale -------------------------------------------------------------------------------------------------------


def scale(blocks_each: int = 8192, tokens: int = 39_000) -> dict[str, Any]:
    rows = [grown(count, blocks_each, tokens) for count in (8, 64, 250, 1000)]
    table(rows)
    return {"blocks_each": blocks_each, "num_tokens": tokens, "rows": rows}


def grown(num_replicas: int, blocks_each: int, num_tokens: int) -> dict[str, float]:
    """Measure updates of a full index at full speed, with decisions between them, in CPU time of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    placement, held = filled(num_replicas, blocks_each, 32, max(2 * num_replicas * blocks_each, 2**16))
    memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 150_000, num_tokens, dtype="<i4").tobytes() for _ in range(20)]
    seqs = dict.fromkeys(held, 0)
    decide_us, choose_us, num_events, updates_s = [], [], 0, 0.0
    for number in range(300):
        updates = []
        for name in rng.choice(list(held), 8, replace=False):
            seqs[name] += 1
            at = rng.integers(0, blocks_each - UPDATE_BLOCKS)
            keys = held[name][at : at + UPDATE_BLOCKS]
            gone = keys.tobytes()
            keys[:] = rng.integers(0, 2**64, UPDATE_BLOCKS, dtype=np.uint64)
            updates.append((name, Changes(seqs[name], "device", keys.tobytes(), gone)))
        start = time.thread_time()
        for name, changes in updates:
            placement.apply_events(name, [changes])
        updates_s += time.thread_time() - start
        num_events += len(updates) * 2 * UPDATE_BLOCKS
        start = time.thread_time()
        prompt = placement.prepare(prompts[number % len(prompts)])
        middle = time.thread_time()
        charge = placement.choose(prompt, num_tokens=num_tokens)
        end = time.thread_time()
        assert charge is not None
        charge.first_token(None)
        charge.release(True)
        decide_us.append((end - start) * 1e6)
        choose_us.append((end - middle) * 1e6)
    placement.check()
    return {
        "replicas": num_replicas,
        "facts": placement.caches.index.stats()["facts"],
        "memory_mb": memory_mb,
        "events_per_cpu_s": num_events / updates_s,
        "decision_p50_us": statistics.median(decide_us),
        "decision_p99_us": quantile(decide_us, 0.99),
        "choose_p50_us": statistics.median(choose_us),
    }


# -- trace -------------------------------------------------------------------------------------------------------


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace of Mooncake. A hash id identifies a block and its prefix, so it is a key; the last may be partial."""
    arrivals = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = np.array(row["hash_ids"][: row["input_length"] // BLOCK_SIZE], dtype=np.uint64)
        keys = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        arrivals.append(Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], keys))
    return arrivals


def agent_arrivals(seconds: float, rate: float, seed: int = 0) -> list[Arrival]:
    """Return the requests of agents: sessions that begin at `rate` per second with one of twenty system prompts, of which a
    few are common, and have 3 to 24 turns. 86 % of the pauses between two turns are about half a second."""
    rng, arrivals, start_s = np.random.default_rng(seed), list[Arrival](), 0.0
    prompts = [rng.integers(1, 2**63, int(rng.integers(4, 16)), np.uint64) for _ in range(20)]
    while (start_s := start_s + rng.exponential(1 / rate)) < seconds:
        at_s, keys, rest = start_s, prompts[int(min(rng.zipf(1.5), 20)) - 1], 0
        for _ in range(int(rng.integers(3, 25))):
            num_blocks, rest = divmod(rest + int(rng.lognormal(6.5, 0.9)), BLOCK_SIZE)
            keys = np.concatenate([keys, rng.integers(1, 2**63, num_blocks, np.uint64)])
            answer = int(rng.integers(30, 400))
            arrivals.append(Arrival(at_s, len(keys) * BLOCK_SIZE + rest, answer, keys))
            rest += answer
            at_s += 0.5 + answer * 0.02 + rng.exponential(0.6 if rng.random() < 0.86 else 8.0)
    return sorted(arrivals, key=lambda arrival: arrival.at_s)


def trace(
    trace: str | None = None,
    replicas: int = 8,
    tokens_per_s: float = 12_000.0,
    cache_tokens: int = 1_000_000,
    interference: float = 0.0,
    agents_per_s: float = 2.0,
) -> dict[str, Any]:
    """Simulate a trace, or half an hour of agents without one. Per replica: prefill speed, cache size, and the slowdown per
    answer in flight."""
    settings = Settings(replicas, tokens_per_s, cache_tokens // BLOCK_SIZE, interference=interference)
    arrivals = read_trace(Path(trace)) if trace else agent_arrivals(1800.0, agents_per_s)
    pooled = pooled_hit(arrivals, settings.num_replicas * settings.num_blocks)
    print(f"{len(arrivals)} requests; a pooled cache would hit {pooled:.3f}")

    def play(name: PolicyName, routers: int, has_events: bool) -> dict[str, Any]:
        simulation = Simulation(settings._replace(num_routers=routers, has_events=has_events), PolicyConfig(name=name))
        simulation.run(arrivals)
        named = name if has_events else f"{name}, no events"
        return {"policy": named, "routers": routers, **simulation.report()}

    ways = [(POLICIES[0], False), *((name, True) for name in POLICIES)]
    rows = [play(name, routers, has_events) for routers in (1, 2) for name, has_events in ways]
    table(rows)
    return {"settings": settings._asdict(), "pooled_hit": pooled, "policies": rows}


if __name__ == "__main__":
    main(__doc__, "placement", decision, scale, trace)

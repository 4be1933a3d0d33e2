"""A trace of requests through the router's placement, under simulated time, against the other policies and a pooled cache.

    python benchmarks/route_sim.py TRACE.jsonl                     # Mooncake's format: timestamp, lengths, hash_ids
    python benchmarks/route_sim.py --scale                         # 8 to 1,000 replicas: memory, churn, decision time

A pooled cache is one of the size of all replicas' caches together, without any delay. Idle means one request at a time.
"""

import argparse
import json
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import pairs
from route_model import BLOCK_SIZE, Arrival, Settings, Simulation, pooled_hit

from penstock.engine.http.kv_stream import Changes
from penstock.router.placement.placement import Placement, ReplicaInfo
from penstock.router.placement.policy import POLICIES, PolicyConfig


def one_by_one(arrivals: list[Arrival], gap_s: float) -> list[Arrival]:
    """An idle fleet: every request long after the one before."""
    return [arrival._replace(at_s=number * gap_s) for number, arrival in enumerate(arrivals)]


def read_trace(path: Path) -> list[Arrival]:
    """Mooncake's traces. A hash id stands for a block and all before it, so it is a key; the last may not be full."""
    arrivals = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        ids = np.array(row["hash_ids"][: row["input_length"] // BLOCK_SIZE], dtype=np.uint64)
        keys = (ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        arrivals.append(Arrival(row["timestamp"] / 1000, row["input_length"], row["output_length"], keys))
    return arrivals


# -- scale -------------------------------------------------------------------------------------------------------


def measure_scale(num_replicas: int, blocks_each: int, num_tokens: int) -> dict[str, float]:
    """A full index, churn at full speed, and decisions in the midst of it. CPU time of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    placement = Placement(PolicyConfig(max_facts=max(2 * num_replicas * blocks_each, 2**16)))
    rng = np.random.default_rng(0)
    held: dict[str, Any] = {}
    for name in (f"r{number}" for number in range(num_replicas)):
        placement.add_replica(name, ReplicaInfo(b"model", 32, blocks_each))
        placement.set_available(name, True)
        held[name] = rng.integers(0, 2**64, blocks_each, dtype=np.uint64)
        placement.apply_snapshot(name, held[name].tobytes())
    memory_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    prompts = [rng.integers(0, 150_000, num_tokens, dtype="<i4").tobytes() for _ in range(20)]
    seqs = dict.fromkeys(held, 0)
    decide_us, choose_us, num_events, churn_s = [], [], 0, 0.0
    for number in range(300):
        batches = []
        for name in rng.choice(list(held), 8, replace=False):
            keys = held[name]
            seqs[name] += 1
            at = rng.integers(0, blocks_each - 64)
            gone, keys[at : at + 64] = keys[at : at + 64].tobytes(), rng.integers(0, 2**64, 64, dtype=np.uint64)
            batches.append((name, Changes(seqs[name], "device", keys[at : at + 64].tobytes(), gone)))
        start = time.thread_time()
        for name, changes in batches:
            placement.apply_events(name, [changes])
        churn_s += time.thread_time() - start
        num_events += 8 * 128
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
    stats = placement.knowledge.index.stats()
    return {
        "replicas": num_replicas,
        "facts": stats.num_facts,
        "memory_mb": memory_mb,
        "bytes_per_fact": memory_mb * 2**20 / stats.num_facts,
        "events_per_cpu_s": num_events / churn_s,
        "decision_p50_us": statistics.median(decide_us),
        "decision_p99_us": sorted(decide_us)[int(len(decide_us) * 0.99)],
        "choose_p50_us": statistics.median(choose_us),
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    print("".join(f"{name:>18}" for name in rows[0]))
    for row in rows:
        cells = (f"{value:,.3f}" if isinstance(value, float) else str(value) for value in row.values())
        print("".join(f"{cell:>18}" for cell in cells))


def play(args: argparse.Namespace) -> None:
    settings = Settings(
        args.replicas, args.tokens_per_s, args.cache_tokens // BLOCK_SIZE, interference=args.interference
    )
    arrivals = read_trace(args.trace)
    oracle = pooled_hit(arrivals, settings.num_replicas * settings.num_blocks)
    print(f"{len(arrivals)} requests; a pooled cache would hit {oracle:.3f}")
    rows = [play_one(settings, name, arrivals, oracle) for name in POLICIES]
    idle = play_one(settings, "predicted-ttft", one_by_one(arrivals, args.idle_gap_s), oracle)
    print_table([*rows, {**idle, "policy": "the first, idle"}])
    loaded = {row["policy"]: row for row in rows}
    ratio = loaded["predicted-ttft"]["ttft_p95_s"] / loaded["round-robin"]["ttft_p95_s"]
    print(f"p95 of time to first token against round robin: {ratio:.3f}x (floor: at most 0.55)")
    print(f"hits, of the pooled cache's: {loaded['predicted-ttft']['of_pooled']:.3f} (floor 0.85)", end="")
    print(f", one request at a time {idle['of_pooled']:.3f} (floor 0.97)")
    figures = {"pooled_hit": oracle, "p95_ratio": ratio, "policies": rows, "idle": idle}
    pairs.record("route_sim", {"settings": settings._asdict(), **figures})


def play_one(settings: Settings, policy: Any, arrivals: list[Arrival], oracle: float) -> dict[str, Any]:
    simulation = Simulation(settings, PolicyConfig(name=policy))
    simulation.run(arrivals)
    figures = simulation.report()
    return {"policy": policy, **figures, "of_pooled": figures["hit"] / oracle}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=12_000, help="prefill speed of a replica")
    parser.add_argument("--cache-tokens", type=int, default=1_000_000, help="KV cache of a replica")
    parser.add_argument(
        "--interference", type=float, default=0.0, help="of its speed, what each answer under way costs"
    )
    parser.add_argument("--idle-gap-s", type=float, default=6.0, help="between the requests of the idle run")
    parser.add_argument("--scale", action="store_true", help="measure 8 to 1,000 replicas instead of playing a trace")
    parser.add_argument("--blocks-each", type=int, default=8_192, help="with --scale: blocks that each replica holds")
    args = parser.parse_args()
    if args.scale:
        rows = [measure_scale(count, args.blocks_each, 39_000) for count in (8, 64, 250, 1000)]
        print_table(rows)
        pairs.record("route_scale", {"blocks_each": args.blocks_each, "num_tokens": 39_000, "rows": rows})
    elif args.trace:
        play(args)
    else:
        print("route_sim: no trace was given; its path is the argument (Mooncake's conversation_trace.jsonl)")


if __name__ == "__main__":
    main()

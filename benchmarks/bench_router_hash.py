"""What a routing decision costs: keys of a long prompt, the match, and the whole way to a charged replica.

Wall time and this thread's CPU time stand side by side: on a machine with neighbours the first also counts the times when
somebody else had the core. Prints a table and one line of JSON.

    python benchmarks/bench_router_hash.py [--tokens 39000] [--replicas 8] [--rounds 1000]
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pairs

from penstock.cache.keys import block_keys_v1
from penstock.router.placement.hasher import route_keys
from penstock.router.placement.placement import Placement, ReplicaInfo
from penstock.router.placement.policy import PolicyConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.slow_hash import v1_chain

BLOCKS_EACH = 65_536


def measure(call: Callable[..., Any], rounds: int, given: Iterable[tuple[Any, ...]] = repeat(())) -> dict[str, float]:
    """Microseconds of one call, without what it takes to make the arguments that it is given."""
    wall, cpu = [], []
    for arguments in islice(given, rounds):
        cpu_start, start = time.thread_time_ns(), time.perf_counter_ns()
        call(*arguments)
        wall.append((time.perf_counter_ns() - start) / 1000)
        cpu.append((time.thread_time_ns() - cpu_start) / 1000)
    wall.sort()
    cpu.sort()
    at_99 = int(rounds * 0.99)
    return {"p50": wall[rounds // 2], "p99": wall[at_99], "cpu_p50": cpu[rounds // 2], "cpu_p99": cpu[at_99]}


def full_placement(num_replicas: int, block_size: int) -> Placement:
    """Every replica holds as many other blocks as a real one."""
    placement = Placement(PolicyConfig())
    rng = np.random.default_rng(0)
    for name in (f"r{number}" for number in range(num_replicas)):
        placement.add_replica(name, ReplicaInfo(b"model", block_size, BLOCKS_EACH))
        placement.set_available(name, True)
        placement.apply_snapshot(name, rng.integers(0, 2**64, BLOCKS_EACH - 2**13, dtype=np.uint64).tobytes())
    return placement


def decisions(placement: Placement, tokens: bytes, block_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """The replicas hold the prompt to different depths, one of them all of it."""
    num_tokens = len(tokens) // 4
    keys = placement.prepare(tokens).matches[0][1].keys
    for number, replica in enumerate(placement.view()):
        placement.apply_snapshot(replica, keys[: len(keys) * (number + 1) // len(placement.view())].tobytes())

    def place(prepared: Any) -> None:
        charge = placement.choose(prepared, num_tokens=num_tokens)
        assert charge is not None
        charge.release(True)

    prompt = placement.prepare(tokens)
    fresh = np.random.default_rng(1).integers(0, 150_000, (rounds, 8), dtype="<i4")
    unseen = ((row.tobytes() + tokens[32:],) for row in fresh)
    return {
        f"match of {len(keys):,} keys": measure(lambda: placement.knowledge.index.match(keys), 10 * rounds),
        f"keys and match in one call, block {block_size}": measure(lambda: placement.prepare(tokens), rounds),
        f"choose and charge, block {block_size}": measure(lambda: place(prompt), rounds),
        f"whole decision, block {block_size}, known prompt": measure(lambda: place(placement.prepare(tokens)), rounds),
        f"whole decision, block {block_size}, new prompt": measure(
            lambda tokens: place(placement.prepare(tokens)), rounds, unseen
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=39_000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1000)
    args = parser.parse_args()
    ids = np.random.default_rng(0).integers(0, 150_000, args.tokens, dtype="<i4")
    tokens, as_list, root = ids.tobytes(), ids.tolist(), bytes(32)
    figures: dict[str, dict[str, float]] = {
        "v1 keys, block 32": measure(lambda: block_keys_v1(tokens, 32), args.rounds),
        "v1 keys, block 32, pure Python": measure(lambda: v1_chain(as_list, 32), 10),
        "SHA-256 keys, block 32": measure(lambda: route_keys(tokens, 32, root=root), args.rounds),
        "SHA-256 keys, block 16": measure(lambda: route_keys(tokens, 16, root=root), args.rounds),
    }
    for block_size in (32, 16):
        placement = full_placement(args.replicas, block_size)
        figures |= decisions(placement, tokens, block_size, args.rounds)
    times = pairs.alternate(
        lambda: measure(lambda: block_keys_v1(tokens, 32), 20)["cpu_p50"],
        lambda: measure(lambda: v1_chain(as_list, 32), 1)["cpu_p50"],
        10,
    )
    faster = pairs.judge(times, higher_is_better=False)
    print(f"{'µs':<48}{'p50':>12}{'p99':>12}{'CPU p50':>12}{'CPU p99':>12}")
    for name, row in figures.items():
        print(f"{name:<48}" + "".join(f"{value:>12,.1f}" for value in row.values()))
    print(f"v1 in C against the pure-Python loop: {faster} (floor 250)")
    ratio = {"median": faster.ratio, "least": faster.least, "most": faster.most}
    pairs.record("router_hash", {"tokens": args.tokens, "replicas": args.replicas, "us": figures, "v1_speedup": ratio})


if __name__ == "__main__":
    main()

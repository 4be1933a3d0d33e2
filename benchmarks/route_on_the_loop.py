"""The published failure, again: keys computed in Python on the event loop that also relays everything else.

128 clients send prompts of 39,000 tokens, one after the other, over one event loop; replicas answer from a model (so many
tokens of prefill per second), so the router's CPU is the only thing that differs. `python` computes v1 keys in a Python
loop on the event loop; `c` calls Placement.prepare in a thread, as the router does. Prints requests per second and the time
to the first token for both, by turns.

    python benchmarks/route_on_the_loop.py [--clients 128] [--seconds 10] [--pairs 3]
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pairs
import uvloop

from penstock.cache.keys import block_keys_v1
from penstock.engine.http.kv_stream import Changes
from penstock.router.placement.hasher import KeySpace
from penstock.router.placement.placement import Placement, Prompt, ReplicaInfo
from penstock.router.placement.policy import PolicyConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.slow_hash import v1_chain

NUM_REPLICAS = 8
BLOCK_SIZE = 32
SPACE = KeySpace("v1", b"model", BLOCK_SIZE)
INFO = ReplicaInfo(b"model", BLOCK_SIZE, 65_536, hash="v1")


class Backend:
    """A replica that prefills one prompt after the other; a conversation that it knows is cached but for its end."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.known: set[int] = set()
        self._busy_until_s = 0.0

    async def first_token(self, conversation: int, num_tokens: int, num_new: int) -> int:
        cached = num_tokens - num_new if conversation in self.known else 0
        self.known.add(conversation)
        now_s = time.monotonic()
        self._busy_until_s = max(now_s, self._busy_until_s) + (num_tokens - cached) / self.tokens_per_s
        await asyncio.sleep(self._busy_until_s - now_s)
        return cached


async def drive(kind: str, args: argparse.Namespace) -> dict[str, float]:
    """Every client has a conversation of its own: the prompt is known but for its last tokens."""
    loop = asyncio.get_running_loop()
    placement = Placement(PolicyConfig())
    backends = {f"r{number}": Backend(args.tokens_per_s) for number in range(NUM_REPLICAS)}
    for name in backends:
        placement.add_replica(name, INFO)
        placement.set_available(name, True)
        placement.apply_snapshot(name, b"")
    prompts = [
        np.random.default_rng(number).integers(0, 150_000, args.tokens, dtype="<i4") for number in range(args.clients)
    ]
    for number, prompt in enumerate(prompts):  # each conversation lies at one replica when the measurement begins
        name = f"r{number % NUM_REPLICAS}"
        backends[name].known.add(number)
        keys = block_keys_v1(prompt[: -args.new_tokens], BLOCK_SIZE)[:-1]
        placement.apply_events(name, [Changes(number // NUM_REPLICAS + 1, "device", keys.tobytes(), b"")])
    ttft: list[float] = []
    with ThreadPoolExecutor(2) as threads:

        async def in_c(tokens: bytes) -> Prompt:
            return await loop.run_in_executor(threads, placement.prepare, tokens)

        async def in_python(tokens: bytes) -> Prompt:
            keys = np.array(v1_chain(np.frombuffer(tokens, "<i4").tolist(), BLOCK_SIZE), dtype=np.uint64)
            return Prompt(len(tokens) // 4, ((SPACE, placement.knowledge.index.match(keys)),))

        prepare: Callable[[bytes], Awaitable[Prompt]] = in_c if kind == "c" else in_python
        end_s = time.monotonic() + args.seconds
        await asyncio.gather(
            *(_client(n, prompt, args, placement, backends, prepare, ttft, end_s) for n, prompt in enumerate(prompts))
        )
    ttft.sort()
    return {
        "requests_per_s": len(ttft) / args.seconds,
        "ttft_p50_s": statistics.median(ttft),
        "ttft_p95_s": ttft[int(0.95 * len(ttft))],
    }


async def _client(
    number: int,
    tokens: npt.NDArray[np.int32],
    args: argparse.Namespace,
    placement: Placement,
    backends: dict[str, Backend],
    prepare: Callable[[bytes], Awaitable[Prompt]],
    ttft: list[float],
    end_s: float,
) -> None:
    while time.monotonic() < end_s:
        start_s = time.monotonic()
        tokens[-args.new_tokens :] = np.random.default_rng().integers(0, 150_000, args.new_tokens, dtype="<i4")
        charge = placement.choose(await prepare(tokens.tobytes()), num_tokens=args.tokens)
        assert charge is not None
        charge.first_token(await backends[charge.replica].first_token(number, args.tokens, args.new_tokens))
        ttft.append(time.monotonic() - start_s)
        charge.release(True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=39_000)
    parser.add_argument("--new-tokens", type=int, default=1000, help="of each prompt, what no replica has seen")
    parser.add_argument("--tokens-per-s", type=float, default=10_000, help="prefill speed of a replica")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {"python": [], "c": []}

    def run(kind: str) -> float:
        runs[kind].append(uvloop.run(drive(kind, args)))
        return runs[kind][-1]["ttft_p95_s"]

    better = pairs.judge(pairs.alternate(lambda: run("c"), lambda: run("python"), args.pairs), higher_is_better=False)
    figures: dict[str, Any] = {}
    print(f"{'keys':<10}{'requests/s':>14}{'TTFT p50, s':>14}{'TTFT p95, s':>14}")
    for kind, reports in runs.items():
        figures[kind] = {name: statistics.median(report[name] for report in reports) for name in reports[0]}
        print(f"{kind:<10}" + "".join(f"{value:>14.3f}" for value in figures[kind].values()))
    print(f"TTFT p95, Python over C: {better}")
    pairs.record("route_on_the_loop", {"clients": args.clients, "tokens": args.tokens, **figures})


if __name__ == "__main__":
    main()

"""Long prompts beside running answers: one pool of two replicas, against one that computes prompts for the other.

The same two replicas serve both, by turns: real servers with a model's pace and no model (tests/support/mock_replica.py),
whose steps take 10 ms and 0.05 ms for each token of a prompt, at most 2,048 in a step. 16 answers stream all the time;
a prompt of 6,000 tokens that nobody has seen comes every 500 ms. The figure is the p99 of the time between two tokens of
the 16. Blocks really move between the replicas, but they are small: what a large model's would take is not in it.

    python benchmarks/route_split.py [--pairs 6] [--seconds 6]
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import uvloop
from bench_route import process, wait_ready
from pairs import alternate, judge, record

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.peer_rig import free_addresses
from tests.support.router_fleet import mock_replicas

SETTLE_S = 1.0  # for the answers to be under way


class Load(NamedTuple):
    streams: int
    prompt_tokens: int
    every_s: float
    seconds: float


class Seen(NamedTuple):
    """Sorted, in ms."""

    gaps: list[float]
    first_tokens: list[float]


@contextlib.asynccontextmanager
async def asked(port: int, num_tokens: int, max_tokens: int, rng: random.Random) -> AsyncIterator[asyncio.StreamReader]:
    """The rest of an answer, once it has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(256) for _ in range(num_tokens)]
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    try:
        first = await reader.read(65536)
        assert first.startswith(b"HTTP/1.1 200"), first
        yield reader
    finally:
        writer.transport.abort()


async def measure(port: int, load: Load, rng: random.Random) -> Seen:
    gaps: list[float] = []
    first_tokens: list[float] = []
    begin_s = time.perf_counter() + SETTLE_S
    end_s = begin_s + load.seconds

    async def stream() -> None:
        async with asked(port, 64, 10_000, rng) as reader:
            last_s = time.perf_counter()
            while last_s < end_s:
                assert await reader.read(65536), "an answer ended too early"
                now_s = time.perf_counter()
                if last_s > begin_s:
                    gaps.append(1000 * (now_s - last_s))
                last_s = now_s

    async def long_prompt() -> None:
        asked_s = time.perf_counter()
        async with asked(port, load.prompt_tokens, 16, rng) as reader:
            first_tokens.append(1000 * (time.perf_counter() - asked_s))
            await reader.read()

    async def prompts() -> None:
        await asyncio.sleep(SETTLE_S)
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() < end_s:
                group.create_task(long_prompt())
                await asyncio.sleep(load.every_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.streams):
            group.create_task(stream())
        group.create_task(prompts())
    return Seen(sorted(gaps), sorted(first_tokens))


def at(values: list[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--every", type=float, default=0.5, metavar="S", help="a long prompt")
    parser.add_argument("--seconds", type=float, default=6.0, help="of one measurement")
    parser.add_argument("--prefill-threshold", type=int, default=512)
    args = parser.parse_args()
    load = Load(args.streams, args.prompt_tokens, args.every, args.seconds)
    (address,) = free_addresses(1)
    pace = {"prefill_tps": 20_000, "inter_token_s": 0.01, "kv_host_bytes": 1 << 24, "max_model_len": 131_072}
    rng = random.Random(0)
    with contextlib.ExitStack() as stack:
        (first,) = stack.enter_context(mock_replicas(1, kv_peer_listen=address, **pace))
        (second,) = stack.enter_context(mock_replicas(1, kv_peer=address, **pace))
        route = (sys.executable, "-m", "penstock.cli", "route", "--port", "0")
        threshold = str(args.prefill_threshold)
        roles = ("--prefill", f"{first.url}={address}", "--decode", second.url, "--prefill-threshold", threshold)
        split, _ = stack.enter_context(process(*route, *roles))
        pool, _ = stack.enter_context(process(*route, "--backend", first.url, "--backend", second.url))
        seen: dict[int, list[Seen]] = {split: [], pool: []}

        def p99(port: int) -> float:
            seen[port].append(uvloop.run(measure(port, load, rng)))
            return at(seen[port][-1].gaps, 0.99)

        for port in seen:
            wait_ready(port)
            uvloop.run(measure(port, load._replace(seconds=1.0), rng))  # connections, learned speeds
        verdict = judge(alternate(lambda: p99(split), lambda: p99(pool), args.pairs), higher_is_better=False)
        moved = second.metric('penstock:kv_tier_hit_tokens_total{model_name="mock",tier="peer"}')
    figures: dict[str, dict[str, float]] = {}
    for name, port in (("split", split), ("pool", pool)):
        gaps = sorted(gap for one in seen[port] for gap in one.gaps)
        first_tokens = sorted(each for one in seen[port] for each in one.first_tokens)
        figures[name] = {"gap_p50_ms": at(gaps, 0.5), "gap_p99_ms": at(gaps, 0.99), "gap_max_ms": gaps[-1]}
        figures[name] |= {"ttft_p50_ms": at(first_tokens, 0.5), "ttft_p99_ms": at(first_tokens, 0.99)}
        figures[name] = {what: round(value, 1) for what, value in figures[name].items()}
        print(f"{name}: {figures[name]}")
    print(f"p99 between tokens, pool over split: {verdict}; {moved:,.0f} tokens came from the other replica")
    record("route_split", {**figures, "ratio": verdict._asdict()})


if __name__ == "__main__":
    main()

"""What the router costs, and what it is good for, as real processes on real sockets.

    python benchmarks/bench_route.py cost --peer-python PATH   requests and chunks per second of its CPU beside an aiohttp
                                           proxy (an environment with aiohttp and uvloop), and the latency it adds
    python benchmarks/bench_route.py hash  [--tokens 39000] [--clients 128] [--requests 256]
    python benchmarks/bench_route.py failover  [--replicas 8] [--pairs 5]
    python benchmarks/bench_route.py split  [--seconds 6] [--prompt-tokens 6000] [--every 0.5]

`cost`: a figure is divided by the CPU seconds of the proxy's own process, so it is per core whatever else runs. The router
runs as its users run it; the aiohttp proxy only passes on. Latency is that of clients at half of the router's throughput,
through it and straight to the backend in turn. `hash`: the published failure, rebuilt: prompts of 39,000 tokens as
ids, replicas that answer at once, and a router that computes keys in a Python loop on its event loop before each decision,
beside the same router with the keys in C. `failover`: a replica of eight is killed under 64 clients; a request fails when
its answer is not 200. `split`: 16 answers stream, a prompt of 6,000 tokens that no replica has seen comes every 500 ms;
one pool of two replicas beside one that computes prompts for the other. Replicas of the last two are real servers with a
model's pace and no model (tests/support/mock_replica.py); their blocks really move, but are small.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import uvloop
from pairs import Pair, alternate, arguments, compare, quantile, record, rounded, serving, summary, wait_ready
from route_load import ANSWER, Load, ask, load, request
from tests.support.peer_rig import free_addresses
from tests.support.router_fleet import MockReplica, mock_replicas
from tests.support.slow_hash import v1_chain

LOADS = f"{sys.path[0]}/route_load.py"
ROUTE = (sys.executable, "-m", "penstock.cli", "route", "--port", "0", "--max-requests", "4096")
EVENTS = 200  # of a stream
SMALL = request(b'{"model":"m","max_tokens":16,"temperature":0,"prompt":"' + b"word " * 190 + b'"}')
STREAM = request(b'{"model":"m","stream":true,"num_events":%d,"prompt":"word"}' % EVENTS)
SETTLE_S = 1.0  # until the answers of `split` stream


# -- cost --------------------------------------------------------------------------------------------------------


def cost(args: argparse.Namespace) -> dict[str, Any]:
    def loaded(port: int, pid: int, what: bytes, end: bytes, rate: float | None = None) -> Load:
        return uvloop.run(load(port, pid, what, end, connections=32, seconds=args.seconds, rate=rate))

    def per_cpu_second(proxy: tuple[int, int], streams: bool) -> float:
        found = loaded(*proxy, *((STREAM, b"0\r\n\r\n") if streams else (SMALL, ANSWER[-16:])))
        return len(found.times_s) * (EVENTS if streams else 1) / found.cpu_s

    figures: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        backend, _ = stack.enter_context(serving(sys.executable, LOADS, "backend"))
        router = stack.enter_context(serving(*ROUTE, "--backend", f"http://127.0.0.1:{backend}"))
        wait_ready(router[0])
        peer = None
        if args.peer_python:
            peer = stack.enter_context(serving(args.peer_python, LOADS, "aiohttp", str(backend)))
        for what, streams in (("requests", False), ("chunks", True)):
            per_cpu_second(router, streams)
            if peer is None:
                alone = statistics.median(per_cpu_second(router, streams) for _ in range(args.pairs))
                print(f"{what}: router {alone:,.0f} per CPU second (no --peer-python: nothing beside it)")
                figures[what] = {"router": round(alone)}
                continue
            per_cpu_second(peer, streams)
            figures[what] = compare(
                what,
                lambda streams=streams: per_cpu_second(router, streams),
                lambda streams=streams: per_cpu_second(peer, streams),
                args.pairs,
                "per CPU second",
                higher_is_better=True,
                sides=("router", "aiohttp"),
            )
        flat_out = loaded(*router, SMALL, ANSWER[-16:])
        rate = len(flat_out.times_s) / flat_out.seconds / 2
        added: dict[float, list[float]] = {0.5: [], 0.99: []}
        for _ in range(args.pairs):
            through, straight = (
                loaded(port, router[1], SMALL, ANSWER[-16:], rate).times_s for port in (router[0], backend)
            )
            for share, values in added.items():
                values.append(1000 * (quantile(through, share) - quantile(straight, share)))
    latency = {f"added_p{100 * share:.0f}_ms": rounded(statistics.median(values)) for share, values in added.items()}
    print(f"added at {rate:,.0f} requests/s: {latency}")
    return figures | {"latency": latency | {"requests_per_s": round(rate)}}


# -- hash --------------------------------------------------------------------------------------------------------


def run_router(backend: int) -> None:
    """The router with the Python loop run first and on the event loop, as a published one did before each decision."""
    from penstock.router.config import RouterConfig, resolve
    from penstock.router.placement.placement import Placement
    from penstock.router.placement.prompts import Texts
    from penstock.router.serve import bind_socket, serve

    prepare = Placement.prepare

    def slowly(self: Placement, tokens: Any, salt: str | None = None, adapter: str | None = None) -> Any:
        v1_chain(memoryview(tokens).cast("i").tolist(), 32)
        return prepare(self, tokens, salt, adapter)

    Placement.prepare = slowly  # type: ignore[method-assign]
    Texts.is_long = lambda self, path, body: False  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = resolve(RouterConfig(backends=(f"http://127.0.0.1:{backend}",), port=0, max_requests=4096), {})
    uvloop.run(serve(config, bind_socket(config.host, 0), announce=True))


async def first_bytes(port: int, contents: list[bytes], clients: int) -> tuple[list[float], float]:
    """Seconds to the first byte of each request, and of the whole run."""
    times: list[float] = []
    waiting = list(contents)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while waiting:
            status, first_s, body = await ask(reader, writer, waiting.pop())
            assert status == 200, body
            times.append(first_s)
        writer.close()

    begun_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return times, time.perf_counter() - begun_s


def hashed(args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1)
    contents = []
    for _ in range(args.requests):
        body = {"model": "m", "prompt": rng.choices(range(50_000), k=args.tokens), "max_tokens": 1}
        contents.append(request(json.dumps(body, separators=(",", ":")).encode()))
    p95: dict[str, list[float]] = {"C": [], "Python": []}
    with contextlib.ExitStack() as stack:
        backend, _ = stack.enter_context(serving(sys.executable, LOADS, "backend"))
        fast, _ = stack.enter_context(serving(*ROUTE, "--backend", f"http://127.0.0.1:{backend}"))
        slow, _ = stack.enter_context(serving(sys.executable, __file__, "hash", "--backend", str(backend)))
        ports = {"C": fast, "Python": slow}

        def rate(hasher: str) -> float:
            times, seconds = uvloop.run(first_bytes(ports[hasher], contents, args.clients))
            p95[hasher].append(quantile(times, 0.95))
            return len(times) / seconds

        for port in ports.values():
            wait_ready(port)
        pairs = alternate(lambda: rate("C"), lambda: rate("Python"), args.pairs)
    sides = {"higher_is_better": True, "sides": ("C", "Python")}
    requests = summary("requests", pairs, "per second", **sides)  # type: ignore[arg-type]
    seconds = [Pair(*pair) for pair in zip(p95["C"], p95["Python"], strict=True)]
    return {"requests": requests, "first_byte_p95": summary("first byte p95", seconds, "s", sides=("C", "Python"))}


# -- failover ----------------------------------------------------------------------------------------------------


async def out_of_rotation(port: int, victim: MockReplica) -> float:
    """Kill it; the seconds until the router lists it as not available."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    victim.send(signal.SIGKILL)
    killed_s = time.perf_counter()
    while True:
        _, _, body = await ask(reader, writer, b"GET /replicas HTTP/1.1\r\nhost: x\r\n\r\n")
        if not next(each for each in json.loads(body)["replicas"] if each["url"] == victim.url)["is_available"]:
            writer.close()
            return time.perf_counter() - killed_s
        await asyncio.sleep(0.002)


async def one_kill(port: int, victim: MockReplica, clients: int, seconds: float) -> tuple[Counter[int], float]:
    statuses = Counter[int]()
    end_s = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = 0
        while time.perf_counter() < end_s:
            turn += 1
            body = b'{"prompt":"client %d asks for the %d. time","max_tokens":4}' % (number, turn)
            status, _, _ = await ask(reader, writer, request(body))
            statuses[status] += 1
        writer.close()

    asking = asyncio.gather(*(client(number) for number in range(clients)))
    await asyncio.sleep(seconds / 2)
    took_s = await out_of_rotation(port, victim)
    await asking
    return statuses, took_s


def failover(args: argparse.Namespace) -> dict[str, Any]:
    statuses, times_ms = Counter[int](), []
    for number in range(args.pairs):
        with contextlib.ExitStack() as stack:
            replicas = stack.enter_context(mock_replicas(args.replicas, prefill_tps=2000, inter_token_s=0.02))
            backends = [word for replica in replicas for word in ("--backend", replica.url)]
            port, _ = stack.enter_context(serving(*ROUTE, *backends))
            wait_ready(port)
            seen, took_s = uvloop.run(one_kill(port, replicas[number % len(replicas)], 64, args.seconds))
            statuses += seen
            times_ms.append(1000 * took_s)
    failed = statuses.total() - statuses[200]
    median, worst = statistics.median(times_ms), max(times_ms)
    print(f"{failed} of {statuses.total():,} requests failed in {args.pairs} kills of 1 of {args.replicas} replicas")
    print(f"out of rotation after {median:.1f} ms (median), {worst:.1f} ms (worst)")
    times = {"median": median, "worst": worst}
    return {"requests": statuses.total(), "failed": failed, "kills": args.pairs, "out_of_rotation_ms": times}


# -- split -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def asked(port: int, num_tokens: int, max_tokens: int, rng: random.Random) -> AsyncIterator[asyncio.StreamReader]:
    """The rest of an answer, once it has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    prompt = [rng.randrange(256) for _ in range(num_tokens)]
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    writer.write(request(body).replace(b"accept: */*", b"connection: close"))
    try:
        first = await reader.read(65536)
        assert first.startswith(b"HTTP/1.1 200"), first
        yield reader
    finally:
        writer.transport.abort()


async def gaps_and_first_tokens(
    port: int, args: argparse.Namespace, seconds: float, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Milliseconds between two tokens of the streams, and to the first tokens of the long prompts."""
    gaps: list[float] = []
    first_tokens: list[float] = []
    begin_s = time.perf_counter() + SETTLE_S
    end_s = begin_s + seconds

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
        async with asked(port, args.prompt_tokens, 16, rng) as reader:
            first_tokens.append(1000 * (time.perf_counter() - asked_s))
            await reader.read()

    async def prompts() -> None:
        await asyncio.sleep(SETTLE_S)
        async with asyncio.TaskGroup() as group:
            while time.perf_counter() < end_s:
                group.create_task(long_prompt())
                await asyncio.sleep(args.every)

    async with asyncio.TaskGroup() as group:
        for _ in range(16):
            group.create_task(stream())
        group.create_task(prompts())
    return gaps, first_tokens


def split(args: argparse.Namespace) -> dict[str, Any]:
    (address,) = free_addresses(1)
    pace = {"prefill_tps": 20_000, "inter_token_s": 0.01, "kv_host_bytes": 1 << 24, "max_model_len": 131_072}
    rng = random.Random(0)
    seen: dict[str, tuple[list[float], list[float]]] = {"split": ([], []), "pool": ([], [])}
    with contextlib.ExitStack() as stack:
        (first,) = stack.enter_context(mock_replicas(1, kv_peer_listen=address, **pace))
        (second,) = stack.enter_context(mock_replicas(1, kv_peer=address, **pace))
        roles = ("--prefill", f"{first.url}={address}", "--decode", second.url)
        roles += ("--prefill-threshold", str(args.prefill_threshold))
        both = ("--backend", first.url, "--backend", second.url)
        ports = {
            name: stack.enter_context(serving(*ROUTE, *given))[0] for name, given in (("split", roles), ("pool", both))
        }

        def p99(name: str) -> float:
            gaps, first_tokens = uvloop.run(gaps_and_first_tokens(ports[name], args, args.seconds, rng))
            seen[name][0].extend(gaps)
            seen[name][1].extend(first_tokens)
            return quantile(gaps, 0.99)

        for port in ports.values():
            wait_ready(port)
            uvloop.run(gaps_and_first_tokens(port, args, 1.0, rng))  # connections, learned speeds
        found = compare(
            "p99 between tokens",
            lambda: p99("split"),
            lambda: p99("pool"),
            args.pairs,
            "ms",
            sides=("split", "pool"),
        )
        moved = second.metric('penstock:kv_tier_hit_tokens_total{model_name="mock",tier="peer"}')
    figures: dict[str, Any] = {"gap_p99_ms": found, "tokens_moved": moved}
    for name, (gaps, first_tokens) in seen.items():
        figures[name] = {f"gap_{part}_ms": quantile(gaps, at) for part, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
        figures[name] |= {f"ttft_{part}_ms": quantile(first_tokens, at) for part, at in (("p50", 0.5), ("p99", 0.99))}
        figures[name] = {what: round(value, 1) for what, value in figures[name].items()}
        print(f"{name}: {figures[name]}")
    print(f"{moved:,.0f} tokens came from the other replica")
    return figures


MODES = {"cost": cost, "hash": hashed, "failover": failover, "split": split}


def main() -> None:
    options = {"peer_python": None, "pairs": 5, "seconds": 4.0, "backend": 0, "replicas": 8, "prefill_threshold": 512}
    options |= {"tokens": 39_000, "clients": 128, "requests": 256, "prompt_tokens": 6000, "every": 0.5}
    args = arguments(__doc__, *MODES, **options)
    if args.backend:  # the slow router of `hash`, in its own process
        run_router(args.backend)
    else:
        record(f"route-{args.mode}", MODES[args.mode](args))


if __name__ == "__main__":
    main()

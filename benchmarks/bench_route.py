"""Measures the router's cost and benefit, with real processes on real sockets.

    python benchmarks/bench_route.py cost --peer-python PATH   requests and chunks per second of its CPU beside an aiohttp
                                           proxy (an environment with aiohttp and uvloop), and the latency it adds
    python benchmarks/bench_route.py gateways --programs DIR [--nginx PATH]   the same beside others' gateways
    python benchmarks/bench_route.py split  [--seconds 6] [--prompt-tokens 6000] [--every 0.5]

`cost`: figures are per CPU second of the proxy's process, so they are per core whatever else runs. The router has
default options; the aiohttp proxy only forwards. Latency is that of clients at half of the router's throughput, through
it and directly to the backend in turn. `gateways`: two backends, prompts with different beginnings, and our router with
its default policy without a tokenizer, because the others work on text; DIR as in benchmarks/gateways.py. `split`: 16
answers stream while a new prompt of 6,000 tokens arrives every 500 ms; two equal replicas are compared with one that
prefills for the other. They are real servers with a model's pace and no model (tests/support/mock_replica.py); they
transfer real but small blocks.
"""

import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvloop
from gateways import ROUTE, Worker, gateway
from pairs import (
    Server,
    answers,
    compare,
    environment,
    free_port,
    is_ready,
    main,
    quantile,
    rounded,
    rounds,
    serving,
    summary,
)
from tests.support.router_fleet import mock_replicas

from penstock.engine.commands.bench.serving import EncodedCall, drive
from penstock.prove.http_client import Client, Target

LOADS = f"{sys.path[0]}/route_load.py"
BACKEND = (sys.executable, LOADS, "backend", "{port}")
EVENTS = 200  # events per stream
PEER_POLICIES = ("cache_aware", "round_robin")
SETTLE_S = 1.0  # time until the answers of `split` stream
STREAMS, TOKEN_S = 16, 0.01  # streams of `split`, and their seconds per token


async def ask(client: Client, fields: dict[str, Any]) -> float:
    """Send a request that need not be streamed, and ignore the content of its answer; return the seconds that it took."""
    started_s = time.perf_counter()
    status = await client.exchange(content_of(client, fields), lambda _status, _data, _now_s: None)
    assert status == 200, f"{client.target.host}:{client.target.port} answered {status}"
    return time.perf_counter() - started_s


def content_of(client: Client, fields: dict[str, Any]) -> bytes:
    return client.target.request("POST", "/v1/completions", json.dumps(fields, separators=(",", ":")).encode(), {})


@contextlib.contextmanager
def client_of(url: str) -> Iterator[Client]:
    client = Client(Target.of(url))
    yield client
    client.close()


async def repeat(url: str, connections: int, seconds: float, next_call: Callable[[], dict[str, Any]]) -> int:
    """Send requests one after another on each connection; return how many were answered."""
    end_s = time.perf_counter() + seconds
    with client_of(url) as client:

        async def one() -> int:
            count = 0
            while time.perf_counter() < end_s:
                await ask(client, next_call())
                count += 1
            return count

        return sum(await asyncio.gather(*(one() for _ in range(connections))))


# -- cost --------------------------------------------------------------------------------------------------------

SMALL = {"model": "m", "max_tokens": 16, "temperature": 0, "prompt": "word " * 190}
STREAM = {"model": "m", "stream": True, "num_events": EVENTS, "prompt": "word"}
PROMPTS = 500  # prompts with different beginnings, for gateways that examine them


async def paced(url: str, rate: float, seconds: float) -> list[float]:
    """Return the milliseconds of requests sent at even intervals. It spins, because an event loop's timers have a
    resolution of a millisecond and would send bursts."""
    with client_of(url) as client:
        due_s = time.perf_counter()
        end_s, tasks = due_s + seconds, []
        while (now_s := time.perf_counter()) < end_s:
            while due_s <= now_s:
                tasks.append(asyncio.create_task(ask(client, SMALL)))
                due_s += 1 / rate
            await asyncio.sleep(0)
        return [1000 * await task for task in tasks]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds used by all threads of the process, from its CPU-time clock. The ticks of 10 ms in /proc
    are too coarse for a fast machine, where a round of chunks takes ten of them."""
    return time.clock_gettime(~pid << 3 | 2)


def per_cpu_second(proxy: Server, streams: bool, seconds: float, prompts: int = 1) -> float:
    """Return requests or stream chunks per CPU second of the proxy, with `prompts` different beginnings."""
    begun_s, turns = cpu_s(proxy.process.pid), itertools.count()
    fields, times = (STREAM, 1) if streams else (SMALL, 190)
    calls = [fields | {"prompt": f"{number} " * (prompts > 1) + "word " * times} for number in range(prompts)]
    count = uvloop.run(repeat(proxy.url, 32, seconds, lambda: calls[next(turns) % prompts]))
    return count * (EVENTS if streams else 1) / (cpu_s(proxy.process.pid) - begun_s)


def beside(proxies: dict[str, Server], pairs: int, seconds: float, prompts: int = 1) -> dict[str, Any]:
    """Compare the first proxy with each other one."""
    figures: dict[str, Any] = {}
    first, *others = proxies
    for what, streams in (("requests", False), ("chunks", True)):
        sides = {name: partial(per_cpu_second, each, streams, seconds, prompts) for name, each in proxies.items()}
        rounds(sides, 1)
        found = rounds(sides, pairs)
        figures[what] = {
            name: summary(what, {first: found[first], name: found[name]}, "per CPU second") for name in others
        }
    return figures


def cost(peer_python: str | None = None, pairs: int = 5, seconds: float = 4.0) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(serving("backend", BACKEND, answers))
        router = stack.enter_context(serving("router", (*ROUTE, "--backend", backend.url), is_ready, env=environment()))
        proxies = {"router": router}
        if peer_python:
            command = (peer_python, LOADS, "aiohttp", "{port}", backend.url)
            proxies["aiohttp"] = stack.enter_context(serving("aiohttp", command, answers))
        else:
            print("no --peer-python: beside the backend itself")
            proxies["backend"] = backend
        figures = beside(proxies, pairs, seconds)
        rate = uvloop.run(repeat(router.url, 32, seconds, lambda: SMALL)) / seconds / 2
        added: dict[float, list[float]] = {0.5: [], 0.99: []}
        for _ in range(pairs):
            through, straight = (uvloop.run(paced(each.url, rate, seconds)) for each in (router, backend))
            for share, values in added.items():
                values.append(quantile(through, share) - quantile(straight, share))
    latency = {f"added_p{100 * share:.0f}_ms": rounded(statistics.median(values)) for share, values in added.items()}
    print(f"added at {rate:,.0f} requests/s: {latency}")
    return figures | {"latency": latency | {"requests_per_s": round(rate)}}


def gateways(
    programs: str | None = None, nginx: str | None = None, pairs: int = 6, seconds: float = 3.0
) -> dict[str, Any]:
    if programs is None:
        raise SystemExit("--programs: none given; the folder with the programs vllm-router and sglang-router")
    names = ["penstock", *(f"{each}-router:{policy}" for policy in PEER_POLICIES for each in ("vllm", "sglang"))]
    names += ["nginx"] if nginx else []
    with contextlib.ExitStack() as stack:
        workers = [Worker(stack.enter_context(serving("backend", BACKEND, answers)).url) for _ in range(2)]
        known = {"bin": programs, "nginx": nginx or ""}
        proxies = {name: stack.enter_context(gateway(name, workers, known)) for name in names}
        return beside(proxies, pairs, seconds, PROMPTS)


# -- split -------------------------------------------------------------------------------------------------------


async def gaps_and_first_tokens(
    url: str, prompt_tokens: int, every: float, seconds: float, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Return the milliseconds between two tokens of the streams, and to the first tokens of the long prompts beside them."""
    end_s = SETTLE_S + seconds
    with client_of(url) as client:

        def call(num_tokens: int, max_tokens: int, at_s: float) -> EncodedCall:
            tokens = [rng.randrange(256) for _ in range(num_tokens)]
            fields = {"prompt": tokens, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
            return EncodedCall(content_of(client, fields), num_tokens, at_s)

        calls = [call(64, round(end_s / TOKEN_S), 0.0) for _ in range(STREAMS)]  # they last at least until `end_s`
        calls += [call(prompt_tokens, 16, SETTLE_S + number * every) for number in range(int(seconds / every))]
        outcomes = (await drive(client, calls)).outcomes
    assert not any(each.error for each in outcomes), Counter(each.error for each in outcomes)
    gaps = [
        1000 * gap_s
        for each in outcomes[:STREAMS]
        for at_s, gap_s in zip(itertools.accumulate(each.itls_s, initial=each.ttft_s), each.itls_s, strict=False)
        if at_s > SETTLE_S and at_s + gap_s < end_s
    ]
    return gaps, [1000 * each.ttft_s for each in outcomes[STREAMS:]]


def split(
    pairs: int = 5, seconds: float = 4.0, prompt_tokens: int = 6000, every: float = 0.5, prefill_threshold: int = 512
) -> dict[str, Any]:
    address = f"127.0.0.1:{free_port()}"
    pace = {"prefill_tps": 20_000, "inter_token_s": TOKEN_S, "kv_host_bytes": 1 << 24, "max_model_len": 131_072}
    rng = random.Random(0)
    seen: dict[str, tuple[list[float], list[float]]] = {"split": ([], []), "pool": ([], [])}
    with contextlib.ExitStack() as stack:
        (first,) = stack.enter_context(mock_replicas(1, kv_peer_listen=address, **pace))
        (second,) = stack.enter_context(mock_replicas(1, kv_peers=[address], **pace))
        roles: tuple[str, ...] = ("--backend", f"{first.url},prefill={address}", "--backend", second.url)
        roles += ("--prefill-threshold", str(prefill_threshold))
        both = ("--backend", first.url, "--backend", second.url)
        routers = {
            name: stack.enter_context(serving(name, (*ROUTE, *given), is_ready, env=environment()))
            for name, given in (("split", roles), ("pool", both))
        }

        def p99(name: str) -> float:
            gaps, first_tokens = uvloop.run(
                gaps_and_first_tokens(routers[name].url, prompt_tokens, every, seconds, rng)
            )
            seen[name][0].extend(gaps)
            seen[name][1].extend(first_tokens)
            return quantile(gaps, 0.99)

        for router in routers.values():
            uvloop.run(gaps_and_first_tokens(router.url, prompt_tokens, every, 1.0, rng))  # connections, learned speeds
        found = compare("p99 between tokens", {name: partial(p99, name) for name in routers}, pairs, "ms")
        moved = second.metric('penstock:kv_tier_hit_tokens_total{model_name="mock",tier="peer"}')
    figures: dict[str, Any] = {"gap_p99_ms": found, "tokens_moved": moved}
    for name, (gaps, first_tokens) in seen.items():
        figures[name] = {f"gap_{part}_ms": quantile(gaps, at) for part, at in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
        figures[name] |= {f"ttft_{part}_ms": quantile(first_tokens, at) for part, at in (("p50", 0.5), ("p99", 0.99))}
        figures[name] = {what: round(value, 1) for what, value in figures[name].items()}
        print(f"{name}: {figures[name]}")
    print(f"{moved:,.0f} tokens came from the other replica")
    return figures


if __name__ == "__main__":
    main(__doc__, "route", cost, gateways, split)

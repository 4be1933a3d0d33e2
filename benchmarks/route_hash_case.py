"""The published failure, rebuilt: a router whose block hasher is a Python loop, and the same router with the one in C.

39,000-token prompts, 128 clients at once, each its own conversation; the replicas answer at once, so the router's CPU
is the only variable. Prompts travel as ids, so that tokenizing is not part of it. Both hashers run in one run, by turns.

    python benchmarks/route_hash_case.py [--tokens 39000] [--clients 128] [--requests 256] [--pairs 2]

`slow` does what a published router did before each decision: a pure-Python pass over the tokens, on the event loop.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from bench_route import process, wait_ready
from pairs import alternate, judge, record

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE.parent))
from tests.support.slow_hash import v1_chain  # noqa: E402


def run_router(hasher: str, backend: int) -> None:
    """The router as it is, or with the Python loop run first and on the event loop."""
    from penstock.router.config import RouterConfig, resolve
    from penstock.router.placement.placement import Placement
    from penstock.router.placement.prompts import Texts
    from penstock.router.serve import bind_socket, serve_alone

    if hasher == "slow":
        prepare = Placement.prepare

        def slowly(self: Placement, tokens: Any, salt: str | None = None, adapter: str | None = None) -> Any:
            v1_chain(memoryview(tokens).cast("i").tolist(), 32)
            return prepare(self, tokens, salt, adapter)

        Placement.prepare = slowly  # type: ignore[method-assign]
        Texts.is_long = lambda self, path, body: False  # type: ignore[method-assign]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    config = resolve(RouterConfig(backends=(f"http://127.0.0.1:{backend}",), port=0, max_requests=4096), {})
    uvloop.run(serve_alone(config, bind_socket(config.host, 0)))


async def first_bytes(port: int, bodies: list[bytes], clients: int) -> tuple[list[float], float]:
    """Seconds to the first byte of each request, and of the whole run."""
    times: list[float] = []
    waiting = list(bodies)

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
        while waiting:
            body = waiting.pop()
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            begun_s = time.perf_counter()
            head = await reader.readuntil(b"\r\n\r\n")
            times.append(time.perf_counter() - begun_s)

            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            assert head.startswith(b"HTTP/1.1 200"), body
        writer.close()

    begun_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return times, time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=39_000)
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--router", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.router:
        run_router(options.router[0], int(options.router[1]))
        return
    rng = random.Random(1)
    bodies = []
    for _ in range(options.requests):
        ids = rng.choices(range(50_000), k=options.tokens)
        bodies.append(json.dumps({"model": "m", "prompt": ids, "max_tokens": 1}, separators=(",", ":")).encode())
    p95: dict[str, list[float]] = {"c": [], "slow": []}
    with contextlib.ExitStack() as stack:
        backend, _ = stack.enter_context(process(sys.executable, str(HERE / "route_load.py")))
        ports = {}
        for hasher in p95:
            command = (sys.executable, str(HERE / "route_hash_case.py"), "--router", hasher, str(backend))
            ports[hasher], _ = stack.enter_context(process(*command))
            wait_ready(ports[hasher])

        def rate(hasher: str) -> float:
            times, seconds = uvloop.run(first_bytes(ports[hasher], bodies, options.clients))
            p95[hasher].append(sorted(times)[int(0.95 * len(times))])
            return len(times) / seconds

        pairs = alternate(lambda: rate("c"), lambda: rate("slow"), options.pairs)
    rates = {"c": [pair.ours for pair in pairs], "slow": [pair.theirs for pair in pairs]}
    figures = {}
    for hasher, name in (("slow", "Python hasher"), ("c", "C hasher")):
        middle = sorted(rates[hasher])[len(pairs) // 2], sorted(p95[hasher])[len(pairs) // 2]
        print(f"{name:13}: {middle[0]:7.1f} requests/s, first byte p95 {middle[1]:6.2f} s")
        figures[hasher] = {"requests_per_s": round(middle[0], 1), "first_byte_p95_s": round(middle[1], 3)}
    print(f"requests/s: {judge(pairs, higher_is_better=True)}")
    record("route_hash_case", figures | {"tokens": options.tokens, "clients": options.clients})


if __name__ == "__main__":
    main()

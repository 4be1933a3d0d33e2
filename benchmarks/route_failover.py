"""A replica of eight is killed under load: how many requests fail, and how soon nobody is sent there any more.

Replicas are real servers with a model's pace and no model (tests/support/mock_replica.py); 64 clients ask without a pause.
Half-way one replica gets SIGKILL. A request fails when its answer is not 200; the time out of rotation is from the kill
until the router lists the replica as not available, looked at every two milliseconds.

    python benchmarks/route_failover.py [--replicas 8] [--rounds 5]
"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop
from bench_route import process, wait_ready
from pairs import record

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.support.router_fleet import MockReplica, mock_replicas


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes, body: bytes
) -> tuple[int, bytes]:
    writer.write(head + b" HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
    writer.write(b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(answer.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    return int(answer.split(b" ", 2)[1]), await reader.readexactly(length)


async def out_of_rotation(port: int, victim: MockReplica) -> float:
    """Kill it; the seconds until the router knows."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    victim.send(signal.SIGKILL)
    killed_s = time.perf_counter()
    while True:
        _, body = await ask(reader, writer, b"GET /replicas", b"")
        if not next(each for each in json.loads(body)["replicas"] if each["url"] == victim.url)["is_available"]:
            writer.close()
            return time.perf_counter() - killed_s
        await asyncio.sleep(0.002)


async def one_round(port: int, victim: MockReplica, clients: int, seconds: float) -> tuple[Counter[int], float]:
    statuses = Counter[int]()
    end_s = time.perf_counter() + seconds

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        turn = 0
        while time.perf_counter() < end_s:
            turn += 1
            body = b'{"prompt":"client %d asks for the %d. time","max_tokens":4}' % (number, turn)
            status, _ = await ask(reader, writer, b"POST /v1/completions", body)
            statuses[status] += 1
        writer.close()

    asking = asyncio.gather(*(client(number) for number in range(clients)))
    await asyncio.sleep(seconds / 2)
    took_s = await out_of_rotation(port, victim)
    await asking
    return statuses, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one round")
    args = parser.parse_args()
    statuses, times_ms = Counter[int](), []
    for number in range(args.rounds):
        with contextlib.ExitStack() as stack:
            replicas = stack.enter_context(mock_replicas(args.replicas, prefill_tps=2000, inter_token_s=0.02))
            backends = [word for replica in replicas for word in ("--backend", replica.url)]
            command = (sys.executable, "-m", "penstock.cli", "route", *backends, "--port", "0")
            port, _ = stack.enter_context(process(*command))
            wait_ready(port)
            victim = replicas[number % len(replicas)]
            seen, took_s = uvloop.run(one_round(port, victim, args.clients, args.seconds))
            statuses += seen
            times_ms.append(1000 * took_s)
    failed = sum(count for status, count in statuses.items() if status != 200)
    times_ms.sort()
    print(f"{failed} of {statuses.total():,} requests failed in {args.rounds} kills of 1 of {args.replicas} replicas")
    print(f"out of rotation after {times_ms[len(times_ms) // 2]:.1f} ms (median), {times_ms[-1]:.1f} ms (worst)")
    figures: dict[str, Any] = {"requests": statuses.total(), "failed": failed, "kills": args.rounds}
    record(
        "route_failover",
        figures | {"out_of_rotation_ms": {"median": times_ms[len(times_ms) // 2], "worst": times_ms[-1]}},
    )


if __name__ == "__main__":
    main()

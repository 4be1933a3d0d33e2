"""How many streamed chunks per second the load generator of `penstock bench serve` can follow, beside httpx.

A load generator that is slower than the server measures itself. A server in a process of its own streams
events as fast as it can, each in an HTTP chunk and a packet of its own. On few cores the server is what limits
the rate, so the ratio is that of the chunks per second of CPU time.

    python benchmarks/bench_client.py [--streams 64] [--events 500] [--runs 5]
"""

import argparse
import asyncio
import json
import multiprocessing
import platform
import socket
import statistics
import time
from collections.abc import Awaitable, Callable

import httpx
import msgspec
import uvloop

from penstock.engine.commands.bench.http_client import Client, Target
from penstock.engine.commands.bench.load import EncodedCall, drive
from penstock.engine.commands.bench.stream import Reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(text: str, **fields: object) -> bytes:
    """One server-sent event in its own HTTP chunk, of the size that real servers send."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None}
    reply = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000, "model": "a-model"}
    data = b"data: " + msgspec.json.encode(reply | {"choices": [choice]} | fields) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class Endless(asyncio.Protocol):
    """Answers every request with `num_events` events; each is a write, so each may be a packet."""

    def __init__(self, num_events: int) -> None:
        self._num_events = num_events
        usage = event("", choices=[], usage={"prompt_tokens": 1, "completion_tokens": num_events})
        done = b"data: [DONE]\n\n"
        self._end = usage + b"%x\r\n%s\r\n0\r\n\r\n" % (len(done), done)
        self._can_write = asyncio.Event()
        self._can_write.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]  # as far as it is used

    def data_received(self, data: bytes) -> None:
        if b"POST" in data:
            self._task = asyncio.ensure_future(self._stream())

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    async def _stream(self) -> None:
        self._transport.write(HEAD)
        one = event(" word")
        for _ in range(self._num_events):
            self._transport.write(one)
            await asyncio.sleep(0)  # a packet of its own
            await self._can_write.wait()
        self._transport.write(self._end)


def serve(sock: socket.socket, num_events: int) -> None:
    async def forever() -> None:
        server = await asyncio.get_running_loop().create_server(lambda: Endless(num_events), sock=sock)
        await server.serve_forever()

    uvloop.run(forever())


async def with_penstock(url: str, num_streams: int, num_events: int) -> None:
    client = Client(Target.of(url))
    request = client.target.request("POST", "/v1/completions", b"{}", {})
    finished = await drive(client, [EncodedCall(request, 1)] * num_streams)
    client.close()
    assert all(outcome.output_len == num_events and not outcome.error for outcome in finished.outcomes)


async def with_httpx(url: str, num_streams: int, num_events: int) -> None:
    """The same events through httpx, decoded and counted by the same code: only the HTTP client differs."""
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(limits=limits, timeout=None) as client:

        async def one() -> None:
            reply = Reply(time.perf_counter())
            async with client.stream("POST", f"{url}/v1/completions", content=b"{}") as response:
                async for data in response.aiter_bytes():
                    reply.take(200, data, time.perf_counter())
            outcome = reply.outcome(200, 1)
            assert outcome.output_len == num_events and not outcome.error

        await asyncio.gather(*[one() for _ in range(num_streams)])


def chunks_per_s(
    follow: Callable[[str, int, int], Awaitable[None]], url: str, num_streams: int, num_events: int
) -> tuple[float, float]:
    """Per second of wall time, and per second of this process's CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    uvloop.run(follow(url, num_streams, num_events))  # type: ignore[arg-type]
    total = num_streams * num_events
    return total / (time.perf_counter() - wall), total / (time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, metavar="N")
    parser.add_argument("--events", type=int, default=500, metavar="N")
    parser.add_argument("--runs", type=int, default=5, metavar="N")
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        server = multiprocessing.get_context("fork").Process(target=serve, args=(sock, args.events), daemon=True)
        server.start()
    time.sleep(0.5)
    samples: dict[str, list[tuple[float, float]]] = {"penstock": [], "httpx": []}
    for _ in range(args.runs):  # alternating, so that a busy moment meets both
        for name, follow in (("penstock", with_penstock), ("httpx", with_httpx)):
            samples[name].append(chunks_per_s(follow, url, args.streams, args.events))
    server.terminate()
    figures = {}
    for name, pairs in samples.items():
        walls, cpus = zip(*pairs, strict=True)
        figures[name] = {"chunks_per_s": round(statistics.median(walls)), "per_cpu_s": round(statistics.median(cpus))}
        print(f"{name:9s} {figures[name]['chunks_per_s']:8,} chunks/s   {figures[name]['per_cpu_s']:8,} per CPU second")
    ratios = [ours[1] / theirs[1] for ours, theirs in zip(samples["penstock"], samples["httpx"], strict=True)]
    print(f"ratio per CPU second: {statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})")
    line = {"bench": "client", "streams": args.streams, "events": args.events, "python": platform.python_version()}
    print(json.dumps({**line, **figures, "ratio": round(statistics.median(ratios), 2)}))


if __name__ == "__main__":
    main()

"""How many stream chunks a second the HTTP server delivers, and what one costs it, with the engine left out.

A stand-in engine hands every open stream one token per step, and starts the next step when the loop is free:
what is measured is everything from an update to the socket. The clients are raw sockets in another process.

    python benchmarks/server_chunks.py --streams 64 --tokens 2000
"""

import argparse
import asyncio
import json
import multiprocessing
import selectors
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from penstock.engine.front.answer import RequestMetrics, Update
from penstock.engine.front.client import EngineHealth
from penstock.engine.http.listen import Listener, bind_socket
from penstock.engine.messages import Stats
from penstock.engine.sampling_params import SamplingParams
from penstock.engine.server.app import build_app
from penstock.engine.server.server_config import ServerConfig
from penstock.executor.protocol import ModelInfo

INFO = ModelInfo(
    architecture="none",
    dtype="none",
    device="none",
    vocab_size=1000,
    hidden_size=1,
    max_model_len=1_000_000,
    block_size=16,
    num_blocks=1,
    block_bytes=1,
    fingerprint=b"",
    max_in_flight=1,
)


class Stream:
    """A generation: one update per step."""

    num_cached_tokens = prompt_logprobs = embedding = None

    def __init__(self, engine: "Steps", name: int, num_tokens: int) -> None:
        self.request_id = str(name)
        self.num_prompt_tokens = 1
        self.metrics = RequestMetrics()
        self.left = num_tokens
        self.engine = engine
        self.news: list[Update] = []
        self.arrived = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> list[Update]:
        while not self.news:
            if self.left == 0:
                raise StopAsyncIteration
            self.arrived.clear()
            await self.arrived.wait()
        news, self.news = self.news, []
        return news

    def abort(self) -> None:
        self.engine.streams.discard(self)


class Steps:
    """An engine whose step gives each stream a token. It begins when `num_streams` are there."""

    info = INFO
    stats = Stats()
    on_step = None

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self.streams: set[Stream] = set()
        self.begun_cpu_s = self.ended_cpu_s = 0.0

    def health(self) -> EngineHealth:
        return EngineHealth(True, True, "ok")

    def admit(self, num_sequences: int = 1) -> None:
        pass

    def generate(self, prompt_ids: list[int], params: SamplingParams, **options: Any) -> Stream:
        stream = Stream(self, len(self.streams), params.max_tokens or 1)
        self.streams.add(stream)
        if len(self.streams) == self.num_streams:
            self.task = asyncio.ensure_future(self.run())
        return stream

    async def run(self) -> None:
        self.begun_cpu_s = time.process_time()
        while self.streams:
            for stream in list(self.streams):
                stream.left -= 1
                stream.news.append(Update(0, " word", [7], finish_reason="length" if stream.left == 0 else None))
                stream.arrived.set()
                if stream.left == 0:
                    self.streams.discard(stream)
            while any(stream.news for stream in self.streams):
                await asyncio.sleep(0)
        self.ended_cpu_s = time.process_time()


class Words:
    """A tokenizer for the one prompt there is."""

    def encode_batch(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [[1] for _ in texts]


class Plain:
    def render(self, messages: list[dict[str, Any]], **variables: Any) -> str:
        return "x"


def serve(num_streams: int, pipe: Connection) -> None:
    async def main() -> None:
        engine = Steps(num_streams)
        config = ServerConfig(port=0, served_model_names=("m",))
        app = build_app(engine, Words(), Plain(), config)  # type: ignore[arg-type]
        sock = bind_socket("127.0.0.1", 0)
        async with Listener(app, sock, config.limits, app.service.metrics.refused):
            pipe.send(sock.getsockname()[1])
            while not pipe.poll():
                await asyncio.sleep(0.05)
            pipe.send(engine.ended_cpu_s - engine.begun_cpu_s)

    uvloop.run(main())


def read_streams(port: int, num_streams: int, num_tokens: int) -> tuple[int, float]:
    """Chunks read from all streams, and the seconds from the first byte to the last."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": num_tokens, "stream": True}
    content = json.dumps(body).encode()
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
    )
    request += b"content-length: %d\r\n\r\n" % len(content) + content
    selector, num_chunks, begun_s = selectors.DefaultSelector(), 0, 0.0
    for _ in range(num_streams):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(request)
        selector.register(sock, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
            begun_s = begun_s or time.perf_counter()
            num_chunks += data.count(b"data: {")
            if not data:
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    return num_chunks, time.perf_counter() - begun_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.streams, there))
    server.start()
    num_chunks, seconds = read_streams(here.recv(), options.streams, options.tokens)
    here.send("done")
    cpu_s = here.recv()
    server.join()
    result = {
        "streams": options.streams,
        "chunks": num_chunks,
        "chunks_per_s": round(num_chunks / seconds),
        "server_cpu_us_per_chunk": round(cpu_s / num_chunks * 1e6, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

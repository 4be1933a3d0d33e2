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
from tests.support.fake_engine import byte_tokenizer, line_template

from penstock.engine.front.answer import Answer
from penstock.engine.front.client import EngineHealth
from penstock.engine.front.submit import begin_answer
from penstock.engine.http.listen import Listener, bind_socket
from penstock.engine.messages import FinishReason, Output, Stats
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


class WordStream:
    """A detokenizer that costs nothing."""

    def push(self, ids: list[int]) -> str:
        return " word" * len(ids)

    def flush(self) -> str:
        return ""


class Steps:
    """An engine whose step gives each stream a token. It begins when `num_streams` are there."""

    info = INFO
    stats = Stats()
    on_step = None

    def __init__(self, num_streams: int) -> None:
        self.num_streams = num_streams
        self.streams: dict[Answer, int] = {}  # and how many tokens each still gets
        self.begun_cpu_s = self.ended_cpu_s = 0.0

    def health(self) -> EngineHealth:
        return EngineHealth(True, True, "ok")

    def admit(self, num_sequences: int = 1) -> None:
        pass

    def generate(self, prompt_ids: list[int], params: SamplingParams, **_: Any) -> Answer:
        name = str(len(self.streams))
        answer = begin_answer(name, prompt_ids, params, INFO, (), WordStream, self.abort)
        self.streams[answer] = params.max_tokens or 1
        if len(self.streams) == self.num_streams:
            self.task = asyncio.ensure_future(self.run())
        return answer

    def abort(self, request_ids: list[str]) -> None:
        self.streams = {each: left for each, left in self.streams.items() if f"{each.request_id}.0" not in request_ids}

    async def run(self) -> None:
        self.begun_cpu_s = time.process_time()
        while self.streams:
            before = {answer: answer.num_tokens for answer in self.streams}
            for answer, left in list(self.streams.items()):
                reason: FinishReason | None = "length" if left == 1 else None
                answer.take(0, Output(answer.messages[0].request_id, [7], reason))
                self.streams[answer] = left - 1
                if left == 1:
                    del self.streams[answer]
            while any(answer.num_tokens == num for answer, num in before.items() if answer in self.streams):
                await asyncio.sleep(0)
        self.ended_cpu_s = time.process_time()


def serve(num_streams: int, pipe: Connection) -> None:
    async def main() -> None:
        engine = Steps(num_streams)
        config = ServerConfig(port=0, served_model_names=("m",))
        app = build_app(engine, byte_tokenizer(), line_template(), config)  # type: ignore[arg-type]
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

"""A server of a few lines for the load generator's tests: it answers with the bytes it is given."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.engine.commands.prove.http_client import Client, Target


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Endpoint:
    """Runs `answer` for every request; a connection is kept until the answer closes it."""

    answer: Answer
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0
    running: int = 0
    most_running: int = 0

    async def __aenter__(self) -> "Endpoint":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        self.client = Client(Target.of(self.url))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self._server.close()
        await asyncio.sleep(0.01)  # the connections' tasks see that their clients have gone

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while not writer.is_closing():
                asked = await _read(reader)
                self.asked.append(asked)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
                await self.answer(asked, writer)
                self.running -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split()
    headers = dict(line.split(": ", 1) for line in lines)
    return Asked(method, path, headers, await reader.readexactly(int(headers["Content-Length"])))


def plain(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def streamed(*payloads: bytes) -> bytes:
    """Server-sent events, each in an HTTP chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p) + 8, b"data: " + p + b"\n\n") for p in payloads) + b"0\r\n\r\n"


def completion(num_tokens: int, prompt_tokens: int = 5, **usage: Any) -> bytes:
    """The whole streamed answer of /v1/completions."""
    pieces = [{"choices": [{"index": 0, "text": f" t{index}", "finish_reason": None}]} for index in range(num_tokens)]
    pieces[-1]["choices"][0]["finish_reason"] = "length"
    end = {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens, **usage}}
    return streamed(*[json.dumps(piece).encode() for piece in [*pieces, end]], b"[DONE]")


async def speak_openai(asked: Asked, writer: asyncio.StreamWriter) -> None:
    """Lists a model; completes prompts with as many tokens as were asked for."""
    if asked.path.endswith("/v1/models"):
        writer.write(plain(b'{"object": "list", "data": [{"id": "a/model"}]}'))
    else:
        body = asked.json
        writer.write(completion(body.get("max_tokens") or body["max_completion_tokens"], len(body.get("prompt", "xx"))))
    await writer.drain()

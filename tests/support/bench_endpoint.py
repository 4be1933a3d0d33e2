"""A server of a few lines for the load generator's tests, which answers with prepared bytes."""

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.support.router_stub import Answer, Seen, Stub, stub, whole


def streamed(*payloads: bytes) -> bytes:
    """Server-sent events, each in an HTTP chunk."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(p) + 8, b"data: " + p + b"\n\n") for p in payloads) + b"0\r\n\r\n"


def completion(num_tokens: int, prompt_tokens: int = 5, **usage: Any) -> bytes:
    """Return the whole streamed answer of /v1/completions."""
    pieces = [{"choices": [{"index": 0, "text": f" t{index}", "finish_reason": None}]} for index in range(num_tokens)]
    pieces[-1]["choices"][0]["finish_reason"] = "length"
    end = {"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens, **usage}}
    return streamed(*[json.dumps(piece).encode() for piece in [*pieces, end]], b"[DONE]")


def speak_openai(seen: Seen, sock: socket.socket) -> bytes:
    """List a model; complete prompts with as many tokens as the request allows."""
    if seen.line.startswith(b"GET /v1/models "):
        return whole(b'{"object": "list", "data": [{"id": "a/model"}]}')
    body = json.loads(seen.body)
    return completion(body.get("max_tokens") or body["max_completion_tokens"], len(body.get("prompt", "xx")))


@contextlib.contextmanager
def endpoint(answer: Answer = speak_openai) -> Iterator[Stub]:
    with stub(answer) as server:
        server.answers_all = True
        yield server

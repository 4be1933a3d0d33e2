"""Sends one request and records the complete answer, also as a client that reads slowly, never reads, or disconnects."""

import asyncio
import json
import math
from collections.abc import Mapping
from typing import Any

from .answers import AskResult, loads
from .http_client import Client, Connection, Events, Target

PATH, CHAT_PATH = "/v1/completions", "/v1/chat/completions"
RESPONSES_PATH, MESSAGES_PATH = "/v1/responses", "/v1/messages"
PAUSES_S = {"at once": 0.0, "slowly": 0.05, "never": math.inf}  # after each read
LAST_S = 5.0  # for a small exchange after the end of the run, e.g. to read the metrics


class Asker:
    """Sends requests to one server.

    An answer without a byte for `timeout_s` counts as hung. After `duration_s`, requests in flight are abandoned.
    """

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float, duration_s: float = math.inf) -> None:
        self.client = Client(Target.of(url))
        self.headers, self.timeout_s = headers, timeout_s
        self.num_bytes = 0
        self._started_s, self._duration_s = asyncio.get_running_loop().time(), duration_s
        self.until(1.0)

    def until(self, share: float) -> None:
        """End every request after this share of the duration."""
        self.until_s = self._share_s = self._started_s + share * self._duration_s

    def limit(self, seconds: float) -> None:
        """End every request after so many seconds from now, or after the current share if that is earlier."""
        self.until_s = min(self._share_s, asyncio.get_running_loop().time() + seconds)

    def pause(self, seconds: float) -> None:
        """Extend the duration by a time that is not the server's."""
        self._started_s += seconds
        self.until_s = self._share_s = self._share_s + seconds

    @property
    def is_over(self) -> bool:
        return asyncio.get_running_loop().time() >= self.until_s

    async def ask(
        self, body: Mapping[str, Any], leaves_s: float | None = None, reads: str = "at once", path: str = PATH
    ) -> AskResult:
        answer, events, parts = AskResult(), Events(), bytearray()
        leaving, patience = asyncio.timeout(None), asyncio.timeout(None)
        request = self.client.target.request("POST", path, json.dumps(body).encode(), self.headers)
        self.num_bytes += len(request)
        loop, is_stream = asyncio.get_running_loop(), bool(body.get("stream"))
        begun_s = loop.time()

        def take(status: int, data: bytes, _now_s: float) -> None:
            self.num_bytes += len(data)
            answer.status = status
            answer.first_s = answer.first_s or loop.time() - begun_s
            if not patience.expired():
                patience.reschedule(loop.time() + self.timeout_s)
            if not is_stream or status != 200:
                parts.extend(data)
                return
            for payload in events.feed(data):
                answer.take(payload)

        own: Connection | None = None
        try:
            if leaves_s is not None or reads != "at once":
                # Connect outside of the timeouts: a cancelled connect would leak its connection.
                own = await self.client.connect(PAUSES_S[reads])
            async with leaving, patience:
                patience.reschedule(loop.time() + self.timeout_s)
                leaving.reschedule(min(self.until_s, math.inf if leaves_s is None else loop.time() + leaves_s))
                answer.status = await (own or self.client).exchange(request, take)
        except TimeoutError:
            answer.has_left = leaving.expired()
            answer.is_hung = not answer.has_left
        except OSError as error:  # refused, reset, or closed early
            answer.error = answer.error or str(error)
        finally:
            if own is not None:
                own.close()
        if parts and not (answer.has_left or answer.is_hung or answer.error):
            answer.take(bytes(parts))
        has_ended = all(choice.finish for choice in answer.choices.values()) and bool(answer.choices)
        is_whole = has_ended and (answer.has_end_mark or not is_stream)
        answer.is_done = is_whole and not (answer.has_left or answer.is_hung or answer.error)
        return answer

    async def reset(self) -> int:
        """Empty the prefix cache; return the status."""
        return (await self.fetch("POST", "/reset_prefix_cache", {}))[0]

    async def fetch(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Make a small exchange; return the status (0: no answer) and the body, decoded where it is JSON."""
        content = b"" if body is None else json.dumps(body).encode()
        try:
            left_s = max(LAST_S, self.until_s - asyncio.get_running_loop().time())
            async with asyncio.timeout(min(self.timeout_s, left_s)):
                status, data = await self.client.fetch(method, path, content, self.headers)
        except (OSError, TimeoutError):
            return 0, None
        self.num_bytes += len(content) + len(data)
        try:
            return status, loads(data)
        except ValueError:
            return status, data.decode(errors="replace")

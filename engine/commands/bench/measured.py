"""Measures one streamed completion: when its pieces arrived, how many there were and how it ended.

It reads the events of /v1/completions and of /v1/chat/completions, and decodes only the fields that it counts.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.prove.http_client import Events

ERROR_BYTES = 2000  # kept of an error's body


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def piece(self) -> str | None:
        """Return the event's text; None for an event without a token: the role of a chat, or an end mark."""
        if self.delta is not None:
            delta = self.delta
            return delta.content or delta.reasoning or delta.reasoning_content or ("" if delta.tool_calls else None)
        # An empty text in the middle is a token whose characters are not complete yet.
        return self.text if self.text or self.finish_reason is None else None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None  # an object with a message, or just a text


_DECODER = msgspec.json.Decoder(_Event)


@dataclass
class Outcome:
    """One request and its answer, complete after `finish`. `start_s` is on the caller's clock; other times are durations."""

    prompt_len: int  # counted by the server, where it counts
    start_s: float
    output_len: int = 0  # tokens counted by the server, otherwise pieces of the stream
    ttft_s: float = 0.0
    latency_s: float = 0.0  # until the last event with a choice
    itls_s: list[float] = field(default_factory=list)  # between pieces; a piece may carry several tokens
    num_cached: int = 0
    text: str = ""
    error: str = ""
    _events: Events = field(default_factory=Events)
    _pieces: list[str] = field(default_factory=list)
    _last_piece_s: float = 0.0
    _usage: _Usage = field(default_factory=_Usage)
    _is_done: bool = False

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first; 0 where there is only one."""
        return (self.latency_s - self.ttft_s) / (self.output_len - 1) if self.output_len > 1 else 0.0

    def take(self, status: int, data: bytes, now_s: float) -> None:
        """Add bytes of the body that have just arrived."""
        if status != 200:
            self.error += data[: ERROR_BYTES - len(self.error)].decode(errors="replace")
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._is_done = True
                continue
            try:
                self._note(_DECODER.decode(payload), now_s - self.start_s)
            except msgspec.DecodeError as error:
                self.error = self.error or f"an event cannot be read ({error}): {payload[:200]!r}"

    def finish(self, status: int) -> None:
        """End the answer: take the server's counts, and note an error if it is not whole."""
        usage, cached = self._usage, self._usage.prompt_tokens_details
        self.text = "".join(self._pieces)
        self.prompt_len = usage.prompt_tokens or self.prompt_len
        self.output_len = len(self._pieces) if usage.completion_tokens is None else usage.completion_tokens
        self.num_cached = (cached.cached_tokens or 0) if cached else 0
        if not self._pieces:
            self.ttft_s = self.latency_s
        if status != 200:
            self.error = f"HTTP {status}: {self.error.strip()}"
        elif not self.error and not (self._is_done and self.latency_s):
            self.error = "the stream ended early"

    def _note(self, event: _Event, after_s: float) -> None:
        if event.error is not None:
            message = event.error.get("message") if isinstance(event.error, dict) else None
            self.error = self.error or str(message or event.error)[:ERROR_BYTES]
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices or ():
            self.latency_s = after_s
            piece = choice.piece()
            if piece is None:
                continue
            if self._pieces:
                self.itls_s.append(after_s - self._last_piece_s)
            else:
                self.ttft_s = after_s
            self._pieces.append(piece)
            self._last_piece_s = after_s

"""Measures one streamed completion: when its pieces arrived, how many there were and how it ended.

It reads the events of /v1/completions and of /v1/chat/completions, and decodes only the fields that it counts.
"""

from typing import Any

import msgspec

from penstock.engine.commands.bench.report import Outcome
from penstock.engine.commands.prove.http_client import Events

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
    error: msgspec.Raw | None = None


_DECODER = msgspec.json.Decoder(_Event)


class MeasuredAnswer:
    """One answer while it arrives. Times are on the caller's clock, in seconds."""

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_pieces = 0
        self._first_s: float | None = None
        self._last_piece_s = 0.0
        self._end_s: float | None = None  # of the last event with a choice
        self._gaps_s: list[float] = []
        self._pieces: list[str] = []
        self._usage: _Usage | None = None
        self._is_done = False
        self._error = b""
        self._events = Events()

    def take(self, status: int, data: bytes, now_s: float) -> None:
        """Add bytes of the body that have just arrived."""
        if status != 200:
            self._error += data[: ERROR_BYTES - len(self._error)]
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._is_done = True
                continue
            try:
                self._note(_DECODER.decode(payload), now_s)
            except msgspec.DecodeError as error:
                self._error = self._error or f"an event cannot be read ({error}): {payload[:200]!r}".encode()

    def outcome(self, status: int, prompt_len: int) -> Outcome:
        """Return the measured request, whose answer is complete. `prompt_len` is used if the server reports none."""
        usage = self._usage or _Usage()
        error = self._error.decode(errors="replace").strip()
        if status != 200:
            error = f"HTTP {status}: {error}"
        elif not error and (self._end_s is None or not self._is_done):
            error = "the stream ended early"
        end_s = self.start_s if self._end_s is None else self._end_s
        cached = usage.prompt_tokens_details
        return Outcome(
            prompt_len=usage.prompt_tokens or prompt_len,
            output_len=self.num_pieces if usage.completion_tokens is None else usage.completion_tokens,
            start_s=self.start_s,
            ttft_s=(end_s if self._first_s is None else self._first_s) - self.start_s,
            latency_s=end_s - self.start_s,
            itls_s=self._gaps_s,
            num_cached=(cached.cached_tokens or 0) if cached else 0,
            text="".join(self._pieces),
            error=error,
        )

    def _note(self, event: _Event, now_s: float) -> None:
        if event.error is not None:
            self._error = self._error or bytes(event.error)[:ERROR_BYTES]
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices or ():
            self._end_s = now_s
            piece = choice.piece()
            if piece is None:
                continue
            self.num_pieces += 1
            self._pieces.append(piece)
            if self._first_s is None:
                self._first_s = now_s
            else:
                self._gaps_s.append(now_s - self._last_piece_s)
            self._last_piece_s = now_s

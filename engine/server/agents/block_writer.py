"""Writes an answer for Anthropic's Messages API: blocks of thinking, text and calls, with their stream events."""

from typing import Any

import msgspec

from penstock.engine.http.errors import HttpError
from penstock.engine.server.agents.part_writer import Kind, PartWriter
from penstock.engine.server.call import Call
from penstock.engine.server.tool_choice import ChatFinish, ReadingPlan
from penstock.engine.text.tools.reader import CallStart, object_in

UNSIGNED = "unsigned"  # placeholder for the signature, which some clients require
FIELDS = {"reasoning": "thinking", "text": "text"}  # kind of part → type of its block, which is also its field
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class BlockWriter(PartWriter):
    def __init__(self, call: Call, plan: ReadingPlan, *, is_stream: bool) -> None:
        reply: dict[str, Any] = {"id": f"msg_{call.id}", "type": "message", "role": "assistant", "model": call.model}
        reply |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": {}}
        super().__init__(call, plan, reply, is_stream=is_stream)
        self._index = -1  # index of the last block in the stream, where truncated calls count too

    def _begin(self) -> None:
        self.reply["usage"] = self._usage()
        self._event("message_start", message=self.reply)
        self._event("ping")

    def _open(self, kind: Kind, call: CallStart | None) -> None:
        block: dict[str, Any]
        if call is not None:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        else:
            block = {"type": FIELDS[kind], FIELDS[kind]: "", **({"signature": ""} if kind == "reasoning" else {})}
        self.reply["content"].append(block)
        self._index += 1
        self._event("content_block_start", index=self._index, content_block=block)

    def _grow(self, text: str) -> None:
        if self._kind == "call":
            self._delta("input_json_delta", partial_json=text)
        else:
            name = self.reply["content"][-1]["type"]
            self._delta(f"{name}_delta", **{name: text})

    async def _finish(self, reason: ChatFinish, stop: int | str | None) -> None:
        self._end_part("completed")
        reply = self.reply
        reply |= {"stop_reason": REASONS.get(reason, "end_turn"), "usage": self._usage()}
        if isinstance(stop, str) and reason == "stop":  # not behind calls, which the client has to run
            reply |= {"stop_reason": "stop_sequence", "stop_sequence": stop}
        ended = {name: reply[name] for name in ("stop_reason", "stop_sequence")}
        self._event("message_delta", delta=ended, usage=reply["usage"])
        self._event("message_stop")

    async def fail(self, error: HttpError) -> None:
        self._event("error", error=HttpError(error.status, error.message).info())

    def _close(self, kind: Kind, text: str, _status: str) -> None:
        """Complete a block. A truncated call is removed from the whole answer."""
        block = self.reply["content"][-1]
        if kind == "reasoning":
            block["signature"] = UNSIGNED
            self._delta("signature_delta", signature=UNSIGNED)
        self._event("content_block_stop", index=self._index)
        if kind != "call":
            block[FIELDS[kind]] = text
        elif (given := object_in(text or "{}")) is not None:
            block["input"] = msgspec.Raw(given.encode())  # not decoded: a number may be too large for a float
        else:
            self.reply["content"].pop()

    def _delta(self, kind: str, **fields: str) -> None:
        self._event("content_block_delta", index=self._index, delta={"type": kind, **fields})

    def _usage(self) -> dict[str, int]:
        cached = self._call.num_cached_tokens
        return {
            "input_tokens": self._call.num_prompt_tokens - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": self._call.num_tokens,
        }

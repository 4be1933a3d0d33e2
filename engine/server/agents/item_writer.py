"""Writes an answer for the Responses API: items of reasoning, text and calls, with their stream events."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.engine.front.answer import Update
from penstock.engine.http.errors import HttpError
from penstock.engine.server.agents.items_schema import ITEM, AnyItem, ResponsesRequest
from penstock.engine.server.agents.part_writer import Kind, PartWriter
from penstock.engine.server.agents.response_store import StoredResponse
from penstock.engine.server.call import Call
from penstock.engine.server.custom_tools import CustomTool, InputDecoder
from penstock.engine.server.logprobs import TextLogprobs
from penstock.engine.server.prompts import in_thread_if
from penstock.engine.server.service import Service
from penstock.engine.server.tool_choice import ChatFinish, ReadingPlan
from penstock.engine.text.prompt import INLINE_CHARS
from penstock.engine.text.tools.reader import CallStart, Content, Piece, object_in


class ItemForm(NamedTuple):
    """The names in the item of one kind of part."""

    item_type: str
    id_prefix: str
    text_type: str  # also part of the names of the text's events
    text_field: str


ITEM_FORMS: dict[Kind | Literal["custom"], ItemForm] = {  # "custom": the call of a custom tool
    "reasoning": ItemForm("reasoning", "rs", "reasoning_text", "text"),
    "text": ItemForm("message", "msg", "output_text", "text"),
    "call": ItemForm("function_call", "fc", "function_call_arguments", "arguments"),
    "custom": ItemForm("custom_tool_call", "ctc", "custom_tool_call_input", "input"),
}

# The fields of a response besides its names and its content; Open Responses requires all of them.
DEFAULTS: dict[str, Any] = msgspec.json.decode(Path(__file__).with_name("response_defaults.json").read_bytes())


class ItemWriter(PartWriter):
    """Writes one response, and stores it when it has ended, before the last event."""

    def __init__(
        self,
        service: Service,
        call: Call,
        request: ResponsesRequest,
        input_items: Sequence[AnyItem],
        plan: ReadingPlan,
        reply: dict[str, Any],
        logprobs: TextLogprobs | None,
    ) -> None:
        """`input_items`: those of the request."""
        super().__init__(call, plan, reply, is_stream=bool(request.stream))
        self._service, self._request, self._input_items = service, request, input_items
        self._num_events = 0
        self._custom_tools = {tool.name for tool in reply["tools"] if isinstance(tool, CustomTool)}
        self._logprobs = logprobs
        self._part_logprobs: list[msgspec.Raw] = []  # of the open part, if it is text
        self._new_logprobs: list[msgspec.Raw] = []  # of the newest piece
        self._input: InputDecoder | None = None  # of the open part, if it is a custom tool's call

    def _begin(self) -> None:
        self._event("response.created", response=self.reply)
        self._event("response.in_progress", response=self.reply)

    def take(self, index: int, updates: Sequence[Update]) -> None:
        if self._logprobs is not None:
            self._logprobs.add([entry for update in updates for entry in update.logprobs or ()])
        super().take(index, updates)

    def _add(self, piece: Piece) -> None:
        self._new_logprobs = []
        if self._logprobs is not None and isinstance(piece, Content):
            self._new_logprobs = self._logprobs.take(piece.end - len(piece.text), piece.end)
        super()._add(piece)

    def _open(self, kind: Kind, call: CallStart | None) -> None:
        is_custom = call is not None and call.name in self._custom_tools
        self._input, self._part_logprobs = InputDecoder() if is_custom else None, []
        self._form = form = ITEM_FORMS["custom" if is_custom else kind]
        item_id = f"{form.id_prefix}_{self._call.id}{len(self.reply['output']):04x}"
        item: dict[str, Any] = {"type": form.item_type, "id": item_id, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name, form.text_field: ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "text" else {"summary": [], "content": []}
        self.reply["output"].append(item)
        self._event("response.output_item.added", output_index=len(self.reply["output"]) - 1, item=item)
        if call is None:
            self._about("response.content_part.added", content_index=0, part=self._part(""))

    def _grow(self, text: str, *, is_last: bool = False) -> None:
        text = text if self._input is None else self._input.feed(text, is_last=is_last)
        if text:
            fields = self._text_fields(self._kind, self._new_logprobs)
            self._about(f"response.{self._form.text_type}.delta", delta=text, **fields)
        if self._kind == "text":
            self._part_logprobs += self._new_logprobs

    async def _finish(self, reason: ChatFinish, _stop: int | str | None) -> None:
        if reason == "length":
            self.reply["incomplete_details"] = {"reason": "max_output_tokens"}
            await self._end_response("incomplete")
            return
        if self._kind in (None, "reasoning"):
            self._begin_part("text", None)
        self.reply["completed_at"] = int(time.time())
        await self._end_response("completed")

    async def fail(self, error: HttpError) -> None:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.reply["error"] = {"code": code, "message": error.message}
        await self._end_response("failed")

    async def _end_response(self, status: str) -> None:
        self._end_part("completed" if status == "completed" else "incomplete")
        self.reply |= {"status": status, "usage": await self._usage()}
        self.reply["store"] = self._request.store is not False and self._store()
        self._event(f"response.{status}", response=self.reply)

    def _store(self) -> bool:
        """Store the response; return whether it is stored."""
        output = msgspec.convert(self.reply["output"], list[ITEM])  # without log-probabilities
        items = msgspec.json.encode([*self._input_items, *output])
        previous_id = self._request.previous_response_id
        stored = StoredResponse(self._call.owner, msgspec.json.encode(self.reply), items, previous_id)
        return self._service.responses.put(self.reply["id"], stored)

    def _close(self, kind: Kind, text: str, status: str) -> None:
        item, done = self.reply["output"][-1], f"response.{self._form.text_type}.done"
        item["status"] = status
        if kind == "call":
            item["status"] = "incomplete" if object_in(text or "{}") is None else status
            if self._input is not None:
                self._grow("", is_last=True)
                text = "".join(self._input.parts)
            item[self._form.text_field] = text
            self._about(done, **{self._form.text_field: text}, name=item["name"])
        else:
            item["content"] = [self._part(text)]
            self._about(done, text=text, **self._text_fields(kind, self._part_logprobs))
            self._about("response.content_part.done", content_index=0, part=item["content"][0])
        self._event("response.output_item.done", output_index=len(self.reply["output"]) - 1, item=item)

    def _text_fields(self, kind: Kind | None, logprobs: list[msgspec.Raw]) -> dict[str, Any]:
        """Return the fields that events about a text have besides it. Clients require `logprobs`, even without any."""
        if kind == "call":
            return {}
        return {"content_index": 0, "logprobs": logprobs} if kind == "text" else {"content_index": 0}

    def _part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self._form.text_type, "text": text}
        return part | {"annotations": [], "logprobs": self._part_logprobs} if self._kind == "text" else part

    def _about(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item."""
        output = self.reply["output"]
        self._event(kind, item_id=output[-1]["id"], output_index=len(output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> None:
        super()._event(kind, sequence_number=self._num_events, **fields)
        self._num_events += 1

    async def _usage(self) -> dict[str, Any]:
        call = self._call
        thought = [
            part["text"] for item in self.reply["output"] if item["type"] == "reasoning" for part in item["content"]
        ]
        is_long = sum(map(len, thought)) > INLINE_CHARS
        encode = self._service.tokenizer.encode
        ids = await in_thread_if(is_long, lambda: [encode(text, False) for text in thought])
        num_thought = sum(map(len, ids))
        return {
            "input_tokens": call.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": call.num_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_thought, call.num_tokens)},
            "total_tokens": call.num_prompt_tokens + call.num_tokens,
        }

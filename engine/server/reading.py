"""From what an answer's reader finds to OpenAI's objects: a whole message, or the deltas of a stream."""

import secrets
from collections.abc import Sequence

from penstock.engine.messages import FinishReason
from penstock.engine.server.responses import (
    CalledFunction,
    ChatFinish,
    ChatMessage,
    Delta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from penstock.engine.text.tools.answer_reader import AnswerReader
from penstock.engine.text.tools.harmony_reader import HarmonyReader
from penstock.engine.text.tools.reader import Arguments, CallStart, Content, Piece, Reasoning

SHORT_ID = 9  # an id of this length has no prefix: Mistral's templates allow nothing but letters and digits


class Reading:
    """One choice. Made by a ReadingPlan (tool_choice.py); either `message` once, or `deltas` until the last."""

    def __init__(self, reader: AnswerReader | HarmonyReader, id_length: int, shows_reasoning: bool) -> None:
        self._reader = reader
        self._id_length = id_length
        self._shows_reasoning = shows_reasoning

    def finish_reason(self, reason: FinishReason | None) -> ChatFinish | None:
        """An answer that ended by itself and has called says so. To be asked after the last piece."""
        return "tool_calls" if reason == "stop" and self._reader.has_called else reason

    def message(self, text: str) -> ChatMessage:
        pieces = self._pieces(text, is_last=True)
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls: list[ToolCall] = []
        arguments: list[list[str]] = []
        for piece in pieces:
            if isinstance(piece, CallStart):
                calls.append(ToolCall(piece.id or self._new_id(), CalledFunction(piece.name, "")))
                arguments.append([])
            elif isinstance(piece, Arguments):
                arguments[piece.call].append(piece.text)
        for call, parts in zip(calls, arguments, strict=True):
            call.function.arguments = "".join(parts)
        message = ChatMessage(content or (None if calls or reasoning else ""))
        if reasoning:
            message.reasoning_content = reasoning
        if calls:
            message.tool_calls = calls
        return message

    def deltas(self, text: str, *, is_last: bool) -> list[Delta]:
        """One delta for each change between text, reasoning and calls."""
        return [self._delta(piece) for piece in self._pieces(text, is_last)]

    def _pieces(self, text: str, is_last: bool) -> Sequence[Piece]:
        pieces = self._reader.feed(text)
        if is_last:
            pieces = pieces + self._reader.finish()
        if self._shows_reasoning:
            return pieces
        return [piece for piece in pieces if not isinstance(piece, Reasoning)]

    def _delta(self, piece: Piece) -> Delta:
        if isinstance(piece, Content):
            return Delta(content=piece.text)
        if isinstance(piece, Reasoning):
            return Delta(reasoning_content=piece.text)
        if isinstance(piece, Arguments):
            return Delta(tool_calls=[ToolCallDelta(piece.call, FunctionDelta(arguments=piece.text))])
        return Delta(
            tool_calls=[
                ToolCallDelta(piece.call, FunctionDelta(piece.name), id=piece.id or self._new_id(), type="function")
            ]
        )

    def _new_id(self) -> str:
        if self._id_length == SHORT_ID:
            return secrets.token_hex(SHORT_ID)[:SHORT_ID]
        return f"call_{secrets.token_hex(self._id_length // 2)}"

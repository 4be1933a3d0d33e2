"""Parses an answer into pieces (text, reasoning, calls) for the writers of all chat APIs."""

import secrets

from penstock.engine.messages import FinishReason
from penstock.engine.server.responses import ChatFinish
from penstock.engine.text.tools.answer_reader import AnswerReader
from penstock.engine.text.tools.harmony_reader import HarmonyReader
from penstock.engine.text.tools.reader import CallStart, Content, Piece, Reasoning

SHORT_ID = 9  # an id of this length has no prefix: Mistral's templates only allow letters and digits


class Reading:
    """Parses one choice; created by a ReadingPlan (tool_choice.py). Without a reader, the whole answer is text."""

    def __init__(
        self, reader: AnswerReader | HarmonyReader | None, id_length: int = 0, shows_reasoning: bool = True
    ) -> None:
        self._reader = reader
        self._id_length = id_length
        self._shows_reasoning = shows_reasoning

    def pieces(self, text: str, *, is_last: bool) -> list[Piece]:
        """Return the pieces that the next text of the answer completes, with an id for every call."""
        if self._reader is None:
            return [Content(text)] if text else []
        found = self._reader.feed(text)
        if is_last:
            found = found + self._reader.finish()
        return [
            piece._replace(id=self._new_id()) if isinstance(piece, CallStart) else piece
            for piece in found
            if self._shows_reasoning or not isinstance(piece, Reasoning)
        ]

    def finish_reason(self, reason: FinishReason | None) -> ChatFinish | None:
        """Return the finish reason, with "tool_calls" instead of "stop" after calls. Call it after the last piece."""
        has_called = self._reader is not None and self._reader.has_called
        return "tool_calls" if reason == "stop" and has_called else reason

    def _new_id(self) -> str:
        if self._id_length == SHORT_ID:
            return secrets.token_hex(SHORT_ID)[:SHORT_ID]
        return f"call_{secrets.token_hex(self._id_length // 2)}"

"""One answer of a model as it comes: reasoning first, then text and calls."""

from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.reader import MAX_CALLS, CallReader, Content, Piece
from penstock.engine.text.tools.thinking import Thinking, ThinkReader


class AnswerReader:
    """`feed` it piece by piece, then `finish`. `is_certain`: a grammar holds the model to its format of calls."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        self._calls = None
        if calls is not None:
            names = frozenset(function.name for function in calls.functions)
            limit = MAX_CALLS if calls.many else 1
            self._calls = CallReader(calls.form, names, is_certain=is_certain, max_calls=limit)
        self._thinking = None
        if thinking is not None:
            self._thinking = ThinkReader(thinking.marks, thinking.is_open, self._answer)

    @property
    def has_called(self) -> bool:
        """There are calls, and the last one is complete."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_within_call

    def feed(self, text: str) -> list[Piece]:
        return self._answer(text) if self._thinking is None else self._thinking.feed(text)

    def finish(self) -> list[Piece]:
        last = [] if self._thinking is None else self._thinking.finish()
        return last if self._calls is None else last + self._calls.finish()

    def check(self) -> None:
        for part in (self._calls, self._thinking):
            if part is not None:
                part.check()

    def _answer(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Content(text)] if text else []

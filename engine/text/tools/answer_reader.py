"""Incremental parser of one answer: optional reasoning first, then text and tool calls.

Whitespace next to the reasoning marks is dropped. The result does not depend on how the text is split into pieces.
"""

from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.reader import MAX_CALLS, CallReader, Content, Piece, Reasoning
from penstock.engine.text.tools.scan import Source, Wait, num_held, skip_blank
from penstock.engine.text.tools.thinking import Thinking


class AnswerReader(Source):
    """Parses one answer: call `feed` per piece, then `finish`. `is_certain`: a grammar enforces the call format."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        super().__init__()
        self._calls = None
        if calls is not None:
            functions = {function.name: function.parameters for function in calls.functions}
            limit = MAX_CALLS if calls.many else 1
            held = ("", *calls.form.marks) if calls.must else calls.form.triggers
            self._calls = CallReader(calls.form, functions, held if is_certain else (), max_calls=limit)
        self._is_thinking = self._has_reasoned = False
        self._blanks: list[str] = []  # whitespace at the end of the reasoning
        self._out: list[Piece] = []
        self._thinking = None if thinking is None else self._think(thinking)  # None: reasoning has ended

    @property
    def has_called(self) -> bool:
        """True if the answer has calls and the last one is complete."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_within_call

    def feed(self, text: str) -> list[Piece]:
        if self._thinking is None:
            return self._answer(text)
        self.text += text
        if next(self._thinking, True):
            self._thinking = None
            self._out += self._answer(self.text[self.at :])
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. Unfinished reasoning is returned as reasoning."""
        if self._is_thinking:
            self._reason(self.text[self.at :])
        elif self._thinking is not None:
            self._out += self._answer(self.text[self.at :])
        self._thinking = None
        return self._taken() + (self._calls.finish() if self._calls is not None else [])

    def check(self) -> None:
        """Assert the invariants that hold between two pieces."""
        assert not self._out and not (self._is_thinking and self._thinking is None)
        if self._calls is not None:
            self._calls.check()

    def _think(self, thinking: Thinking) -> Wait[None]:
        """Parse the reasoning up to the beginning of the answer; yield when more text is needed."""
        opening, closing, is_implied = thinking.marks
        self._is_thinking, place = thinking.is_open, 0
        while not self._is_thinking:
            place = skip_blank(self.text, place)
            if opening.startswith(self.text[place:]) and self.text[place:] != opening:
                yield
            elif self.text.startswith(opening, place):
                self._is_thinking, self.at = True, place + len(opening)
            elif is_implied and not thinking.is_over:
                self._is_thinking = True
            else:
                return
        while (end := self.text.find(closing, self.at)) < 0:
            stop = len(self.text) - num_held(self.text, self.at, (closing,))
            self._reason(self.text[self.at : stop])
            self.at = stop
            yield from self.wait()
        self._reason(self.text[self.at : end])
        self._is_thinking, self.at = False, skip_blank(self.text, end + len(closing))
        while self.at == len(self.text):
            yield from self.wait()
            self.at = skip_blank(self.text, self.at)

    def _reason(self, text: str) -> None:
        body = text.rstrip()
        if body:
            whole = "".join(self._blanks) + body
            self._out.append(Reasoning(whole if self._has_reasoned else whole.lstrip()))
            self._has_reasoned, self._blanks = True, []
        self._blanks.append(text[len(body) :])

    def _answer(self, text: str) -> list[Piece]:
        if self._calls is not None:
            return self._calls.feed(text)
        return [Content(text)] if text else []

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out

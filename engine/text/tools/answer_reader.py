"""Incremental parser of one answer: optional reasoning first, then text and tool calls.

Whitespace next to the reasoning marks is dropped. The result does not depend on how the text is split into pieces.
"""

from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.reader import MAX_CALLS, CallReader, Piece, Reasoning
from penstock.engine.text.tools.scan import Wait, num_held, skip_blank
from penstock.engine.text.tools.thinking import Thinking


class AnswerReader(CallReader):
    """Parses one answer: call `feed` per piece, then `finish`. `is_certain`: a grammar enforces the call format."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        self._thinking = thinking
        self._is_thinking = self._has_reasoned = False
        if calls is None:
            super().__init__(None, {})
            return
        functions = {function.name: function.parameters for function in calls.functions}
        held = ("", *calls.form.marks) if calls.must else calls.form.triggers
        super().__init__(calls.form, functions, held if is_certain else (), max_calls=MAX_CALLS if calls.many else 1)

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. Unfinished reasoning is returned as reasoning."""
        if self._is_thinking:
            self._reason(self.text[self.at :])
            self.at, self._blanks = len(self.text), []
        return super().finish()

    def _answer(self) -> Wait[None]:
        if self._thinking is not None:
            yield from self._think(self._thinking)
        yield from super()._answer()

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
        self._is_thinking, self._blanks, self.at = False, [], skip_blank(self.text, end + len(closing))
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

"""Incremental parser of one answer: optional reasoning first, then text and tool calls.

Whitespace next to the reasoning marks is dropped. The result does not depend on how the text is split into pieces.
"""

from penstock.engine.text.tools.formats import Calls
from penstock.engine.text.tools.reader import MAX_CALLS, CallReader, Content, Piece, Reasoning
from penstock.engine.text.tools.scan import Wait, num_held
from penstock.engine.text.tools.thinking import Thinking


class AnswerReader:
    """Parses one answer: call `feed` per piece, then `finish`. `is_certain`: a grammar enforces the call format."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        self._calls = None
        if calls is not None:
            functions = {function.name: function.parameters for function in calls.functions}
            limit = MAX_CALLS if calls.many else 1
            held = ("", *calls.form.marks) if calls.must else calls.form.triggers
            self._calls = CallReader(calls.form, functions, held if is_certain else (), max_calls=limit)
        self._is_thinking = self._has_reasoned = False
        self._text = ""  # undecided text, which may be the beginning of a mark
        self._blanks: list[str] = []  # undecided whitespace before `_text`
        self._out: list[Piece] = []
        self._thinking = None if thinking is None else self._think(thinking)  # None: reasoning has ended

    @property
    def has_called(self) -> bool:
        """True if the answer has calls and the last one is complete."""
        return self._calls is not None and self._calls.num_calls > 0 and not self._calls.is_within_call

    def feed(self, text: str) -> list[Piece]:
        if self._thinking is None:
            return self._answer(text)
        self._text += text
        if next(self._thinking, True):
            self._thinking = None
            self._out += self._answer(self._text)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. Unfinished reasoning is returned as reasoning."""
        if self._is_thinking:
            self._reason(self._text)
        elif self._thinking is not None:
            self._out += self._answer("".join(self._blanks) + self._text)
        self._thinking = None
        return self._taken() + (self._calls.finish() if self._calls is not None else [])

    def check(self) -> None:
        """Assert the invariants that hold between two pieces."""
        assert not self._out and not (self._is_thinking and self._thinking is None)
        if self._calls is not None:
            self._calls.check()

    def _think(self, thinking: Thinking) -> Wait[None]:
        """Parse the reasoning, leaving the beginning of the answer in `_text`; yield when more text is needed."""
        opening, closing, is_implied = thinking.marks
        self._is_thinking = thinking.is_open
        while not self._is_thinking:
            body = self._text.lstrip()
            self._blanks.append(self._text[: len(self._text) - len(body)])
            self._text = body
            if body.startswith(opening):
                self._is_thinking, self._text, self._blanks = True, body[len(opening) :], []
            elif opening.startswith(body):
                yield
            elif is_implied and not thinking.is_over:
                self._is_thinking = True
            else:
                self._text = "".join(self._blanks) + body
                return
        while (end := self._text.find(closing)) < 0:
            end = len(self._text) - num_held(self._text, 0, (closing,))
            self._reason(self._text[:end])
            self._text = self._text[end:]
            yield
        self._reason(self._text[:end])
        self._is_thinking, self._text, self._blanks = False, self._text[end + len(closing) :].lstrip(), []
        while not self._text:
            yield
            self._text = self._text.lstrip()

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

"""Reasoning in an answer: the text between two marks at its beginning, or from its beginning on where the prompt has
opened it already. Blanks next to the marks are dropped; the result does not depend on how the text is cut."""

from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.text.tools.reader import Piece, Reasoning


class Marks(NamedTuple):
    open: str
    close: str


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")
# The names that other servers give to the same thing are accepted.
NAMES = {"think": THINK, "deepseek_r1": THINK, "qwen3": THINK, "mistral": MISTRAL}


def detect(source: str) -> Marks | None:
    """The marks that a chat template knows; None: its model does not reason aloud."""
    return next((marks for marks in (THINK, MISTRAL) if marks.open in source or marks.close in source), None)


class Thinking(NamedTuple):
    """How an answer may begin: within reasoning (`is_open`), or with it unless the prompt has closed it (`is_over`),
    which asks the model not to think."""

    marks: Marks
    is_open: bool = False
    is_over: bool = False


def thinking_after(marks: Marks, prompt: str) -> Thinking:
    end = prompt.rstrip()
    return Thinking(marks, end.endswith(marks.open), end.endswith(marks.close))


class ThinkReader:
    """The state of one answer. What is not reasoning goes through `rest`."""

    def __init__(
        self,
        marks: Marks,
        is_open: bool,
        rest: Callable[[str], list[Piece]],
    ) -> None:
        self._marks = marks
        self._rest = rest
        self._is_thinking = is_open
        self._is_over = False
        self._held = ""  # what may be the beginning of a mark
        self._blanks: list[str] = []
        self._is_fresh = True  # no text since the last mark

    def feed(self, text: str) -> list[Piece]:
        if self._is_over and not self._is_fresh:
            return self._rest(text)
        text = self._held + text
        self._held = ""
        if not self._is_thinking and not self._is_over:
            return self._begin(text)
        return self._think(text) if self._is_thinking else self._resume(text)

    def finish(self) -> list[Piece]:
        """What was held back; unfinished reasoning stays reasoning."""
        held, self._held = self._held, ""
        if self._is_thinking:
            return self._reasoning(held)
        before, self._blanks = "".join(self._blanks), []
        return [] if self._is_over else self._rest(before + held)

    def check(self) -> None:
        """What holds between two pieces."""
        assert not (self._is_thinking and self._is_over)
        assert len(self._held) < max(map(len, self._marks))

    def _begin(self, text: str) -> list[Piece]:
        """Blanks, then the mark or not."""
        body = text.lstrip()
        if len(body) < len(text):
            self._blanks.append(text[: len(text) - len(body)])
        mark = self._marks.open
        if body.startswith(mark):
            self._is_thinking, self._blanks = True, []
            return self._think(body[len(mark) :])
        if mark.startswith(body):
            self._held = body
            return []
        self._is_over, self._is_fresh = True, False
        before, self._blanks = "".join(self._blanks), []
        return self._rest(before + body)

    def _think(self, text: str) -> list[Piece]:
        mark = self._marks.close
        end = text.find(mark)
        if end < 0:
            held = next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)
            end = len(text) - held
            self._held = text[end:]
            return self._reasoning(text[:end])
        pieces = self._reasoning(text[:end])
        self._is_thinking, self._is_over, self._is_fresh, self._blanks = False, True, True, []
        return pieces + self._resume(text[end + len(mark) :])

    def _resume(self, text: str) -> list[Piece]:
        """The answer behind the reasoning, without the blanks that separate them."""
        text = text.lstrip()
        if not text:
            return []
        self._is_fresh = False
        return self._rest(text)

    def _reasoning(self, text: str) -> list[Piece]:
        if self._is_fresh:
            text = text.lstrip()
        body = text.rstrip()
        pieces: list[Piece] = []
        if body:
            pieces.append(Reasoning("".join(self._blanks) + body))
            self._is_fresh, self._blanks = False, []
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])
        return pieces

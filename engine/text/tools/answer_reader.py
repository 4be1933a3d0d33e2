"""Incremental parser of one answer: optional reasoning first, then text and tool calls; call_kinds.py parses the calls.

Whitespace next to the reasoning marks and around calls is dropped; text that is not a call is returned verbatim as
content. The result does not depend on how the text is split into pieces.
"""

import re
from collections.abc import Collection

from penstock.engine.text.tools.call_kinds import Calls
from penstock.engine.text.tools.reader import MAX_CALLS, CallReader, Content, Piece, Reasoning
from penstock.engine.text.tools.scan import Malformed, Wait, num_held, skip_blank
from penstock.engine.text.tools.thinking import Thinking

MAX_FALSE = 64  # failed attempts to parse a call, after which the rest of the answer is text


class AnswerReader(CallReader):
    """Parses one answer: call `feed` per piece, then `finish`. `is_certain`: a grammar enforces the call format."""

    def __init__(self, calls: Calls | None, thinking: Thinking | None, *, is_certain: bool) -> None:
        functions = {} if calls is None else {function.name: function.parameters for function in calls.functions}
        super().__init__(functions, MAX_CALLS if calls is None or calls.many else 1)
        self._thinking = thinking
        self._is_thinking = self._has_reasoned = False
        self._num_false = 0
        self._form = form = None if calls is None else calls.form
        self._marks = () if form is None else form.marks
        self._is_bare = form is not None and form.is_bare
        bare = [r"(?<=\n\n)(?=[{\[])"] if self._is_bare else []
        self._opening = re.compile("|".join([*map(re.escape, self._marks), *bare]))
        self._is_calling = False  # the undecided text is behind the mark of a call, or begins a call without a mark
        self._held: Collection[str] = ()  # the marks after which a grammar enforces calls; "": calls without a mark
        if calls is not None and is_certain:
            self._held = ("", *self._marks) if calls.must else calls.form.triggers

    @property
    def is_enforced(self) -> bool:
        is_call = "" in self._held or (self._is_calling and self.is_certain)
        return is_call and not self._is_thinking

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far. Unfinished reasoning is returned as reasoning; an unfinished closing mark
        of a complete call is dropped, and so is the beginning of a call that a grammar enforces."""
        if self._is_thinking:
            self._reason(self.text[self.at :])
            self.at, self._blanks = len(self.text), []
        self._reading.close()
        if self.is_enforced:
            self._blanks = []
        else:
            is_dropped = self.is_closing or self.is_within_call
            end = self.at if is_dropped else len(self.text)
            self._content("".join(self.raw) + self.text[self.at : end], end)
        if self._blanks and not self.num_calls:
            self._out.append(Content("".join(self._blanks), self.start + len(self.text)))
        self.at, self._blanks = len(self.text), []
        return self._taken()

    def _answer(self) -> Wait[None]:
        """Parse the reasoning, then text and calls alternately."""
        if self._thinking is not None:
            yield from self._think(self._thinking)
        is_call = False
        if self._is_bare:
            yield from self.skip_blanks()
            is_call = self.text[self.at] in "{["
        while True:
            mark = "" if is_call else (yield from self._read_text())
            is_call, self._is_calling, self.is_certain = False, True, mark in self._held
            assert self._form is not None
            try:
                yield from self._form.parse(self, mark)
            except Malformed as error:
                self._give_up(error.position)
            self.is_closing = self.is_within_call = self._is_calling = False

    def _read_text(self) -> Wait[str]:
        """Read content up to a mark and return the mark."""
        may_call = bool(self._marks) and not self.is_full and self._num_false < MAX_FALSE
        while True:
            text, at = self.text, self.at
            found = self._opening.search(text, at) if may_call else None
            if found is not None:
                self._content(text[at : found.start()], found.start())
                self.raw, self.json, self.at = [found[0]], [], found.end()
                return found[0]
            self.at = len(text) - (num_held(text, at, self._marks) if may_call else 0)
            self._content(text[at : self.at], self.at)
            yield from self.wait()

    def _give_up(self, end: int) -> None:
        """Turn the text of a failed call into content. It is not searched again, since the time for many failed calls
        would be quadratic."""
        self._flush()
        self._content("".join(self.raw) + self.text[self.at : end], end)
        self.raw, self.at = [], end
        self._num_false += 1

    def _content(self, text: str, end: int) -> None:
        """Add text that ends at `end` to the content."""
        body = text.rstrip() if self._marks else text
        if body:
            self._out.append(Content("".join(self._blanks) + body, self.start + end - len(text) + len(body)))
            self._blanks = []
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

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

"""Incremental parser that splits a model's answer into text and tool calls; formats.py parses what follows a mark.

The result does not depend on how the text is split into pieces. A call is announced only once its name and the opening
brace of its arguments have arrived; text that is not a call is returned verbatim as content. If a grammar enforces the
call, its arguments are streamed. Otherwise they are held back until the call is complete and valid, since a stream
cannot retract text. Whitespace around calls is dropped.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Protocol

import msgspec

from penstock.engine.text.tools.scan import Malformed, Source, Wait, num_held, skip_blank

MAX_CALLS = 128  # per answer; further calls are returned as text
MAX_FALSE = 64  # failed attempts to parse a call, after which the rest of the answer is text


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int
    name: str
    id: str = ""  # set by the server


class Arguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


class CallForm(Protocol):
    """The part of a format (formats.py) that the reader needs."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that open calls."""

    @property
    def is_bare(self) -> bool:
        """True if a paragraph that begins with a bracket may be a call without a mark."""

    def parse(self, reader: "CallReader", mark: str) -> Wait[None]:
        """Parse the calls that follow `mark` ("" if there is none); raise Malformed if the text is not a call."""


class CallReader(Source):
    """Parses one answer: call `feed` for each piece, then `finish`. `functions` maps names to schemas. `held` are the
    marks after which a grammar enforces calls ("" for calls without a mark). Without `form`, the whole answer is text."""

    def __init__(
        self,
        form: CallForm | None,
        functions: Mapping[str, Any],
        held: Collection[str] = (),
        *,
        max_calls: int = MAX_CALLS,
    ) -> None:
        super().__init__()
        self.functions = functions
        self.num_calls = 0
        self.is_certain = False  # a grammar enforces the current call
        self.is_within_call = False  # the text so far ends within a call that has been announced
        self.is_closing = False  # the undecided text can only be the end of a complete call
        self._num_false = 0
        self._form = form
        self._held = held
        self._max_calls = max_calls
        self._marks = () if form is None else form.marks
        self._is_bare = form is not None and form.is_bare
        bare = [r"(?<=\n\n)(?=[{\[])"] if self._is_bare else []
        self._opening = re.compile("|".join([*map(re.escape, self._marks), *bare]))
        self._blanks: list[str] = []  # whitespace at the end of the content, dropped if a call follows
        self._out: list[Piece] = []
        self._reading = self._answer()

    @property
    def has_called(self) -> bool:
        """True if the answer has calls and the last one is complete."""
        return self.num_calls > 0 and not self.is_within_call

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` completes."""
        self.text += text
        next(self._reading)
        self._flush()
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far; an unfinished closing mark of a complete call is dropped."""
        self._reading.close()
        is_dropped = self.is_closing or self.is_within_call
        self._content("".join(self.raw) + ("" if is_dropped else self.text[self.at :]))
        if self._blanks and not self.num_calls:
            self._out.append(Content("".join(self._blanks)))
        self.at, self._blanks = len(self.text), []
        return self._taken()

    def check(self) -> None:
        """Assert the invariants that hold between two pieces."""
        assert 0 <= self.at <= len(self.text)
        assert not self._out
        assert not (self.raw and self.is_within_call)
        assert self.num_calls <= self._max_calls

    # -- used by the formats -------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """True if the answer has as many calls as allowed."""
        return self.num_calls == self._max_calls

    def begin_call(self, name: str) -> None:
        """Raise Malformed if there is no such function; announce the call if a grammar enforces it."""
        if name not in self.functions:
            raise Malformed(self.at)
        if self.is_certain:
            self._announce(name)

    def end_call(self, name: str) -> None:
        """End a call. Unless it was announced, raise Malformed if its arguments are not a JSON object."""
        if not self.is_within_call:
            found = "".join(self.json) or "{}"
            arguments = object_in(found, is_quoted=found[0] == '"')
            if arguments is None:
                raise Malformed(self.at)
            self._announce(name)
            self.json.append(arguments)
        self._flush()
        self.is_within_call = False

    def skip(self, end: int) -> None:
        """Drop the text up to `end`, which closes or separates calls, and the whitespace before it."""
        self.at, self._blanks = end, []

    def skip_word(self, word: str) -> Wait[bool]:
        """Skip whitespace and then `word` if it follows; return whether it did."""
        yield from self.skip_blanks()
        end = yield from self.passed(self.at, word)
        is_here = end > self.at
        if is_here:
            self.skip(end)
        return is_here

    def skip_blanks(self) -> Wait[None]:
        """Skip whitespace, which becomes content unless a call follows."""
        while True:
            end = skip_blank(self.text, self.at)
            if end > self.at:
                self._blanks.append(self.text[self.at : end])
                self.at = end
            if end < len(self.text):
                return
            yield from self.wait()

    # -- text between calls --------------------------------------------------------------------------------------

    def _answer(self) -> Wait[None]:
        """Parse text and calls alternately, yielding whenever more text is needed."""
        is_call = False
        if self._is_bare:
            yield from self.skip_blanks()
            is_call = self.text[self.at] in "{["
        while True:
            mark = "" if is_call else (yield from self._read_text())
            is_call, self.is_certain = False, mark in self._held
            assert self._form is not None
            try:
                yield from self._form.parse(self, mark)
            except Malformed as error:
                self._give_up(error.place)
            self.is_closing = self.is_within_call = False

    def _read_text(self) -> Wait[str]:
        """Read content up to a mark and return the mark."""
        may_call = bool(self._marks) and not self.is_full and self._num_false < MAX_FALSE
        while True:
            text, at = self.text, self.at
            found = self._opening.search(text, at) if may_call else None
            if found is not None:
                self._content(text[at : found.start()])
                self.raw, self.json, self.at = [found[0]], [], found.end()
                return found[0]
            self.at = len(text) - (num_held(text, at, self._marks) if may_call else 0)
            self._content(text[at : self.at])
            yield from self.wait()

    def _give_up(self, place: int) -> None:
        """Turn the text of a failed call into content. It is not searched again, since the time for many failed calls
        would be quadratic."""
        self._flush()
        self._content("".join(self.raw) + self.text[self.at : place])
        self.raw, self.at = [], place
        self._num_false += 1

    def _announce(self, name: str) -> None:
        """Begin a call in the output. Until `end_call`, its arguments are passed on as they are read."""
        self._out.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self.raw, self.json, self._blanks = [], [], []
        self.is_within_call = True

    def _flush(self) -> None:
        """Pass on the arguments of an announced call that were read since the last time."""
        if self.is_within_call:
            if found := "".join(self.json):
                self._out.append(Arguments(self.num_calls - 1, found))
            self.raw, self.json = [], []

    def _content(self, text: str) -> None:
        body = text.rstrip() if self._marks else text
        if body:
            self._out.append(Content("".join(self._blanks) + body))
            self._blanks = []
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def object_in(text: str, is_quoted: bool = False) -> str | None:
    """Return the text of a JSON object, or of the object in a JSON string; None if it is not an object. Values are not
    decoded, since a number may be too large for a float."""
    try:
        text = msgspec.json.decode(text, type=str) if is_quoted else text
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return text

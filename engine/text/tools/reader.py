"""The pieces of an answer, and what its parsers (answer_reader.py, harmony.py) share: the calls.

A call is announced only once its name and the opening brace of its arguments have arrived. If a grammar enforces the
call, its arguments are streamed. Otherwise they are held back until the call is complete and valid, since a stream
cannot retract text.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.engine.text.tools.scan import Malformed, Source, Wait, skip_blank

MAX_CALLS = 128  # per answer; further calls are returned as text


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str
    end: int  # position after it in the text of the whole answer, of which it is one run


class CallStart(NamedTuple):
    call: int
    name: str
    id: str = ""  # set by the server


class Arguments(NamedTuple):
    """A piece of the JSON text of a call's arguments."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


class CallReader(Source, ABC):
    """Parses one answer: call `feed` for each piece, then `finish`. `functions` maps names to schemas."""

    def __init__(self, functions: Mapping[str, Any], max_calls: int = MAX_CALLS) -> None:
        super().__init__()
        self.functions = functions
        self.num_calls = 0
        self.is_certain = False  # a grammar enforces the current call
        self.is_within_call = False  # the text so far ends within a call that has been announced
        self.is_closing = False  # the undecided text can only be the end of a complete call
        self._max_calls = max_calls
        self._blanks: list[str] = []  # whitespace at the end of the content, dropped if a call follows
        self._out: list[Piece] = []
        self._reading = self._answer()

    @property
    @abstractmethod
    def is_enforced(self) -> bool:
        """True if the newest text is part of a call that a grammar enforces, from its opening to its closing mark."""

    @abstractmethod
    def _answer(self) -> Wait[None]:
        """Parse the whole answer, yielding whenever more text is needed."""

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

    @abstractmethod
    def finish(self) -> list[Piece]:
        """Return the pieces held back so far."""

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

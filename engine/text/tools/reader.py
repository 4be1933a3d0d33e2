"""A model's answer as it comes, taken apart into text and calls.

The result does not depend on how the text is cut. A call is announced when its name and the brace that opens its
arguments are there, and only then: what is no call is content, to the letter. Where a grammar holds the model
(`is_certain`), arguments are passed on as they come; elsewhere they are kept until the call is complete and valid,
since a stream cannot take back what it has said. Blanks around calls are dropped.
"""

import re
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from penstock.engine.text.tools.formats import After, Format
from penstock.engine.text.tools.scan import Head, Malformed, ObjectScan, call_tail, skip_blank

MAX_CALLS = 128  # in one answer; what comes on top is text
MAX_FALSE = 64  # beginnings that turned out to be no calls; an answer with more of them is text from there on


CONTEXT = 2  # characters of what has been read that say whether a paragraph begins


class Reasoning(NamedTuple):
    text: str


class Content(NamedTuple):
    text: str


class CallStart(NamedTuple):
    call: int
    name: str


class Arguments(NamedTuple):
    """More of the JSON text that is the arguments of a call."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


class _At(Enum):
    START = auto()  # nothing but blanks so far
    TEXT = auto()
    HEAD = auto()
    ARGUMENTS = auto()
    TAIL = auto()
    AFTER = auto()


class CallReader:
    """The state of one answer: `feed` it piece by piece, then `finish`."""

    def __init__(
        self, form: Format, names: Collection[str], *, is_certain: bool = False, max_calls: int = MAX_CALLS
    ) -> None:
        self.num_calls = 0
        self._num_false = 0
        self._form = form
        self._names = names
        self._is_certain = is_certain
        self._max_calls = max_calls
        openings = [*map(re.escape, form.marks), *([r"(?<=\n\n)(?=[{\[])"] if form.is_bare else [])]
        self._opening = re.compile("|".join(openings))
        self._state = _At.START if form.is_bare else _At.TEXT
        self._text = ""  # what is not decided yet, and the place in it
        self._at = 0
        self._blanks: list[str] = []  # of the content: dropped if a call follows
        self._raw: list[str] = []  # of a call that may still turn out to be content
        self._arguments: list[str] = []
        self._mark = ""  # of the call that is read or was read last
        self._is_first = True
        self._in_list = False
        self._is_told = False  # the call that is read has been announced before its end
        self._head = Head(None, 0)
        self._scan = ObjectScan()
        self._out: list[Piece] = []

    @property
    def is_within_call(self) -> bool:
        """The text so far ends within a call that has been announced."""
        return self._is_told and self._state in (_At.ARGUMENTS, _At.TAIL)

    def feed(self, text: str) -> list[Piece]:
        """What `text` makes certain."""
        kept = max(self._at - CONTEXT, 0)
        self._text = self._text[kept:] + text
        self._at -= kept
        steps = {
            _At.START: self._start,
            _At.TEXT: self._read_text,
            _At.HEAD: self._read_head,
            _At.ARGUMENTS: self._read_arguments,
            _At.TAIL: self._read_tail,
            _At.AFTER: self._read_after,
        }
        goes_on = True
        while goes_on:
            try:
                goes_on = steps[self._state]()
            except Malformed as error:
                self._give_up(error.place)
        return self._taken()

    def finish(self) -> list[Piece]:
        """What was held back, when the answer is over. Half of the signs that close a complete call is no content."""
        is_closing = self._state is _At.AFTER or (self._state is _At.TAIL and self._is_told)
        self._content("".join(self._raw) + ("" if is_closing else self._text[self._at :]))
        if self._blanks and not self.num_calls:
            self._out.append(Content("".join(self._blanks)))
        self._at, self._blanks = len(self._text), []
        return self._taken()

    def check(self) -> None:
        """What holds between two pieces."""
        assert 0 <= self._at <= len(self._text)
        assert not self._out
        assert not self._raw or self._state in (_At.HEAD, _At.ARGUMENTS, _At.TAIL)
        assert not self._arguments or (self._state in (_At.HEAD, _At.ARGUMENTS, _At.TAIL) and not self._is_told)
        assert self.num_calls <= self._max_calls

    # -- the states: each reads on from self._at, and says whether the next one may try ---------------------

    def _start(self) -> bool:
        self._skip_blanks()
        if self._at == len(self._text):
            return False
        self._state = _At.HEAD if self._text[self._at] in "{[" else _At.TEXT
        return True

    def _read_text(self) -> bool:
        text, at = self._text, self._at
        may_call = self.num_calls < self._max_calls and self._num_false < MAX_FALSE
        found = self._opening.search(text, at) if may_call else None
        if found is not None:
            self._content(text[at : found.start()])
            self._raw, self._mark, self._at = [found[0]], found[0], found.end()
            self._is_first, self._state = True, _At.HEAD
            return True
        self._at = len(text) - (_num_held(text, at, self._form.marks) if may_call else 0)
        self._content(text[at : self._at])
        return False

    def _read_head(self) -> bool:
        head = self._form.head(self._text, self._at, self._mark, self._is_first)
        if head is None:
            return False
        if (head.name is not None or head.kind == "none") and head.name not in self._names:
            raise Malformed(head.end)
        self._head, self._scan = head, ObjectScan(in_string=head.kind == "string")
        self._in_list = head.is_list or (self._in_list and not self._is_first)
        self._arguments = {"object": [], "string": ['"'], "none": ["{}"]}[head.kind]
        self._is_told = self._is_certain and head.name is not None and head.kind == "object"
        if self._is_told:
            self._announce()
        else:
            self._raw.append(self._text[self._at : head.end])
        self._at, self._state = head.end, _At.ARGUMENTS
        if head.kind == "none":
            self._complete()
        return True

    def _read_arguments(self) -> bool:
        text, at = self._text, self._at
        try:
            end = self._scan.feed(text, at)
        except Malformed as error:
            if not self._is_told:
                raise
            self._take_arguments(text[at : error.place])  # they were announced: what they are so far is theirs
            self._at, self._state = error.place, _At.TEXT
            return True
        self._at = len(text) if end is None else end
        self._take_arguments(text[at : self._at])
        if end is None:
            return False
        if self._head.has_tail:
            self._state = _At.TAIL
        else:
            self._complete()
        return True

    def _read_tail(self) -> bool:
        tail = call_tail(self._text, self._at, self._head.name)
        if tail is None:
            return False
        if tail.name not in self._names:
            raise Malformed(tail.end)
        if not self._is_told:
            self._raw.append(self._text[self._at : tail.end])
        self._head, self._at = self._head._replace(name=tail.name), tail.end
        self._complete()
        return True

    def _read_after(self) -> bool:
        self._skip_blanks()
        if self._at == len(self._text):
            return False
        has_tail = self._head.has_tail
        after = self._form.after(self._text, self._at, self._mark, self._in_list) if has_tail else After(self._at)
        if after is None:
            return False
        if after.is_call and self.num_calls < self._max_calls:
            self._raw, self._state = [self._text[self._at : after.end]], _At.HEAD
            self._is_first = not self._in_list
            if not self._in_list and not self._form.closers.get(self._mark):
                self._mark = ""  # the mark was for one call
        elif after.is_call or after.end == self._at:
            self._state = _At.TEXT
            return True
        elif self._in_list:
            self._in_list = False
            self._state = _At.AFTER if self._form.goes_on(self._mark) else _At.TEXT
        else:
            self._mark = ""
            self._state = _At.AFTER if self._form.is_bare else _At.TEXT
        if after.end > self._at:
            self._blanks = []  # they stood before a sign of the format
        self._at = after.end
        return True

    # -- what the states do ---------------------------------------------------------------------------------

    def _take_arguments(self, text: str) -> None:
        if not self._is_told:
            self._raw.append(text)
            self._arguments.append(text)
        elif text:
            self._out.append(Arguments(self.num_calls - 1, text))

    def _complete(self) -> None:
        """The call is all there. Where it has not been announced, it is now, if it is valid."""
        self._state = _At.AFTER
        if self._is_told:
            return
        arguments = _object_in("".join(self._arguments), self._head.kind == "string")
        if arguments is None:
            self._give_up(self._at)
            return
        self._announce()
        self._out.append(Arguments(self.num_calls - 1, arguments))
        self._raw, self._arguments = [], []

    def _announce(self) -> None:
        assert self._head.name is not None
        self._out.append(CallStart(self.num_calls, self._head.name))
        self.num_calls += 1
        self._raw, self._blanks = [], []

    def _give_up(self, place: int) -> None:
        """It is no call: all that was read of it is content. It is not searched again, or many such would cost the
        square of their length."""
        self._content("".join(self._raw) + self._text[self._at : place])
        self._raw, self._arguments = [], []
        self._at, self._state = place, _At.TEXT
        self._num_false += 1

    def _content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._out.append(Content("".join(self._blanks) + body))
            self._blanks = []
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _skip_blanks(self) -> None:
        end = skip_blank(self._text, self._at)
        if end > self._at:
            self._blanks.append(self._text[self._at : end])
            self._at = end

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def _num_held(text: str, at: int, marks: Collection[str]) -> int:
    """How many characters at the end of the text may be the beginning of a mark."""
    longest = min(max(map(len, marks)) - 1, len(text) - at)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def _object_in(text: str, is_quoted: bool) -> str | None:
    """The text of a JSON object, or the one that a JSON string holds; None where it is none."""
    try:
        text = msgspec.json.decode(text, type=str) if is_quoted else text
        return text if isinstance(msgspec.json.decode(text), dict) else None
    except (msgspec.DecodeError, RecursionError):
        return None

"""Splits a model's answer into text and calls, as it comes.

The result does not depend on how the text is cut. A call is announced when its name and the brace that opens its
arguments are there, and only then: what is no call is content, to the letter. Where a grammar holds the
call, arguments are passed on as they come; elsewhere they are kept until the call is complete and valid,
since a stream cannot take back what it has said. Blanks around calls are dropped.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from penstock.engine.text.tools.arguments import ArgumentsReader, arguments_reader
from penstock.engine.text.tools.formats import ToolFormat
from penstock.engine.text.tools.scan import (
    MAX_FRAME_CHARS,
    Head,
    Incoming,
    Malformed,
    ObjectScan,
    Wait,
    num_held,
    skip_blank,
)

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
    id: str = ""  # given by the server


class Arguments(NamedTuple):
    """More of the JSON text that is the arguments of a call."""

    call: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


class CallReader:
    """The state of one answer: `feed` it piece by piece, then `finish`. `functions` are names with their schemas. `held`
    are the marks behind which a grammar holds calls ("" for calls without a mark)."""

    def __init__(
        self, form: ToolFormat, functions: Mapping[str, Any], held: Collection[str] = (), *, max_calls: int = MAX_CALLS
    ) -> None:
        self.num_calls = 0
        self.is_within_call = False  # the text so far ends within a call that has been announced
        self._num_false = 0
        self._form, self._marks = form, form.marks
        self._functions = functions
        self._held = held
        self._is_certain = False  # a grammar holds the call that is being read
        self._max_calls = max_calls
        # What a call without a mark begins with.
        self._bare = "{[" if form.is_bare else ""
        openings = [*map(re.escape, form.marks), *([r"(?<=\n\n)(?=[{\[])"] if form.is_bare else [])]
        self._opening = re.compile("|".join(openings))
        self._source = Incoming()
        self._at = 0  # all before it is decided
        self._blanks: list[str] = []  # of the content: dropped if a call follows
        self._raw: list[str] = []  # of a call that may still turn out to be content
        self._found: list[str] = []  # its arguments
        self._is_closing = False  # what is not decided can only belong to a call that has been read
        self._out: list[Piece] = []
        self._reading = self._answer()

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` completes."""
        self._source.text += text
        next(self._reading)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return what was held back, at the end of the answer. An unfinished closing mark of a complete call is no content."""
        self._reading.close()
        self._content("".join(self._raw) + ("" if self._is_closing else self._source.text[self._at :]))
        if self._blanks and not self.num_calls:
            self._out.append(Content("".join(self._blanks)))
        self._at, self._blanks = len(self._source.text), []
        return self._taken()

    def check(self) -> None:
        """Assert the invariants that hold between two pieces."""
        assert 0 <= self._at <= len(self._source.text)
        assert not self._out
        assert not (self._raw and self.is_within_call)
        assert self.num_calls <= self._max_calls

    # -- what an answer is made of: each reads on from self._at ----------------------------------------------

    def _answer(self) -> Wait[None]:
        """Read text and calls in turn, for as long as there is more."""
        is_call = False
        if self._bare:
            yield from self._skip_blanks()
            is_call = self._source.text[self._at] in self._bare
        while True:
            mark = "" if is_call else (yield from self._read_text())
            is_call, self._is_certain = False, mark in self._held
            try:
                yield from self._read_frames(mark) if self._form.is_framed else self._read_calls(mark)
            except Malformed as error:
                self._give_up(error.place)
            self._is_closing = self.is_within_call = False

    def _read_text(self) -> Wait[str]:
        """Read text up to a mark, and return the mark."""
        may_call = self.num_calls < self._max_calls and self._num_false < MAX_FALSE
        while True:
            text, at = self._source.text, self._at
            found = self._opening.search(text, at) if may_call else None
            if found is not None:
                self._content(text[at : found.start()])
                self._raw, self._at = [found[0]], found.end()
                return found[0]
            self._at = len(text) - (num_held(text, at, self._marks) if may_call else 0)
            self._content(text[at : self._at])
            yield from self._wait()

    def _read_calls(self, mark: str) -> Wait[None]:
        """Read a call, and the calls that follow without text between them. `mark`: of the current call."""
        form, in_list, is_first = self._form, False, True
        while True:
            head = yield from self._read_head(mark, is_first)
            in_list = head.is_list or (in_list and not is_first)
            yield from self._read_call(head, ObjectScan(in_string=head.kind == "string"))
            is_call = False
            while not is_call:
                self._is_closing = True
                yield from self._skip_blanks()
                at = end = self._at
                if head.has_tail:
                    end, is_call = yield from self._read_after(mark, in_list)
                if (is_call and self.num_calls == self._max_calls) or (not is_call and end == at):
                    return
                if end > at:
                    self._at, self._blanks = end, []  # they stood before a sign of the format
                if is_call:
                    self._raw = [self._source.text[at:end]]
                elif not (self._goes_on(mark) if in_list else form.is_bare):
                    return
                else:
                    mark, in_list = mark if in_list else "", False
            self._is_closing, is_first = False, not in_list
            if is_first and not form.closers.get(mark):
                mark = ""  # it was for one call

    def _read_head(self, mark: str, is_first: bool) -> Wait[Head]:
        """Read a call up to its arguments. `is_first`: it stands right behind the mark, which is "" for none."""
        source, form, at = self._source, self._form, self._at
        place = at
        if is_first and mark in form.fences:
            place = yield from source.passed(at, "json")
        brace = place = yield from source.sign(at, place)
        if is_first and source.text[place] == "[":
            brace = yield from source.sign(at, place + 1)
        if source.text[brace] == "{":
            head = yield from source.call_head(brace)
            if mark in ("", *form.fences) and not (head.is_plain and head.kind != "none"):
                raise Malformed(head.end)
            head = head._replace(is_list=brace > place)
        elif form.has_args and brace == place and is_first:
            head = yield from self._read_bare_head(place)
        else:
            raise Malformed(place if mark else brace)  # a mark may begin here; without one, some of it must be passed
        if (head.name is not None or head.kind == "none") and head.name not in self._functions:
            raise Malformed(head.end)
        return head

    def _read_bare_head(self, at: int) -> Wait[Head]:
        """Read `f[ARGS]{`, `f[CALL_ID]abc[ARGS]{` or `f{`."""
        source = self._source
        end = behind = yield from source.run(at)
        id_at = yield from source.passed(end, "[CALL_ID]")
        if id_at > end:
            behind = yield from source.run(id_at)
        behind = yield from source.passed(behind, "[ARGS]")
        brace = yield from source.sign(at, behind)
        if source.text[brace] != "{":
            raise Malformed(end)
        return Head(source.text[at:end], brace, has_tail=False)

    def _read_frames(self, mark: str) -> Wait[None]:
        """Read calls that are a name and its arguments, up to what closes them."""
        form, words = self._form, self._form.opening(mark).split()
        while True:
            head = yield from self._read_frame_head(words)
            yield from self._read_call(head, arguments_reader(form, self._functions[head.name or ""], mark))
            self._is_closing = True
            for word in [] if form.parameters and form.parameters.quote else form.written.after_arguments.split():
                yield from self._pass(word)
            closing = form.closing(mark)
            if (yield from self._pass(closing[0])):
                for word in closing[1:]:
                    yield from self._pass(word)
                return
            at, words = self._at, form.written.before_name.split()
            place = at + (self._source.text[at] in ",;")
            place = yield from self._source.sign(at, place)
            if words:
                is_call = (yield from self._source.passed(place, words[0])) > place
            else:
                is_call = self._source.text[place].isalpha()
            if not is_call or self.num_calls == self._max_calls:
                return
            self._raw, self._at, self._is_closing = [self._source.text[at:place]], place, False

    def _read_frame_head(self, words: list[str]) -> Wait[Head]:
        source, form, at = self._source, self._form, self._at
        place = yield from source.words(at, at, words)
        place = yield from source.sign(at, place)
        end = yield from source.run(place)
        name = source.text[place:end]
        if name not in self._functions:
            raise Malformed(end)
        behind = yield from source.words(at, end, form.written.before_arguments.split())
        if form.parameters is None:
            behind = yield from source.sign(at, behind)
            if source.text[behind] != "{":
                raise Malformed(behind)
        return Head(name, behind, has_tail=False)

    def _pass(self, word: str) -> Wait[bool]:
        """Pass over a word that stands here, behind blanks; return whether it does."""
        yield from self._skip_blanks()
        end = yield from self._source.passed(self._at, word)
        is_here = end > self._at
        if is_here:
            self._at, self._blanks = end, []
        return is_here

    def _read_call(self, head: Head, arguments: ArgumentsReader) -> Wait[None]:
        """Read the arguments and the end of a call. A call that was not announced before them is announced here if it is valid."""
        source, name = self._source, head.name
        is_announced = self._is_certain and name is not None and head.kind == "object"
        self.is_within_call = is_announced
        if is_announced:
            self._announce(name)
        else:
            self._raw.append(source.text[self._at : head.end])
        self._at, self._found = head.end, []
        if head.kind != "none":
            yield from self._read_arguments(arguments)
        if head.kind != "none" and head.has_tail:
            self._is_closing = is_announced
            tail = yield from source.call_tail(self._at, name)
            if tail.name not in self._functions:
                raise Malformed(tail.end)
            if not is_announced:
                self._raw.append(source.text[self._at : tail.end])
            name, self._at = tail.name, tail.end
        if not is_announced:
            found = "".join(self._found) if head.kind != "none" else "{}"
            whole = object_in('"' + found if head.kind == "string" else found, head.kind == "string")
            if whole is None:
                raise Malformed(self._at)
            self._announce(name)
            self._out.append(Arguments(self.num_calls - 1, whole))
        self.is_within_call = False

    def _read_arguments(self, arguments: ArgumentsReader) -> Wait[None]:
        while True:
            text, at = self._source.text, self._at
            try:
                self._at, found, is_done = arguments.feed(text, at)
            except Malformed as error:
                if self.is_within_call:  # they were announced: what they are so far is theirs
                    self._at = error.place
                    self._take_arguments(at, error.found)
                raise
            self._take_arguments(at, found)
            if is_done:
                return
            yield from self._wait()

    def _read_after(self, mark: str, in_list: bool) -> Wait[tuple[int, bool]]:
        """Return the place of what follows a call and its blanks, and whether it is another call without a mark of its own."""
        at = self._at
        if in_list and self._source.text[at] == "]":
            return at + 1, False
        if in_list:
            return (yield from self._find_call(at, ",", "{", needs_separator=True))
        end = yield from self._source.passed(at, self._form.closers.get(mark, ""))
        if end > at or not self._goes_on(mark):
            return end, False
        return (yield from self._find_call(at, ";,", "{[", needs_separator=False))

    def _find_call(self, at: int, separators: str, opening: str, needs_separator: bool) -> Wait[tuple[int, bool]]:
        is_separated = self._source.text[at] in separators
        while True:
            text = self._source.text
            place = skip_blank(text, at + is_separated)
            if place - at > MAX_FRAME_CHARS or needs_separator > is_separated:
                return at, False
            if place < len(text):
                return (place, True) if text[place] in opening else (at, False)
            yield

    def _skip_blanks(self) -> Wait[None]:
        """Pass over blanks, which become content unless a call follows."""
        while True:
            end = skip_blank(self._source.text, self._at)
            if end > self._at:
                self._blanks.append(self._source.text[self._at : end])
                self._at = end
            if end < len(self._source.text):
                return
            yield from self._wait()

    def _wait(self) -> Wait[None]:
        """Wait for more text, and drop what has been read so far."""
        kept = max(self._at - CONTEXT, 0)
        self._source.text = self._source.text[kept:]
        self._at -= kept
        yield

    # -- what comes of it ------------------------------------------------------------------------------------

    def _goes_on(self, mark: str) -> bool:
        """Return whether a closing mark or another call may follow a call."""
        return self._form.is_bare or bool(self._form.closers.get(mark))

    def _take_arguments(self, start: int, found: str) -> None:
        """Take the JSON of arguments that were written from `start` on."""
        if not self.is_within_call:
            self._raw.append(self._source.text[start : self._at])
            self._found.append(found)
        elif found:
            self._out.append(Arguments(self.num_calls - 1, found))

    def _announce(self, name: str | None) -> None:
        assert name is not None
        self._out.append(CallStart(self.num_calls, name))
        self.num_calls += 1
        self._raw, self._blanks = [], []

    def _give_up(self, place: int) -> None:
        """It is no call: all that was read of it is content. It is not searched again, or many such would cost the
        square of their length."""
        self._content("".join(self._raw) + self._source.text[self._at : place])
        self._raw, self._at = [], place
        self._num_false += 1

    def _content(self, text: str) -> None:
        body = text.rstrip()
        if body:
            self._out.append(Content("".join(self._blanks) + body))
            self._blanks = []
        if len(body) < len(text):
            self._blanks.append(text[len(body) :])

    def _taken(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


def object_in(text: str, is_quoted: bool = False) -> str | None:
    """Return the text of a JSON object, or of the object in a JSON string; None if it is none. Its values are not decoded, since a
    number may be beyond a float."""
    try:
        text = msgspec.json.decode(text, type=str) if is_quoted else text
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return text

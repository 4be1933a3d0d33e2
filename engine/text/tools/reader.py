"""Incremental parser that splits a model's answer into text and tool calls.

The result does not depend on how the text is split into pieces. A call is announced only once its name and the opening
brace of its arguments have arrived; text that is not a call is returned verbatim as content. If a grammar enforces the
call, its arguments are streamed. Otherwise they are held back until the call is complete and valid, since a stream
cannot retract text. Whitespace around calls is dropped.
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

MAX_CALLS = 128  # per answer; further calls are returned as text
MAX_FALSE = 64  # failed attempts to parse a call, after which the rest of the answer is text
CONTEXT = 2  # number of parsed characters to keep, which show whether a paragraph begins


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


class CallReader:
    """Parses one answer: call `feed` for each piece, then `finish`. `functions` maps names to schemas. `held` are the
    marks after which a grammar enforces calls ("" for calls without a mark)."""

    def __init__(
        self, form: ToolFormat, functions: Mapping[str, Any], held: Collection[str] = (), *, max_calls: int = MAX_CALLS
    ) -> None:
        self.num_calls = 0
        self.is_within_call = False  # the text so far ends within a call that has been announced
        self._num_false = 0
        self._form, self._marks = form, form.marks
        self._functions = functions
        self._held = held
        self._is_certain = False  # a grammar enforces the current call
        self._max_calls = max_calls
        # The characters that can begin a call without a mark.
        self._bare = "{[" if form.is_bare else ""
        openings = [*map(re.escape, form.marks), *([r"(?<=\n\n)(?=[{\[])"] if form.is_bare else [])]
        self._opening = re.compile("|".join(openings))
        self._source = Incoming()
        self._at = 0  # position in the source; all text before it is decided
        self._blanks: list[str] = []  # whitespace at the end of the content, dropped if a call follows
        self._raw: list[str] = []  # source text of an unannounced call, which may still turn out to be content
        self._found: list[str] = []  # the JSON of that call's arguments
        self._is_closing = False  # the undecided text can only be the end of a complete call
        self._out: list[Piece] = []
        self._reading = self._answer()

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that `text` completes."""
        self._source.text += text
        next(self._reading)
        return self._taken()

    def finish(self) -> list[Piece]:
        """Return the pieces held back so far; an unfinished closing mark of a complete call is dropped."""
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

    # -- parsers of the parts of an answer; each starts at self._at -------------------------------------------

    def _answer(self) -> Wait[None]:
        """Parse text and calls alternately, yielding whenever more text is needed."""
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
        """Read content up to a mark and return the mark."""
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
        """Read a call and the calls that directly follow it. `mark`: the mark that opened the current call, or ""."""
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
                    self._at, self._blanks = end, []  # drops whitespace before punctuation of the format
                if is_call:
                    self._raw = [self._source.text[at:end]]
                elif not (self._goes_on(mark) if in_list else form.is_bare):
                    return
                else:
                    mark, in_list = mark if in_list else "", False
            self._is_closing, is_first = False, not in_list
            if is_first and not form.closers.get(mark):
                mark = ""  # a mark without a closer opens only one call

    def _read_head(self, mark: str, is_first: bool) -> Wait[Head]:
        """Read a call up to its arguments. `is_first`: it directly follows `mark`, which is "" if there is none."""
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
            raise Malformed(place if mark else brace)  # a mark may begin at `place`; else skip "["
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
        """Read calls that consist of a name and arguments, up to their closing text."""
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
        """Skip whitespace and then `word` if it follows; return whether it did."""
        yield from self._skip_blanks()
        end = yield from self._source.passed(self._at, word)
        is_here = end > self._at
        if is_here:
            self._at, self._blanks = end, []
        return is_here

    def _read_call(self, head: Head, arguments: ArgumentsReader) -> Wait[None]:
        """Read the arguments and the end of a call; then announce it if it is valid and was not announced before."""
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
                if self.is_within_call:  # the call was announced, so pass on its arguments so far
                    self._at = error.place
                    self._take_arguments(at, error.found)
                raise
            self._take_arguments(at, found)
            if is_done:
                return
            yield from self._wait()

    def _read_after(self, mark: str, in_list: bool) -> Wait[tuple[int, bool]]:
        """Return the position after a call's closer or separator, and whether another call without a mark follows."""
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
        """Skip whitespace, which becomes content unless a call follows."""
        while True:
            end = skip_blank(self._source.text, self._at)
            if end > self._at:
                self._blanks.append(self._source.text[self._at : end])
                self._at = end
            if end < len(self._source.text):
                return
            yield from self._wait()

    def _wait(self) -> Wait[None]:
        """Drop the text that has been parsed, and yield for more text."""
        kept = max(self._at - CONTEXT, 0)
        self._source.text = self._source.text[kept:]
        self._at -= kept
        yield

    # -- output ------------------------------------------------------------------------------------------------

    def _goes_on(self, mark: str) -> bool:
        """Return whether a closing mark or another call may follow a call."""
        return self._form.is_bare or bool(self._form.closers.get(mark))

    def _take_arguments(self, start: int, found: str) -> None:
        """Store or pass on `found`, the JSON of the arguments that were read from `start` on."""
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
        """Turn the text of a failed call into content. It is not searched again, since the time for many failed calls
        would be quadratic."""
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
    """Return the text of a JSON object, or of the object in a JSON string; None if it is not an object. Values are not
    decoded, since a number may be too large for a float."""
    try:
        text = msgspec.json.decode(text, type=str) if is_quoted else text
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return text

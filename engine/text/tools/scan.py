"""Scans text that arrives in pieces, and finds the end of JSON objects in it. Each character of the arguments is read
once; the text around them has a bounded length.

Most of the work is done by regular expressions with possessive quantifiers. These never backtrack, so no text that a
model (or its prompt) produces can make them slow.
"""

import re
import string
from collections.abc import Collection, Generator, Iterable
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

MAX_DEPTH = 64  # nesting of objects and lists
BLOCK_CHARS = 4096
ARGUMENTS = ("arguments", "parameters")  # the names that models use
MAX_FRAME_CHARS = 1024  # length of a call's text before or after its arguments

_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+")++', re.DOTALL)
_STRING_REST = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
# Outside strings: a bracket, a whole string, or a character that JSON cannot contain.
_SIGN = re.compile(r'[{}\[\]]|"(?:[^"\\]++|\\.)*+"|[^ \t\r\n\w+\-.,:]|[^\x00-\x7f]', re.DOTALL)
_OTHERS = dict.fromkeys(map(ord, string.ascii_letters + string.digits + "_+-.,: \t\r\n"))
_WEIGHTS = {"{": 1, "[": 1, "}": -1, "]": -1}
_BLANK = re.compile(r"\s*+")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}+")
_WORD = re.compile(r'\s*+"([^"\\\x00-\x1f]{0,256}+)"')
_OPENING = re.compile(r'\s*+(["{])')
_COLON = re.compile(r"\s*+:")
_END = re.compile(r"\s*+([,}])")

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields whenever it needs more text
Kind = Literal["object", "string", "none"]  # how arguments are written
# Result of a reader of arguments: the position up to which it has read, the JSON of that text, and whether it is done.
Fed = tuple[int, str, bool]


class Malformed(Exception):
    """Raised if the text is not a call. Another one may begin at `place`. `found`: the arguments' JSON up to there."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place
        self.found = ""


class Head(NamedTuple):
    """A call up to its arguments, which begin at `end`: with a brace, or after the opening quote of a string with JSON.
    For a call without arguments, `end` is the end of the call."""

    name: str | None  # None: the name follows the arguments
    end: int
    kind: Kind = "object"
    has_tail: bool = True  # the call is an object that continues after its arguments
    is_plain: bool = True  # the object begins with the name, or with the type and the name
    is_list: bool = False  # the call is the first in a list


class ObjectScan:
    """Finds the end of one JSON object, or of a string that has begun. It tracks only strings and brackets; a parser
    validates the rest."""

    def __init__(self, in_string: bool = False) -> None:
        self._depth = 0
        self._in_string = in_string
        self._is_escaped = False  # the last piece ended with a backslash

    def feed(self, text: str, at: int) -> Fed:
        """Read from `at` on; raise Malformed if the text cannot be JSON."""
        try:
            end = self._end(text, at)
        except Malformed as error:
            error.found = text[at : error.place]
            raise
        return (len(text), text[at:], False) if end is None else (end, text[at:end], True)

    def _end(self, text: str, at: int) -> int | None:
        """Return the position after the last brace or quote, or None if all of `text` belongs to the value.

        Each block is first scanned as a whole, without Python code per character (at most 20 ns per character). Only a
        block in which the object ends or is malformed is scanned bracket by bracket.
        """
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                if not self._in_string and not self._depth:
                    return at
                continue
            block = text[at : at + BLOCK_CHARS]
            bare = _STRINGS.sub("", block)
            quote = bare.find('"')  # opens a string that continues after the block
            stop = at + len(block) if quote < 0 else at + len(block) - len(bare) + quote
            signs = (bare if quote < 0 else bare[:quote]).translate(_OTHERS)
            depths = (
                None if signs.strip("{}[]") else [*accumulate(map(_WEIGHTS.__getitem__, signs), initial=self._depth)]
            )
            if depths is None or min(depths) < 1 or max(depths) > MAX_DEPTH:
                end = self._walk(text, at, stop)
                if end is not None:
                    return end
            else:
                self._depth = depths[-1]
            self._in_string = quote >= 0
            at = stop + self._in_string
        return None

    def _walk(self, text: str, at: int, stop: int) -> int | None:
        """Scan bracket by bracket up to `stop`, where all strings are complete; return the object's end or None."""
        for found in _SIGN.finditer(text, at, stop):
            sign = found[0]
            if sign not in _WEIGHTS:
                if sign[0] == '"':
                    continue
                raise Malformed(found.start())
            self._depth += _WEIGHTS[sign]
            if not self._depth:
                return found.end()
            if self._depth > MAX_DEPTH:
                raise Malformed(found.end())
        return None

    def _string(self, text: str, at: int) -> int:
        """Return the position after the closing quote of the string that contains `at`, or the end of the text."""
        found = _STRING_REST.match(text, at + self._is_escaped)
        assert found is not None  # the pattern also matches the empty string
        end = found.end()
        self._is_escaped = text.startswith("\\", end)
        self._in_string = not text.startswith('"', end)
        return end + 1


def num_held(text: str, at: int, marks: Collection[str]) -> int:
    """Return the number of characters at the end of the text, from `at` on, that may be the beginning of a mark."""
    longest = min(max(map(len, marks)) - 1, len(text) - at)
    for length in range(longest, 0, -1):
        if any(mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def skip_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


class Incoming:
    """A growing text, with generator methods that parse it from a position on and yield when they need more text."""

    def __init__(self) -> None:
        self.text = ""

    def passed(self, at: int, mark: str) -> Wait[int]:
        """Return the position after `mark` if it follows at `at`, else `at`."""
        while not self.text.startswith(mark, at):
            if not mark.startswith(self.text[at : at + len(mark)]):
                return at
            yield
        return at + len(mark)

    def words(self, start: int, at: int, words: Iterable[str]) -> Wait[int]:
        """Return the position after these words, each with optional whitespace before it; else raise Malformed."""
        for word in words:
            sign = yield from self.sign(start, at)
            at = yield from self.passed(sign, word)
            if at == sign:
                raise Malformed(sign)
        return at

    def sign(self, start: int, at: int) -> Wait[int]:
        """Return the position of the next non-blank character; raise Malformed if it is too far behind `start`."""
        while True:
            place = skip_blank(self.text, at)
            if place - start >= MAX_FRAME_CHARS:
                raise Malformed(place)
            if place < len(self.text):
                return place
            yield

    def run(self, at: int) -> Wait[int]:
        """Return the position after a name or an id, once the text shows where it ends."""
        while True:
            found = _RUN.match(self.text, at)
            if found is None and at < len(self.text):
                raise Malformed(at)
            if found is not None and found.end() < len(self.text):
                return found.end()
            yield

    def call_head(self, start: int) -> Wait[Head]:
        """Read an object that is a call, from its opening brace up to its arguments."""
        return (yield from self._members(start, start + 1, None, may_have_arguments=True))

    def call_tail(self, start: int, name: str | None) -> Wait[Head]:
        """Read the rest of a call after its arguments, up to and including its closing brace."""
        sign = yield from self._next(_END, start, start)
        if sign[1] == "}":
            return Head(name, sign.end(), "none")
        return (yield from self._members(start, sign.end(), name, may_have_arguments=False))

    def _members(self, start: int, at: int, name: str | None, *, may_have_arguments: bool) -> Wait[Head]:
        """Read the members of a call in any order, up to its arguments or its closing brace. Duplicate names and
        arguments are refused, since the call would be ambiguous; ids and types, which some models add, are skipped."""
        is_plain = True
        while True:
            key = yield from self._next(_WORD, start, at)
            colon = yield from self._next(_COLON, start, key.end())
            if key[1] in ARGUMENTS and may_have_arguments:
                opening = yield from self._next(_OPENING, start, colon.end())
                is_object = opening[1] == "{"
                kind: Kind = "object" if is_object else "string"
                return Head(name, opening.end() - is_object, kind, is_plain=is_plain and name is not None)
            value = yield from self._next(_WORD, start, colon.end())
            is_name = key[1] == "name" and name is None
            if not is_name and key[1] != "id" and (key[1], value[1]) != ("type", "function"):
                raise Malformed(value.end())
            name = value[1] if is_name else name
            is_plain = is_plain and (name is not None or key[1] == "type")
            end = yield from self._next(_END, start, value.end())
            if end[1] == "}":
                return Head(name, end.end(), "none", is_plain=is_plain)
            at = end.end()

    def _next(self, pattern: re.Pattern[str], start: int, at: int) -> Wait[re.Match[str]]:
        """Return the match of `pattern` at `at`, in a call that begins at `start`."""
        while True:
            text = self.text
            found = pattern.match(text, at)
            if found is not None and found.end() - start <= MAX_FRAME_CHARS:
                return found
            place = skip_blank(text, at)
            is_open = place == len(text) or (text[place] == '"' and text.find('"', place + 1) < 0)
            if found is not None or not is_open or len(text) - start > MAX_FRAME_CHARS:
                raise Malformed(place)
            yield

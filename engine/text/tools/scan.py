"""Reads text that comes in pieces, and JSON in it far enough to know where it ends. A character of the arguments is
looked at once, and of what stands around them a bounded length is.

Most of the work is done by expressions with possessive quantifiers: they never go back, so what a model (or its
prompt) writes cannot make them slow.
"""

import re
import string
from collections.abc import Collection, Generator, Iterable
from itertools import accumulate
from typing import Literal, NamedTuple, TypeVar

MAX_DEPTH = 64  # of objects and lists within each other
BLOCK_CHARS = 4096
ARGUMENTS = ("arguments", "parameters")  # what models call them
MAX_FRAME_CHARS = 1024  # of a call's text before or behind its arguments

_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+")++', re.DOTALL)
_STRING_REST = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
# Outside strings: a bracket, a whole string, or what JSON cannot contain.
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
Wait = Generator[None, None, T]  # yields where only more text can tell
Kind = Literal["object", "string", "none"]  # how arguments are written
# Of a reader of arguments: the place up to which it has read, the JSON that this makes, and whether it is the end.
Fed = tuple[int, str, bool]


class Malformed(Exception):
    """The text is no call. Another one may begin at `place`. `found` are the arguments up to there."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place
        self.found = ""


class Head(NamedTuple):
    """A call up to its arguments, which begin at `end`: with a brace, or behind the quote of a string that holds them.
    Where it has none, `end` is behind the call."""

    name: str | None  # None: it stands behind the arguments
    end: int
    kind: Kind = "object"
    has_tail: bool = True  # the call is an object that goes on behind its arguments
    is_plain: bool = True  # begins with its name, or with its type and its name
    is_list: bool = False  # the first one in brackets


class ObjectScan:
    """Finds the end of one JSON object, or of a string that is open already. Strings and brackets are followed, the
    rest is for a parser to judge."""

    def __init__(self, in_string: bool = False) -> None:
        self._depth = 0
        self._in_string = in_string
        self._is_escaped = False  # the last piece ended with a backslash

    def feed(self, text: str, at: int) -> Fed:
        """Read on from `at`; raise Malformed."""
        try:
            end = self._end(text, at)
        except Malformed as error:
            error.found = text[at : error.place]
            raise
        return (len(text), text[at:], False) if end is None else (end, text[at:end], True)

    def _end(self, text: str, at: int) -> int | None:
        """Return the place behind the last brace or quote, or None if all of `text` belongs to the value.

        A block is first looked at as a whole (no Python per character: 20 ns for the worst of them); only one in
        which the object ends, or breaks, is walked through.
        """
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
                if not self._in_string and not self._depth:
                    return at
                continue
            block = text[at : at + BLOCK_CHARS]
            bare = _STRINGS.sub("", block)
            quote = bare.find('"')  # of a string that goes on behind the block
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
        """Follow the signs one by one. Strings are complete here."""
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
        """Go to the end of a string that is open at `at`: the place behind its quote, or the end of the text."""
        found = _STRING_REST.match(text, at + self._is_escaped)
        assert found is not None  # it matches nothing at all, too
        end = found.end()
        self._is_escaped = text.startswith("\\", end)
        self._in_string = not text.startswith('"', end)
        return end + 1


def num_held(text: str, at: int, marks: Collection[str]) -> int:
    """Return how many characters at the end of the text may be the beginning of a mark."""
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
    """Text that grows. What is read from it between two yields may begin anywhere in it."""

    def __init__(self) -> None:
        self.text = ""

    def passed(self, at: int, mark: str) -> Wait[int]:
        """Return the place behind `mark` if it stands here, else this place."""
        while not self.text.startswith(mark, at):
            if not mark.startswith(self.text[at : at + len(mark)]):
                return at
            yield
        return at + len(mark)

    def words(self, start: int, at: int, words: Iterable[str]) -> Wait[int]:
        """Return the place behind these words, which may have blanks before each of them."""
        for word in words:
            sign = yield from self.sign(start, at)
            at = yield from self.passed(sign, word)
            if at == sign:
                raise Malformed(sign)
        return at

    def sign(self, start: int, at: int) -> Wait[int]:
        """Return the place of what follows the blanks, within the length that a frame has from `start` on."""
        while True:
            place = skip_blank(self.text, at)
            if place - start >= MAX_FRAME_CHARS:
                raise Malformed(place)
            if place < len(self.text):
                return place
            yield

    def run(self, at: int) -> Wait[int]:
        """Return the place behind a name or an id, when it is certain where it ends."""
        while True:
            found = _RUN.match(self.text, at)
            if found is None and at < len(self.text):
                raise Malformed(at)
            if found is not None and found.end() < len(self.text):
                return found.end()
            yield

    def call_head(self, start: int) -> Wait[Head]:
        """Read an object that is a call, from its brace to its arguments."""
        return (yield from self._members(start, start + 1, None, may_have_arguments=True))

    def call_tail(self, start: int, name: str | None) -> Wait[Head]:
        """Read on behind the arguments to the place behind the brace that closes the call."""
        sign = yield from self._next(_END, start, start)
        if sign[1] == "}":
            return Head(name, sign.end(), "none")
        return (yield from self._members(start, sign.end(), name, may_have_arguments=False))

    def _members(self, start: int, at: int, name: str | None, *, may_have_arguments: bool) -> Wait[Head]:
        """Read names and values in any order, up to the arguments or to the brace behind the last one. A name or arguments
        that come twice would leave it open what is called; ids and types, which some models add, are passed over."""
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
        """Return the next word of a call that begins at `start`."""
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

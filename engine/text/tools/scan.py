"""JSON that arrives in pieces, read far enough to know where it ends. Every character is looked at once.

Most of the work is done by expressions with possessive quantifiers: they never go back, so what a model (or its
prompt) writes cannot make them slow.
"""

import re
import string
from itertools import accumulate
from typing import Literal, NamedTuple

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
_WORD = re.compile(r'\s*+(?:"([^"\\\x00-\x1f]{0,256}+)"|([{}:,]))')
_OPENING = re.compile(r'\s*+(["{])')
_BLANK = re.compile(r"\s*+")


Kind = Literal["object", "string", "none"]  # how arguments are written


class Malformed(Exception):
    """The text is no call. Another one may begin at `place`."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


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

    def feed(self, text: str, at: int) -> int | None:
        """The place behind the last brace or quote, or None: all of `text` belongs to it. Raises Malformed.

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
        """Sign by sign. Strings are complete here."""
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


def skip_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()


def call_head(text: str, at: int) -> Head | None:
    """Read an object that is a call, from its brace to its arguments; None where the text ends too early."""
    words = _Words(text, at)
    try:
        words.sign("{")
        return _members(words, None, may_have_arguments=True)
    except _Unfinished:
        return None


def call_tail(text: str, at: int, name: str | None) -> Head | None:
    """Read on behind the arguments to the place behind the brace that closes the call."""
    words = _Words(text, at)
    try:
        if words.sign(",}") == "}":
            return Head(name, words.at, "none")
        return _members(words, name, may_have_arguments=False)
    except _Unfinished:
        return None


def _members(words: "_Words", name: str | None, *, may_have_arguments: bool) -> Head:
    """Names and values in any order, up to the arguments or to the brace behind the last one. A name or arguments that
    come twice would leave it open what is called; ids and types, which some models add, are passed over."""
    is_plain = True
    while True:
        key = words.string()
        words.sign(":")
        if key in ARGUMENTS and may_have_arguments:
            is_object = words.opening() == "{"
            kind: Kind = "object" if is_object else "string"
            return Head(name, words.at - is_object, kind, is_plain=is_plain and name is not None)
        value = words.string()
        if (key != "name" or name is not None) and key != "id" and (key != "type" or value != "function"):
            raise Malformed(words.at)
        name = value if key == "name" else name
        is_plain = is_plain and (name is not None or key == "type")
        if words.sign(",}") == "}":
            return Head(name, words.at, "none", is_plain=is_plain)


class _Unfinished(Exception):
    """The text ends before it can be said what it is."""


class _Words:
    """The words of a call from a place on, one after the other. They raise _Unfinished or Malformed."""

    def __init__(self, text: str, at: int) -> None:
        self.at = at
        self._text = text
        self._start = at

    def string(self) -> str:
        at, word = self.at, self._next(_WORD)[1]
        if word is None:
            raise Malformed(skip_blank(self._text, at))
        return word

    def sign(self, wanted: str) -> str:
        at, sign = self.at, self._next(_WORD)[2]
        if sign is None or sign not in wanted:
            raise Malformed(skip_blank(self._text, at))
        return sign

    def opening(self) -> str:
        return self._next(_OPENING)[1]

    def _next(self, pattern: re.Pattern[str]) -> re.Match[str]:
        text, at = self._text, self.at
        found = pattern.match(text, at)
        if found is not None and found.end() - self._start <= MAX_FRAME_CHARS:
            self.at = found.end()
            return found
        place = skip_blank(text, at)
        is_open = place == len(text) or (text[place] == '"' and text.find('"', place + 1) < 0)
        if found is None and is_open and len(text) - self._start <= MAX_FRAME_CHARS:
            raise _Unfinished
        raise Malformed(place)

"""JSON that arrives in pieces, read far enough to know where it ends. Every character is looked at once.

Most of the work is done by expressions with possessive quantifiers: they never go back, so what a model (or whoever
prompts it) writes cannot make them slow.
"""

import re
import string
from itertools import accumulate
from typing import NamedTuple

MAX_DEPTH = 64  # of objects and lists within each other
BLOCK_CHARS = 4096
MAX_FRAME_CHARS = 1024  # of a call's text before or behind its arguments

_STRINGS = re.compile(r'(?:"(?:[^"\\]++|\\.)*+")++', re.DOTALL)
_STRING_REST = re.compile(r"(?:[^\"\\]++|\\.)*+", re.DOTALL)
# Outside strings: a bracket, a whole string, or what JSON cannot contain.
_SIGN = re.compile(r'[{}\[\]]|"(?:[^"\\]++|\\.)*+"|[^ \t\r\n\w+\-.,:]|[^\x00-\x7f]', re.DOTALL)
_OTHERS = dict.fromkeys(map(ord, string.ascii_letters + string.digits + "_+-.,: \t\r\n"))
_WEIGHTS = {"{": 1, "[": 1, "}": -1, "]": -1}
_WORD = re.compile(r'\s*+(?:"([^"\\\x00-\x1f]{0,256}+)"|([{}:,]))')
_BLANK = re.compile(r"\s*+")


class Malformed(Exception):
    """The text is no call. Another one may begin at `place`."""

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class Head(NamedTuple):
    """A call up to its arguments: `end` is the place of the brace that opens them."""

    name: str
    end: int
    has_tail: bool = True  # the call is an object that goes on behind its arguments


class ObjectScan:
    """Finds the end of one JSON object. Strings and brackets are followed, the rest is for a parser to judge."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._is_escaped = False  # the last piece ended with a backslash

    def feed(self, text: str, at: int) -> int | None:
        """The place behind the object's last brace, or None: all of `text` belongs to it. Raises Malformed.

        A block is first looked at as a whole (no Python per character: 20 ns for the worst of them); only one in
        which the object ends, or breaks, is walked through.
        """
        while at < len(text):
            if self._in_string:
                at = self._string(text, at)
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


def object_head(text: str, at: int, arguments: str) -> Head | None:
    """Read `{"name": "…", "<arguments>": ` up to the brace behind it; None where the text ends too early."""
    expected = ("{", '"name', ":", '"', ",", '"' + arguments, ":", "{")
    name, start = "", at
    for part in expected:
        found = _word(text, at, start)
        if found is None:
            return None
        word = found[2] or f'"{found[1]}'
        if part == '"' and found[2] is None:
            name = found[1]
        elif word != part:
            raise Malformed(found.end())
        at = found.end()
    return Head(name, at - 1)


def object_tail(text: str, at: int) -> int | None:
    """The place behind the brace that closes a call; ids and types that some models add are passed over."""
    start = at
    while True:
        found = _word(text, at, start)
        if found is None:
            return None
        at = found.end()
        if found[2] == "}":
            return at
        if found[2] != ",":
            raise Malformed(at)
        for part in ("key", ":", "value"):
            found = _word(text, at, start)
            if found is None:
                return None
            at = found.end()
            if found[2] != (":" if part == ":" else None) or (part == "key" and found[1] not in ("id", "type")):
                raise Malformed(at)


def _word(text: str, at: int, start: int) -> re.Match[str] | None:
    """The next string or sign; None where the text may go on with one."""
    found = _WORD.match(text, at)
    if found is not None and found.end() - start <= MAX_FRAME_CHARS:
        return found
    place = skip_blank(text, at)
    is_open = place == len(text) or (text[place] == '"' and text.find('"', place + 1) < 0)
    if found is None and is_open and len(text) - start <= MAX_FRAME_CHARS:
        return None
    raise Malformed(place)

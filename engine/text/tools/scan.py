"""Text that arrives in pieces: generator methods parse it from a position on and yield whenever they need more.

Each character of a call's arguments is read once; the text around them has a bounded length. The regular expressions
have possessive quantifiers, which never backtrack, so no text that a model (or its prompt) produces can make them slow.
"""

import re
from collections.abc import Collection, Generator
from typing import TypeVar

MAX_DEPTH = 64  # nesting of objects and lists
MAX_FRAME_CHARS = 1024  # length of whitespace in a call's text before or after its arguments
CONTEXT = 2  # number of parsed characters to keep, which show whether a paragraph begins

# No group is repeated possessively, as in (…)*+: before Python 3.11.5 that matches too little.
STRING_REST = re.compile(r'[^"\\]*+(?:\\.[^"\\]*+)*', re.DOTALL)
# JSON between brackets: whole strings, and what may be outside of strings.
_PLAIN = re.compile(rf'(?:[ \t\r\n\w+\-.,:]++|"{STRING_REST.pattern}")*', re.ASCII | re.DOTALL)
_WEIGHTS = {"{": 1, "[": 1, "}": -1, "]": -1}
_BLANK = re.compile(r"\s*+")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}+")
_QUOTED = re.compile(r'"([^"\\\x00-\x1f]{0,256}+)("?)')

T = TypeVar("T")
Wait = Generator[None, None, T]  # yields whenever it needs more text


class Malformed(Exception):
    """Raised if the text is not a call. Another one may begin at `position`."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class Source:
    """A growing text. `text[at:]` is not parsed yet; `start` is the position of `text` in the whole text; `raw` and `json`
    collect what was parsed and what it stands for in the JSON of a call's arguments."""

    def __init__(self, text: str = "") -> None:
        self.text, self.at, self.start = text, 0, 0
        self.raw: list[str] = []
        self.json: list[str] = []

    def take(self, end: int, json: str = "") -> None:
        """Consume the text up to `end`."""
        self.raw.append(self.text[self.at : end])
        self.json.append(json)
        self.at = end

    def wait(self) -> Wait[None]:
        """Drop the text that has been consumed, and yield for more text. Positions other than `at` become invalid."""
        kept = max(self.at - CONTEXT, 0)
        self.text = self.text[kept:]
        self.at -= kept
        self.start += kept
        yield

    def sign(self, skipped: int = 0) -> Wait[int]:
        """Return the position of the next non-blank character, `skipped` characters or more behind the current one."""
        while True:
            position = skip_blank(self.text, self.at + skipped)
            if position - self.at >= MAX_FRAME_CHARS:
                raise Malformed(position)
            if position < len(self.text):
                return position
            yield

    def passed(self, at: int, mark: str) -> Wait[int]:
        """Return the position after `mark` if it follows at `at`, else `at`."""
        while not self.text.startswith(mark, at):
            if not mark.startswith(self.text[at : at + len(mark)]):
                return at
            yield
        return at + len(mark)

    def match(self, *words: str) -> Wait[None]:
        """Consume these words, each with optional whitespace before it; raise Malformed if another text follows."""
        for word in words:
            position = yield from self.sign()
            end = yield from self.passed(position, word)
            if end == position:
                raise Malformed(position)
            self.take(end)

    def name(self) -> Wait[str]:
        """Consume a name or an id, with optional whitespace before it, once the text shows where it ends."""
        position = yield from self.sign()
        while True:
            found = _NAME.match(self.text, position)
            if found is None:
                raise Malformed(position)
            if found.end() < len(self.text):
                self.take(found.end())
                return found[0]
            yield

    def quoted(self) -> Wait[str]:
        """Consume a short JSON string without escapes, with optional whitespace before it."""
        position = yield from self.sign()
        while True:
            found = _QUOTED.match(self.text, position)
            if found is None or not (found[2] or found.end() == len(self.text)):
                raise Malformed(position)
            if found[2]:
                self.take(found.end())
                return found[1]
            yield

    def json_value(self, *, in_string: bool = False) -> Wait[None]:
        """Consume a JSON object, or a string that has begun. Only strings and brackets are tracked; a parser validates the
        rest."""
        depth, is_done = 0, False
        while not is_done:
            text, end = self.text, self.at
            while not is_done:
                found = (STRING_REST if in_string else _PLAIN).match(text, end)
                assert found is not None  # the patterns also match the empty string
                end = found.end()
                sign = text[end : end + 1]
                if not sign or (in_string and sign == "\\"):  # a backslash at the end of the text
                    break
                depth += 0 if in_string else _WEIGHTS.get(sign, 0)
                if depth > MAX_DEPTH or (sign != '"' and sign not in _WEIGHTS):
                    self.take(end, text[self.at : end])
                    raise Malformed(end)
                in_string = sign == '"' and not in_string
                is_done = not depth and not in_string
                end += 1
            self.take(end, text[self.at : end])
            if not is_done:
                yield from self.wait()


def num_held(text: str, at: int, marks: Collection[str]) -> int:
    """Return the number of characters at the end of the text, from `at` on, that may be the beginning of a mark."""
    longest, firsts = min(max(map(len, marks)) - 1, len(text) - at), {mark[0] for mark in marks}
    for length in range(longest, 0, -1):
        if text[-length] in firsts and any(length < len(mark) and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


def skip_blank(text: str, at: int) -> int:
    found = _BLANK.match(text, at)
    assert found is not None
    return found.end()

"""Patterns of JSON schemas, which are ECMA 262's, as Rust's regular expressions, which llguidance reads.

Most is written alike and means something else: `.` and `\\s` differ in what ends a line and what is blank, `\\d` and
`\\w` are ASCII, and in brackets `[`, `&&` and `--` are letters. What no automaton can follow is refused by name.
"""

import re

# JSON writes them as \u…, which no answer here does; in a fixed text llguidance would leave them out.
UNWRITABLE = frozenset(map(chr, (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)))

# A validator in Python takes other characters for blanks than ECMA does: `\s` is what both do, `\S` what neither does.
_SPACE = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY_SPACE = _SPACE + r"\x1c-\x1f\x85\ufeff"
_CLASSES = {"d": "0-9", "w": "A-Za-z0-9_"}
_CONTROLS = {"t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "0": "\0"}
_META = frozenset(r"\.+*?()|[]{}^$#&-~")
_ANY_CHARACTER, _NO_CHARACTER = "(?s:.)", r"[^\x{0}-\x{10ffff}]"
_QUANTIFIER = re.compile(r"\{[0-9]+(,[0-9]*)?\}")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}")
_LOW_HALF = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_PROPERTY = re.compile(r"[pP]\{[A-Za-z0-9_=]+\}")
_GROUP = re.compile(r"\(\?(:|i:|i\)|P?<[A-Za-z_]\w*>)")


def translated(pattern: str) -> str:
    """Raises ValueError saying what cannot be followed."""
    return _Reader(pattern).all()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern, self._at = pattern, 0

    def all(self) -> str:
        parts = []
        while self._at < len(self._pattern):
            parts.append(self._piece())
        return "".join(parts)

    def _piece(self) -> str:
        letter = self._next()
        if letter == "\\":
            meant = self._escape()
            return meant if isinstance(meant, str) else _one(meant[0])
        if letter == ".":
            return r"[^\n\r\u2028\u2029]"
        if letter == "[":
            return self._brackets()
        if letter == "(" and self._pattern.startswith("?", self._at):
            return self._group()
        if letter == "{":
            found = _QUANTIFIER.match(self._pattern, self._at - 1)
            self._at = found.end() if found is not None else self._at
            return found[0] if found is not None else r"\{"
        return letter if letter in "()|*+?^$" else _one(letter)

    def _group(self) -> str:
        found = _GROUP.match(self._pattern, self._at - 1)
        if found is None:
            raise ValueError(
                f"{self._pattern[self._at - 1 : self._at + 3]} (a look-around or a flag) cannot be followed"
            )
        self._at = found.end()
        return found[0] if found[1].startswith("i") else "(?:"

    def _escape(self, is_negated: bool = False) -> str | tuple[str]:
        """What stands behind a backslash: a class, or in a tuple the character that is meant."""
        letter = self._next("a backslash at the end")
        if letter in "sS":
            blanks = _ANY_SPACE if is_negated == (letter == "s") else _SPACE
            return f"[{'^' if letter == 'S' else ''}{blanks}]"
        if letter.lower() in _CLASSES:
            return f"[{'^' if letter.isupper() else ''}{_CLASSES[letter.lower()]}]"
        if (found := _PROPERTY.match(self._pattern, self._at - 1)) is not None:
            self._at = found.end()
            return "\\" + found[0]
        if (found := _HEX.match(self._pattern, self._at - 1)) is not None:
            self._at = found.end()
            return (self._character(int(found[1] or found[2] or found[3], 16)),)
        if letter == "c" and self._pattern[self._at : self._at + 1].isascii():
            control = self._next("\\c at the end")
            if control.isalpha():
                return (chr(ord(control) % 32),)
        if letter in _CONTROLS and not (letter == "0" and self._pattern[self._at : self._at + 1].isdecimal()):
            return (_CONTROLS[letter],)
        if letter.isalnum():
            raise ValueError(f"\\{letter} (a boundary, a back-reference or no escape of ECMA 262) cannot be followed")
        return (letter,)

    def _character(self, code: int) -> str:
        if 0xD800 <= code < 0xDC00 and (low := _LOW_HALF.match(self._pattern, self._at)) is not None:
            self._at = low.end()
            code = 0x10000 + ((code - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise ValueError(f"\\u{code:x} is no character")
        return chr(code)

    def _brackets(self) -> str:
        is_negated = self._pattern.startswith("^", self._at)
        self._at += is_negated
        parts = []
        while (item := self._member(is_negated)) is not None:
            is_range = self._pattern.startswith("-", self._at) and not self._pattern.startswith("-]", self._at)
            if not is_range:
                if is_negated or isinstance(item, str) or item[0] not in UNWRITABLE:
                    parts.append(item if isinstance(item, str) else _literal(item[0]))
                continue
            self._at += 1
            last = self._member(is_negated)
            if isinstance(item, str) or not isinstance(last, tuple) or last[0] < item[0]:
                raise ValueError("a range in brackets goes from one character to a later one")
            if item != last or is_negated or item[0] not in UNWRITABLE:
                parts.append(f"{_literal(item[0])}-{_literal(last[0])}")
        if not parts:
            return _ANY_CHARACTER if is_negated else _NO_CHARACTER
        return f"[{'^' if is_negated else ''}{''.join(parts)}]"

    def _member(self, is_negated: bool) -> str | tuple[str] | None:
        letter = self._next("brackets without an end")
        if letter == "]":
            return None
        if letter != "\\":
            return (letter,)
        if self._pattern.startswith("b", self._at):
            self._at += 1
            return ("\b",)
        return self._escape(is_negated)

    def _next(self, at_end: str = "") -> str:
        if self._at == len(self._pattern):
            raise ValueError(at_end)
        self._at += 1
        return self._pattern[self._at - 1]


def _one(letter: str) -> str:
    return _NO_CHARACTER if letter in UNWRITABLE else _literal(letter)


def _literal(letter: str) -> str:
    if letter in _META:
        return "\\" + letter
    return letter if letter.isalnum() or (letter.isascii() and letter.isprintable()) else f"\\x{{{ord(letter):x}}}"

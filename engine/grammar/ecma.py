"""Translates the ECMA 262 patterns of JSON schemas to the Rust regular expressions that llguidance expects.

The syntax is similar, but `.` and `\\s` match different line ends and spaces, and inside brackets Rust reads `[`, `&&`,
`--` and `~~` as operators. llguidance itself treats `\\d` and `\\w` as ASCII, as ECMA does, and refuses constructs that
no automaton can match (look-around, back-references, word boundaries).
"""

import re

# JSON writes these as \u00xx, which our grammars never allow; llguidance would silently drop them from a fixed text.
UNWRITABLE = frozenset(map(chr, (*range(8), 0x0B, *range(0x0E, 0x20), 0x7F)))

_SPACE = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
_NOT_A_LINE_END = r"[^\n\r\x{2028}\x{2029}]"
_PIECE = re.compile(r"\[(?:\\.|[^\]\\])*\]|\\c[A-Za-z]|\\.|.", re.DOTALL)
_MEMBER = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|u\{[0-9a-fA-F]+\}|c[A-Za-z]|[pP]\{[^}]*\}|.)|.", re.DOTALL)
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]+)\})")
_CONTROLS = {r"\0": "\0", r"\v": "\v", r"\b": "\b"}
_OPERATORS = frozenset("[&~-")


def translated(pattern: str) -> str:
    """Return the translated pattern; raise ValueError if it needs an unwritable character or ends in a backslash."""
    parts = []
    for piece in _PIECE.findall(pattern):
        if piece == ".":
            parts.append(_NOT_A_LINE_END)
        elif piece == r"\s":
            parts.append(f"[{_SPACE}]")
        elif piece == r"\S":
            parts.append(f"[^{_SPACE}]")
        elif piece == "\\":
            raise ValueError("a backslash at its end")
        elif len(piece) > 1 and piece[0] == "[":
            parts.append(_brackets(piece))
        else:
            parts.append(piece)
    outside = re.sub(r"\[(?:\\.|[^\]\\])*\]", "", pattern)
    if not UNWRITABLE.isdisjoint(map(_character, _MEMBER.findall(outside))):
        raise ValueError("a control character, which JSON can only write as an escape")
    return "".join(parts)


def _brackets(piece: str) -> str:
    if piece == "[^]":
        return "(?s:.)"
    is_negated = piece.startswith("[^")
    members = _MEMBER.findall(piece[1 + is_negated : -1])
    found, at = [], 0
    while at < len(members):
        member = members[at]
        if at + 2 < len(members) and members[at + 1] == "-":
            found.append(f"{_literal(member)}-{_literal(members[at + 2])}")
            at += 3
            continue
        if member == r"\s":
            found.append(_SPACE)
        elif member == r"\S":
            found.append(f"[^{_SPACE}]")
        elif is_negated or _character(member) not in UNWRITABLE:
            found.append(_literal(member))
        at += 1
    if not found:
        raise ValueError("a control character, which JSON can only write as an escape")
    return f"[{'^' if is_negated else ''}{''.join(found)}]"


def _literal(member: str) -> str:
    return "\\" + member if member in _OPERATORS else member


def _character(member: str) -> str:
    """Return the character that an escape denotes; return other escapes and single characters unchanged."""
    if (code := _CODE.fullmatch(member)) is not None:
        number = int(code[1] or code[2] or code[3], 16)
        return chr(number) if number < 0x110000 else member
    if member.startswith(r"\c") and len(member) == 3:
        return chr(ord(member[2]) % 32)
    return _CONTROLS.get(member, member)

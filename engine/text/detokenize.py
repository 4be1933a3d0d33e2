"""Token ids to text, a few at a time, with the same result as decoding them all at once.

The `tokenizers` library's DecodeStream is as fast (0.5 µs a token, this 0.7) but not exact: it loses what is
unfinished at the end, raises where a bad byte changes the text before it, and while bytes stay invalid its time
grows with the square (4,000 such ids: 1.6 s). Here each id's contribution is looked up once and kept, and a
stream carries from push to push only what the next id may still change:

- byte-level vocabularies: up to three bytes of an unfinished UTF-8 character;
- SentencePiece-like ones: the run of byte tokens (`<0xE4>` …) that has not ended yet. The library turns such a run
  into text only if all of it is valid, so no earlier answer would be exact.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from penstock.engine.model_files import ModelRefused

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
KNOWN_DECODERS = "ByteLevel, Metaspace, or Replace + ByteFallback + Fuse + Strip (any of them may be absent)"


def byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level vocabularies write for each byte: printable Latin-1 stands for itself, the other
    68 bytes follow from U+0100 on (the scheme of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + n): byte for n, byte in enumerate(rest)}


class DecoderPlan(msgspec.Struct, frozen=True):
    """The steps of a tokenizer's decoder that differ between the tokenizers in use."""

    byte_level: bool = False
    joiner: str = ""  # before every token
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = (" ", 0)  # a character, and how many of it are dropped at the start of the text
    mark: str = ""  # written for a space; unlike a replacement, it vanishes from the first token if `bare_first`
    bare_first: bool = False


class TextStream(Protocol):
    """Incremental detokenizing of one sequence."""

    def push(self, ids: list[int]) -> str:
        """Return the text that these ids complete. Bytes of an unfinished character are held back."""

    def flush(self) -> str:
        """Return what was held back, at the end of the sequence."""


class Detokenizer:
    """Streams of one tokenizer. Ids that the vocabulary does not have add nothing, as in the library's decode."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        self._plan = plan_of(tokenizer)
        self._spell = _spell_bytes(tokenizer) if self._plan.byte_level else _spell_text(tokenizer, self._plan)
        self._nothing = b"" if self._plan.byte_level else None
        self._special_ids = special_ids
        self._all = _Pieces(self._spell)
        self._showing = {frozenset[int](): self._visible(frozenset())}

    def stream(
        self,
        skip_special_tokens: bool = True,
        keep_leading_space: bool = False,
        shown_ids: frozenset[int] = frozenset(),
    ) -> TextStream:
        """Decode one sequence as it grows. SentencePiece-like vocabularies drop the space before a text's first
        word; `keep_leading_space` keeps it, for text that continues a prompt. `shown_ids` are special tokens that
        are never skipped."""
        if shown_ids not in self._showing:  # a server has one such set, or none
            self._showing[shown_ids] = self._visible(shown_ids)
        pieces = self._showing[shown_ids] if skip_special_tokens else self._all
        if self._plan.byte_level:
            return _ByteStream(pieces)
        return _PieceStream(pieces, self._plan, keep_leading_space)

    def _visible(self, shown_ids: frozenset[int]) -> "_Pieces":
        hidden = self._special_ids - shown_ids
        return _Pieces(lambda token_id: self._nothing if token_id in hidden else self._spell(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text: possibly a part of a character."""
        piece = self._all[token_id]
        if isinstance(piece, int):
            return bytes((piece,))
        if isinstance(piece, str):
            return (piece.replace(self._plan.mark, " ") if self._plan.mark else piece).encode()
        return piece or b""


class _Pieces(dict[int, Any]):
    """id → what it adds to the text, found on first use: most of a vocabulary is never generated."""

    def __init__(self, spell: Callable[[int], bytes | str | int | None]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes | str | int | None:
        piece = self[token_id] = self._spell(token_id)
        return piece


class _ByteStream:
    """Every piece is bytes; invalid UTF-8 becomes U+FFFD in the same places as in the library."""

    __slots__ = ("_decode", "_pieces")

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: list[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class _PieceStream:
    """A piece is text, one byte (an int), or None where the token does not count."""

    __slots__ = ("_bare_first", "_mark", "_pieces", "_run", "_strip", "_strip_char")

    def __init__(self, pieces: _Pieces, plan: DecoderPlan, keep_leading_space: bool) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._mark, self._bare_first = plan.mark, plan.bare_first and not keep_leading_space
        self._strip_char, self._strip = plan.strip
        if keep_leading_space:
            self._strip = 0

    def push(self, ids: list[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            piece = self._pieces[token_id]
            if piece is None:
                continue
            if type(piece) is int:
                self._run.append(piece)
            else:
                if self._run:
                    parts.append(self._end_run())
                parts.append(piece.replace(self._mark, "") if self._bare_first else piece)
            self._bare_first = False
        text = "".join(parts)
        return self._strip_start(text.replace(self._mark, " ") if self._mark else text)

    def flush(self) -> str:
        return self._strip_start(self._end_run())

    def _end_run(self) -> str:
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            text = "\ufffd" * len(self._run)
        self._run.clear()
        return text

    def _strip_start(self, text: str) -> str:
        while self._strip and text:
            if text[0] != self._strip_char:
                self._strip = 0
                break
            text = text[1:]
            self._strip -= 1
        return text


def plan_of(tokenizer: Tokenizer) -> DecoderPlan:
    """Read the decoder's own description. Raises ModelRefused for one that is not understood in full."""
    state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else None
    if state is None:
        return DecoderPlan(joiner=" ", strip=(" ", 1))  # the library joins the tokens with spaces
    steps = _flatten(state)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return DecoderPlan(byte_level=True)
    replacements = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    byte_fallback = bool(steps) and steps[0]["type"] == "ByteFallback" and bool(steps.pop(0))
    strip = (" ", 0)
    match steps:
        case [{"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}] if not byte_fallback:
            return DecoderPlan(replacements=tuple(replacements), mark=mark, bare_first=scheme != "never")
        case [{"type": "Fuse"}, {"type": "Strip", "content": content, "start": start, "stop": 0}]:
            strip = (content, start)
        case [] | [{"type": "Fuse"}]:
            pass
        case _:
            raise ModelRefused(f"tokenizer: its decoder is {' + '.join(kinds)}; supported are {KNOWN_DECODERS}")
    return DecoderPlan(replacements=tuple(replacements), byte_fallback=byte_fallback, strip=strip)


def _flatten(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for part in state["decoders"] for step in _flatten(part)]


def _spell_bytes(tokenizer: Tokenizer) -> Callable[[int], bytes]:
    alphabet = byte_alphabet()

    def spell(token_id: int) -> bytes:
        token = tokenizer.id_to_token(token_id) or ""
        try:
            return bytes([alphabet[character] for character in token])
        except KeyError:
            return token.encode()  # an added token, written as it is

    return spell


def _spell_text(tokenizer: Tokenizer, plan: DecoderPlan) -> Callable[[int], str | int | None]:
    def spell(token_id: int) -> str | int | None:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            return None
        for old, new in plan.replacements:
            token = token.replace(old, new)
        byte = BYTE_TOKEN.fullmatch(token) if plan.byte_fallback else None
        return int(byte[1], 16) if byte else plan.joiner + token

    return spell

"""Incremental detokenization: decodes token ids as they arrive, with the same result as decoding all ids at once.

DecodeStream of the `tokenizers` library is as fast (0.5 µs per token, here 0.7) but not exact: it loses an unfinished
character at the end, raises an error if an invalid byte changes the text before it, and takes quadratic time while
bytes stay invalid (1.6 s for 4,000 such ids). Here the text of each id is looked up once and cached, and a stream
carries between pushes only what the next id may still change:

- byte-level vocabularies: up to three bytes of an unfinished UTF-8 character;
- SentencePiece-like ones: the current run of byte tokens (`<0xE4>` …). The library decodes such a run as text only if
  the whole run is valid, so no part of it can be returned earlier.
"""

import codecs
import json
import re
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from tokenizers import Tokenizer

from penstock.engine.model_files import ModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
KNOWN_DECODERS = "ByteLevel, Metaspace, or Replace + ByteFallback + Fuse + Strip (any of them may be absent)"


def byte_alphabet() -> dict[str, int]:
    """Return the map from the characters of byte-level vocabularies to bytes, as in GPT-2: printable Latin-1 characters
    map to themselves, and characters from U+0100 on to the other 68 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + n): byte for n, byte in enumerate(rest)}


class DecoderPlan(msgspec.Struct, frozen=True):
    """The decoder settings that differ between supported tokenizers."""

    byte_level: bool = False
    joiner: str = ""  # inserted before every token
    replacements: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = (" ", 0)  # a character, and how many of them to drop at the start of the text
    mark: str = ""  # replaced with a space; with `bare_first`, removed from the first token instead
    bare_first: bool = False


class TextStream(Protocol):
    """Incremental detokenization of one sequence."""

    def push(self, ids: list[int]) -> str:
        """Return the text that these ids complete, holding back the bytes of an unfinished character."""

    def flush(self) -> str:
        """Return the text held back so far; call it at the end of the sequence."""


class Detokenizer:
    """Creates text streams for one tokenizer. Ids outside the vocabulary add no text, as in the library's decode."""

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
        """Return a stream that decodes one sequence. SentencePiece-like vocabularies drop the space before a text's
        first word; `keep_leading_space` keeps it, for text that continues a prompt. `shown_ids` are special tokens
        that are never skipped."""
        if shown_ids not in self._showing:  # a server uses at most one such set
            self._showing[shown_ids] = self._visible(shown_ids)
        pieces = self._showing[shown_ids] if skip_special_tokens else self._all
        if self._plan.byte_level:
            return _ByteStream(pieces)
        return _PieceStream(pieces, self._plan, keep_leading_space)

    def _visible(self, shown_ids: frozenset[int]) -> "_Pieces":
        hidden = self._special_ids - shown_ids
        return _Pieces(lambda token_id: self._nothing if token_id in hidden else self._spell(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; they may be only a part of a character."""
        piece = self._all[token_id]
        if isinstance(piece, int):
            return bytes((piece,))
        if isinstance(piece, str):
            return (piece.replace(self._plan.mark, " ") if self._plan.mark else piece).encode()
        return piece or b""


class _Pieces(dict[int, Any]):
    """Maps each id to its piece of text, computed on first use, because most of a vocabulary is never generated."""

    def __init__(self, spell: Callable[[int], bytes | str | int | None]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> bytes | str | int | None:
        piece = self[token_id] = self._spell(token_id)
        return piece


class _ByteStream:
    """A stream whose pieces are bytes; invalid UTF-8 becomes U+FFFD in the same places as in the library."""

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
    """A stream whose pieces are text, one byte (an int), or None for a token that adds no text."""

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
    """Return the plan for a tokenizer's decoder; raise ModelError for an unsupported decoder."""
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
            raise ModelError(f"tokenizer: its decoder is {' + '.join(kinds)}; supported are {KNOWN_DECODERS}")
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
            return token.encode()  # an added token, whose text is not in the byte alphabet

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

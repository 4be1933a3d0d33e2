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

from tokenizers import Tokenizer

from penstock.engine.model_error import ModelError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
KNOWN_DECODERS = (
    "ByteLevel, or Replace, ByteFallback, Metaspace and Strip in any order, then Fuse and a Strip of one space"
)
_OTHER = "\0"  # a token without a meaning to any decoder, to learn what another token adds behind it


def byte_alphabet() -> dict[str, int]:
    """Return the map from the characters of byte-level vocabularies to bytes, as in GPT-2: printable Latin-1 characters
    map to themselves, and characters from U+0100 on to the other 68 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in sorted(printable)} | {chr(256 + n): byte for n, byte in enumerate(rest)}


class TextStream(Protocol):
    """Incremental detokenization of one sequence."""

    def push(self, ids: list[int]) -> str:
        """Return the text that these ids complete, holding back the bytes of an unfinished character."""

    def flush(self) -> str:
        """Return the text held back so far; call it at the end of the sequence."""


class Detokenizer:
    """Creates text streams for one tokenizer. Ids outside the vocabulary add no text, as in the library's decode."""

    def __init__(self, tokenizer: Tokenizer, special_ids: frozenset[int]) -> None:
        steps = _decoder_steps(tokenizer)
        self._is_byte_level = "ByteLevel" in steps
        self._decode: Callable[[list[str]], str] = tokenizer.decoder.decode if tokenizer.decoder else " ".join
        if self._is_byte_level:
            self._spell: Callable[[int], Any] = _spell_bytes(tokenizer)
        else:
            self._spell = _spell_text(tokenizer, self._decode, "ByteFallback" in steps)
        self._nothing = b"" if self._is_byte_level else None
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
        if self._is_byte_level:
            return _ByteStream(pieces)
        return _PieceStream(pieces, self._decode, is_first=not keep_leading_space)

    def _visible(self, shown_ids: frozenset[int]) -> "_Pieces":
        hidden = self._special_ids - shown_ids
        return _Pieces(lambda token_id: self._nothing if token_id in hidden else self._spell(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token adds to a text; they may be only a part of a character."""
        piece = self._all[token_id]
        if isinstance(piece, int):
            return bytes((piece,))
        return piece[1].encode() if isinstance(piece, tuple) else piece or b""


class _Pieces(dict[int, Any]):
    """Maps each id to its piece of text, computed on first use, because most of a vocabulary is never generated."""

    def __init__(self, spell: Callable[[int], Any]) -> None:
        super().__init__()
        self._spell = spell

    def __missing__(self, token_id: int) -> Any:
        piece = self[token_id] = self._spell(token_id)
        return piece


class _ByteStream:
    """A stream whose pieces are bytes; invalid UTF-8 becomes U+FFFD in the same places as in the library."""

    def __init__(self, pieces: _Pieces) -> None:
        self._pieces = pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, ids: list[int]) -> str:
        pieces = self._pieces
        return self._decode(b"".join([pieces[token_id] for token_id in ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class _PieceStream:
    """A stream whose pieces are texts (at the start, and later), one byte (an int), or None for a token without text."""

    def __init__(self, pieces: _Pieces, decode: Callable[[list[str]], str], *, is_first: bool) -> None:
        self._pieces, self._decode = pieces, decode
        self._is_first = is_first  # nothing has been decoded yet
        self._run: list[str] = []  # byte tokens

    def push(self, ids: list[int]) -> str:
        parts: list[str] = []
        for token_id in ids:
            piece = self._pieces[token_id]
            if piece is None:
                continue
            if type(piece) is int:
                self._run.append(f"<0x{piece:02X}>")
                continue
            if self._run:
                parts.append(self.flush())
            at_start, later = piece
            parts.append(at_start if self._is_first else later)
            self._is_first = False
        return "".join(parts)

    def flush(self) -> str:
        if not self._run:
            return ""
        text = self._decode(self._run) if self._is_first else self._decode([_OTHER, *self._run])[len(_OTHER) :]
        self._run, self._is_first = [], False
        return text


def _decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """Return the steps of a tokenizer's decoder; raise ModelError if the text of a token may depend on more than
    whether it is the first and the run of byte tokens around it."""
    steps = _flatten(json.loads(tokenizer.decoder.__getstate__())) if tokenizer.decoder else []
    kinds = [step["type"] for step in steps]
    fuse = kinds.index("Fuse") if "Fuse" in kinds else len(kinds)
    is_known = kinds == ["ByteLevel"] or {*kinds[:fuse]} <= {"Replace", "ByteFallback", "Metaspace", "Strip"}
    whole = [(step["type"], step.get("start"), step.get("stop")) for step in steps[fuse + 1 :]]
    if not is_known or whole not in ([], [("Strip", 0, 0)], [("Strip", 1, 0)]):
        raise ModelError(f"tokenizer: its decoder is {' + '.join(kinds)}; supported are {KNOWN_DECODERS}")
    return kinds


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


def _spell_text(
    tokenizer: Tokenizer, decode: Callable[[list[str]], str], has_bytes: bool
) -> Callable[[int], tuple[str, str] | int | None]:
    def spell(token_id: int) -> tuple[str, str] | int | None:
        token = tokenizer.id_to_token(token_id)
        if token is None:
            return None
        byte = BYTE_TOKEN.fullmatch(token) if has_bytes else None
        return int(byte[1], 16) if byte else (decode([token]), decode([_OTHER, token])[len(_OTHER) :])

    return spell

"""Tokenizes texts in segments between special tokens, and caches the token ids of each segment.

A conversation sends its whole history with every turn. Tokenizers never merge text across a special token, so the ids
of the whole text are the ids of its segments, one after the other. At any other place this does not hold (every third
text differed). Whether a tokenizer behaves so is checked when it is loaded: special tokens that absorb neighbouring spaces, or
that overlap another added token, are not used as cuts.
"""

import re
import threading
from array import array
from collections import OrderedDict

from penstock.engine.text.tokenizer import Tokenizer

CAPACITY_BYTES = 64 << 20
MIN_CHARS = 32  # a shorter piece is tokenized as fast as it is looked up
OVERHEAD_BYTES = 200  # of an entry, besides its text and ids
PIECES = ("Hello", " two words ", "\n\nA line.\n", "naïve 你好", "", "  ", "x" * 40, "def f(x):\n    return x")


class SegmentCache:
    """Safe to use from several threads. Ids are int32 little-endian, as the engine core takes them."""

    def __init__(self, tokenizer: Tokenizer, capacity_bytes: int = CAPACITY_BYTES) -> None:
        self._tokenizer = tokenizer
        self._capacity_bytes = capacity_bytes
        self._size_bytes = 0
        self._ids: OrderedDict[str, bytes] = OrderedDict()  # piece of text → its token ids, least recently used first
        self._lock = threading.Lock()
        self._cuts = _cuts(tokenizer)
        words = sorted(self._cuts, key=len, reverse=True)  # the longest of several that begin at one place wins
        self._pattern = re.compile(f"({'|'.join(map(re.escape, words))})") if words else None

    @property
    def is_exact(self) -> bool:
        """Return whether texts can be cut; otherwise every text is tokenized whole."""
        return self._pattern is not None

    def encode(self, text: str, add_special_tokens: bool) -> bytes:
        if self._pattern is None or add_special_tokens:  # a chat's template has put its own there
            return _pack(self._tokenizer.encode(text, add_special_tokens))
        pieces = self._pattern.split(text)  # text, special, text, special, …, text
        found = [self._cuts.get(piece) if place % 2 else self._recall(piece) for place, piece in enumerate(pieces)]
        missing = [place for place, ids in enumerate(found) if ids is None]
        if missing:
            encoded = self._tokenizer.encode_batch([pieces[place] for place in missing], False)
            for place, ids in zip(missing, encoded, strict=True):
                found[place] = _pack(ids)
                self._remember(pieces[place], found[place] or b"")
        return b"".join(ids for ids in found if ids)

    def _recall(self, piece: str) -> bytes | None:
        if not piece:
            return b""
        if len(piece) < MIN_CHARS:
            return None
        with self._lock:
            ids = self._ids.get(piece)
            if ids is not None:
                self._ids.move_to_end(piece)
        return ids

    def _remember(self, piece: str, ids: bytes) -> None:
        if len(piece) < MIN_CHARS or self._cost(piece, ids) > self._capacity_bytes:
            return
        with self._lock:
            if piece not in self._ids:
                self._ids[piece] = ids
                self._size_bytes += self._cost(piece, ids)
            while self._size_bytes > self._capacity_bytes:
                self._size_bytes -= self._cost(*self._ids.popitem(last=False))

    def _cost(self, piece: str, ids: bytes) -> int:
        return OVERHEAD_BYTES + 4 * len(piece) + len(ids)  # a str takes up to 4 bytes a character

    def check(self) -> None:
        with self._lock:
            assert self._size_bytes == sum(self._cost(piece, ids) for piece, ids in self._ids.items())
            assert self._size_bytes <= self._capacity_bytes


def _cuts(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the special tokens at which a text may be cut, with their ids; none if the tokenizer fails the test."""
    added = dict(tokenizer.backend.get_added_tokens_decoder().items())
    texts = [token.content for token in added.values()]
    cuts = {
        token.content: _pack([token_id])
        for token_id, token in added.items()
        if token.special
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
        and token.content
        and not any(_overlap(token.content, other) for other in texts if other != token.content)
    }
    return cuts if all(_is_cut_exactly(tokenizer, word, ids) for word, ids in list(cuts.items())[:16]) else {}


def _overlap(word: str, other: str) -> bool:
    """Return whether the two can match the same characters."""
    if word in other or other in word:
        return True
    sizes = range(1, min(len(word), len(other)))
    return any(word[-size:] == other[:size] or other[-size:] == word[:size] for size in sizes)


def _is_cut_exactly(tokenizer: Tokenizer, word: str, ids: bytes) -> bool:
    apart = [_pack(each) for each in tokenizer.encode_batch(PIECES, False)]
    pairs = [(left, right) for left in range(len(PIECES)) for right in range(len(PIECES))]
    whole = tokenizer.encode_batch([PIECES[left] + word + PIECES[right] for left, right in pairs], False)
    return all(
        _pack(each) == apart[left] + ids + apart[right] for each, (left, right) in zip(whole, pairs, strict=True)
    )


def _pack(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()

"""Block keys: content hashes that identify a block of tokens in the prefix cache, in every tier and in the router.

A key is 32 bytes, one link of a SHA-256 chain that starts at the digest of a namespace. The same tokens after the same
prefix have the same key in every process and after every restart; two namespaces share no key. csrc/keys.c does the
hashing. Keys are plain `bytes`, so the garbage collector tracks nothing per block. docs/block-keys.md has the layout,
the reasons and the measurements.
"""

import struct
import sys
from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from hashlib import sha256
from typing import Any, TypeAlias

import numpy as np

from penstock._csrc import ffi, lib

NAMESPACE_VERSION = b"penstock block keys 1"  # change it whenever the key layout changes: old keys then never match
KEY_BYTES = 32
SHORT_KEY_BYTES = 8  # the first bytes of a key, which identify a block in a router's index
MAX_ID = 0xFFFFFFFF

Tokens: TypeAlias = bytes | memoryview | Sequence[int]  # already validated little-endian int32 ids, or a list of ids


def namespace_root(*, model: bytes = b"", adapter: str | bytes | None = None, salt: str | bytes | None = None) -> bytes:
    """Return the root of a namespace's chains: requests with the same root may share blocks.

    `model` is the fingerprint of the weights and of everything else that changes the computed KV values. No adapter and
    an adapter named "" are different namespaces, and so are a str and the bytes of its UTF-8 encoding.
    """
    digest = sha256(NAMESPACE_VERSION)
    for value in (model, adapter, salt):
        # Encoding kind, length and content makes different sequences of fields give different bytes.
        if value is None:
            kind, content = b"\0", b""
        elif isinstance(value, bytes):
            kind, content = b"\1", value
        else:
            kind, content = b"\2", value.encode("utf-8", "surrogatepass")  # JSON may contain an unpaired surrogate
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return digest.digest()


def block_keys(tokens: Tokens, block_size: int, *, root: bytes = namespace_root()) -> list[bytes]:
    """Return the keys of the full blocks: key_0 = SHA-256(root ‖ tokens), key_i = SHA-256(key_{i-1} ‖ tokens).

    Ids are hashed as little-endian u32. To continue a chain, pass the last key as `root` and the tokens that follow it.
    Raise ValueError for a list with a number that does not fit u32: another engine may have published it.
    """
    assert block_size >= 1 and len(root) == KEY_BYTES, (block_size, root)
    ids = _as_u32(tokens)
    block_bytes = 4 * block_size
    num_blocks = len(ids) // block_bytes
    if num_blocks == 1:
        # The scheduler takes this path for every block that decoding fills. hashlib keeps the GIL for such short
        # inputs. A cffi call releases it, and while another thread is busy, one call in a thousand waits milliseconds
        # to get it back, which makes the average call ten times slower (docs/block-keys.md has the figures).
        return [sha256(root + ids[:block_bytes]).digest()]
    if num_blocks == 0:
        return []
    keys = np.empty(num_blocks, dtype=f"V{KEY_BYTES}")
    lib.penstock_block_keys(root, ids, num_blocks, block_size, 0, ffi.from_buffer("uint8_t[]", keys))
    return keys.tolist()  # five times faster than slicing


def page_key(key: bytes, group: int, page: int = 0) -> bytes:
    """Return the key of what another layer group keeps at the end of the prefix `key`: a block or a state page. No block
    has this key, because block keys hash a multiple of four bytes and this hashes an odd number."""
    return sha256(key + struct.pack("<BHI", 0, group, page)).digest()


def _as_u32(tokens: Tokens) -> bytes:
    if isinstance(tokens, (bytes, memoryview)):
        ids = bytes(tokens)
        assert sys.byteorder == "little" and ids[3::4].isascii(), "negative token id"
        return ids
    try:
        return struct.Struct(f"<{len(tokens)}I").pack(*tokens)  # 3 ns per id; struct.pack takes 8, numpy 11
    except struct.error:
        position, token = next((at, each) for at, each in enumerate(tokens) if not 0 <= each <= MAX_ID)
        raise ValueError(f"tokens[{position}]: {token} is outside 0 … {MAX_ID}") from None


class RecentKeys(OrderedDict[bytes, Any]):
    """The `limit` keys that were added last, with a value each."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def add(self, key: bytes, value: Any = None) -> None:
        self[key] = value
        self.move_to_end(key)
        if len(self) > self._limit:
            self.popitem(last=False)


class KeyChanges:
    """The net change of a set of keys since the last `take`: a key removed and added again has not changed."""

    def __init__(self, came: Iterable[bytes] = ()) -> None:
        self._changed = dict.fromkeys(came, True)  # key → whether it is in the set now

    def note(self, key: bytes, is_there: bool) -> None:
        """Record that the key was added (`is_there`) or removed."""
        if self._changed.get(key, is_there) == is_there:
            self._changed[key] = is_there
        else:
            del self._changed[key]

    def take(self) -> tuple[list[bytes], list[bytes]]:
        """Return the added and the removed keys, and start over."""
        changed, self._changed = self._changed, {}
        return [key for key, has in changed.items() if has], [key for key, has in changed.items() if not has]

    def check(self, keys: Container[bytes]) -> None:
        assert all((key in keys) == has for key, has in self._changed.items())

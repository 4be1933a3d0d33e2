"""Block keys: what a block of tokens is called, in the prefix index, in every tier and in the router.

A key is 32 bytes, a link of a SHA-256 chain that starts at the digest of a namespace, so the same tokens behind
the same prefix have the same key in every process and after every restart, and two namespaces share none. The
hashing is csrc/keys.c. Keys are plain `bytes`: the garbage collector tracks nothing per block.
docs/block-keys.md has the layout, the reasons and the numbers.
"""

import struct
import sys
from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np

from penstock._csrc import ffi, lib

NAMESPACE_VERSION = b"penstock block keys 1"  # changes with what a key says: old keys then match nothing
KEY_BYTES = 32
MAX_ID = 0xFFFFFFFF

Tokens: TypeAlias = bytes | memoryview | Sequence[int]  # little-endian int32 ids that were checked before, or a list


def namespace_root(*, model: bytes = b"", adapter: str | bytes | None = None, salt: str | bytes | None = None) -> bytes:
    """Return the root of a namespace's chains: requests with the same root may share blocks.

    `model` is the fingerprint of the weights' content and of whatever else changes the numbers. No adapter and an
    adapter named "" are two namespaces, and so are a str and the bytes of its UTF-8.
    """
    digest = sha256(NAMESPACE_VERSION)
    for value in (model, adapter, salt):
        # Kind, length and content: no two sequences of fields give the same bytes.
        if value is None:
            kind, content = b"\0", b""
        elif isinstance(value, bytes):
            kind, content = b"\1", value
        else:
            kind, content = b"\2", value.encode("utf-8", "surrogatepass")  # JSON may carry half a surrogate pair
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return digest.digest()


def block_keys(tokens: Tokens, block_size: int, *, root: bytes = namespace_root()) -> list[bytes]:
    """Return the keys of the full blocks: key_0 = SHA-256(root ‖ tokens), key_i = SHA-256(key_{i-1} ‖ tokens).

    Ids enter the hash as little-endian u32. To continue a chain, pass the last key as `root` and the tokens that follow it.
    Raises ValueError for a list with a number that is no u32: another engine may have published it.
    """
    assert block_size >= 1 and len(root) == KEY_BYTES, (block_size, root)
    ids = _as_u32(tokens)
    block_bytes = 4 * block_size
    num_blocks = len(ids) // block_bytes
    if num_blocks == 1:
        # The scheduler comes here for every block that decoding fills. hashlib keeps the GIL for so little. A cffi
        # call releases it, and beside a busy thread one in a thousand then waits milliseconds to get it back: ten
        # times the cost on average (docs/block-keys.md has the figures).
        return [sha256(root + ids[:block_bytes]).digest()]
    if num_blocks == 0:
        return []
    keys = np.empty(num_blocks, dtype=f"V{KEY_BYTES}")
    lib.penstock_block_keys(root, ids, num_blocks, block_size, 0, ffi.from_buffer("uint8_t[]", keys))
    return keys.tolist()  # five times faster than slicing


def page_key(key: bytes, group: int, page: int = 0) -> bytes:
    """Return the key of what another group of layers keeps of the prefix that `key` names: the tokens of its last block, or a page
    of the state behind it. No block has it: those hash a multiple of four bytes, and this is an odd number."""
    return sha256(key + struct.pack("<BHI", 0, group, page)).digest()


def _as_u32(tokens: Tokens) -> bytes:
    if isinstance(tokens, (bytes, memoryview)):
        ids = bytes(tokens)
        assert sys.byteorder == "little" and ids[3::4].isascii(), "a negative id"
        return ids
    try:
        return struct.Struct(f"<{len(tokens)}I").pack(*tokens)  # 3 ns an id; struct.pack takes 8, numpy 11
    except struct.error:
        position, token = next((at, each) for at, each in enumerate(tokens) if not 0 <= each <= MAX_ID)
        raise ValueError(f"tokens[{position}]: {token} is outside 0 … {MAX_ID}") from None

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
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock._csrc import ffi, lib

NAMESPACE_VERSION = b"penstock block keys 1"  # changes with what a key says: old keys then match nothing
KEY_BYTES = 32
MAX_ID = 0xFFFFFFFF

Tokens: TypeAlias = Sequence[int] | bytes | bytearray | memoryview | npt.NDArray[np.integer[Any]]


def namespace_root(*, model: bytes = b"", adapter: str | bytes | None = None, salt: str | bytes | None = None) -> bytes:
    """The root of a namespace's chains: who may share blocks with whom.

    `model` is the fingerprint of the weights' content and of whatever else changes the numbers. No adapter and an
    adapter named "" are two namespaces, and so are a str and the bytes of its UTF-8.
    """
    if not isinstance(model, bytes):
        raise TypeError(f"model: expected bytes, got {type(model).__name__}")
    digest = sha256(NAMESPACE_VERSION)
    for name, value in (("model", model), ("adapter", adapter), ("salt", salt)):
        # Kind, length and content: no two sequences of fields give the same bytes.
        if value is None:
            kind, content = b"\0", b""
        elif isinstance(value, bytes):
            kind, content = b"\1", value
        elif isinstance(value, str):
            kind, content = b"\2", value.encode("utf-8", "surrogatepass")  # JSON may carry half a surrogate pair
        else:
            raise TypeError(f"{name}: expected str, bytes or None, got {type(value).__name__}")
        digest.update(kind + len(content).to_bytes(8, "little") + content)
    return digest.digest()


def block_keys(tokens: Tokens, block_size: int, *, root: bytes = namespace_root()) -> list[bytes]:
    """The keys of the full blocks of `tokens`: key_0 = SHA-256(root ‖ tokens), key_i = SHA-256(key_{i-1} ‖ tokens).

    `tokens` is a list of ids, an integer array, or bytes holding little-endian int32 (as in `Admission.tokens`).
    Ids enter the hash as little-endian u32; one outside raises ValueError. To continue a chain, pass the last
    key as `root` and the tokens that follow it.
    """
    _check_block_size(block_size)
    if type(root) is not bytes or len(root) != KEY_BYTES:
        raise _wrong_root(root)
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
    """The key of what another group of layers keeps of the prefix that `key` names: the tokens of its last block, or a page
    of the state behind it. No block has it: those hash a multiple of four bytes, and this is an odd number."""
    return sha256(key + struct.pack("<BHI", 0, group, page)).digest()


def _check_block_size(block_size: int) -> None:
    if type(block_size) is not int:
        raise TypeError(f"block_size: expected int, got {type(block_size).__name__}")
    if block_size < 1:
        raise ValueError(f"block_size: {block_size} is below 1")


def _wrong_root(root: object) -> Exception:
    if not isinstance(root, bytes):
        return TypeError(f"root: expected bytes, got {type(root).__name__}")
    return ValueError(f"root: expected {KEY_BYTES} bytes (a namespace root or a block's key), got {len(root)}")


def _as_u32(tokens: Tokens) -> bytes:
    """Return the ids as little-endian u32; raise ValueError or TypeError for one that is not a u32."""
    if isinstance(tokens, (list, tuple)):
        try:
            return struct.Struct(f"<{len(tokens)}I").pack(*tokens)  # 3 ns an id; struct.pack takes 8, numpy 11
        except struct.error:
            raise _wrong_id(tokens) from None
    raw = _raw_int32(tokens)
    if raw is not None:
        if not raw[3::4].isascii():  # a top byte above 127: a negative id
            raise _wrong_id(np.frombuffer(raw, "<i4").tolist())
        return raw
    ids = _integers(tokens)
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > MAX_ID):
        raise _wrong_id(ids.tolist())
    return ids.astype("<u4").tobytes()


def _raw_int32(tokens: object) -> bytes | None:
    """The bytes of what already is little-endian int32, or None. A slice of an `array("i")` comes as such a view."""
    if not isinstance(tokens, (bytes, bytearray, memoryview)):
        return None
    view = memoryview(tokens)
    if view.ndim != 1 or not (view.format == "B" or (view.format == "i" and sys.byteorder == "little")):
        return None
    if view.nbytes % 4:
        raise ValueError(f"tokens: {view.nbytes} bytes are not a whole number of int32 ids")
    return view.tobytes()


def _integers(tokens: object) -> npt.NDArray[np.integer[Any]]:
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        got = f"{type(tokens).__name__} of {ids.dtype} with {ids.ndim} dimensions"
        raise TypeError(f"tokens: expected a list of ids, an integer array or int32 bytes, got {got}")
    return ids


def _wrong_id(ids: Sequence[Any]) -> Exception:
    """Why these ids were refused: the first that is no u32."""
    for position, value in enumerate(ids):
        try:
            number = index(value)
        except TypeError:
            return TypeError(f"tokens[{position}]: expected int, got {type(value).__name__}")
        if not 0 <= number <= MAX_ID:
            return ValueError(f"tokens[{position}]: {number} is outside 0 … {MAX_ID}")
    return ValueError("tokens: changed while they were read")

"""What the router calls a block: the low 64 bits of the engine's own key, or a v1 key of TensorRT-LLM.

A `KeySpace` says how one kind of replica names its blocks; replicas of one model and block size share it. The
engine's rules (cache/keys.py) and these must agree on every id, or nothing ever matches: both call csrc/keys.c.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock._csrc import ffi, lib
from penstock.cache.keys import MAX_U64, Tokens, namespace_root

HashName = Literal["sha256", "v1"]
Keys = npt.NDArray[np.uint64]


class KeySpace(NamedTuple):
    """How replicas name blocks. v1 has no fingerprint in its keys; it is here so that models do not mix."""

    hash: HashName
    fingerprint: bytes
    block_size: int

    def check(self) -> "KeySpace":
        if self.hash not in ("sha256", "v1"):
            raise ValueError(f"hash: {self.hash!r} is not one of sha256, v1")
        if not 1 <= self.block_size <= 2**20:
            raise ValueError(f"block_size: {self.block_size} is outside 1 … {2**20}")
        return self

    def num_keys(self, num_tokens: int) -> int:
        """v1 leaves out the last token and counts a block that is not full."""
        if self.hash == "v1":
            return -(-max(num_tokens - 1, 0) // self.block_size)
        return num_tokens // self.block_size

    def tokens_of(self, num_keys: int, num_tokens: int) -> int:
        """How many tokens the first keys stand for."""
        return min(num_keys * self.block_size, num_tokens)

    def root(self, salt: str | None, adapter: str | None) -> bytes:
        return namespace_root(model=self.fingerprint, adapter=adapter, salt=salt)


def route_keys(tokens: bytes, block_size: int, *, root: bytes) -> Keys:
    """The low 64 bits of the keys of the full blocks; `tokens` are little-endian int32."""
    num_blocks = len(tokens) // (4 * block_size)
    keys = np.empty(num_blocks, dtype=np.uint64)
    lib.penstock_route_keys(root, tokens, num_blocks, block_size, ffi.from_buffer("uint64_t[]", keys))
    return keys


def block_key_v1(
    tokens: Tokens,
    *,
    parent: int = 0,
    salt_id: int | None = None,
    lora_id: int | None = None,
    extra_ids: Sequence[int] | None = None,
    multimodal: Sequence[tuple[bytes, int]] = (),
) -> int:
    """The v1 key of one block. `multimodal`: a digest of 32 bytes and a start offset for each item in the block.

    The salt enters the first block only (`parent` 0), the LoRA id every block. Ids wrap at 2^32.
    """
    ids = np.asarray(tokens, dtype=object) if isinstance(tokens, (list, tuple)) else np.asarray(tokens)
    raw = np.array([int(token) & 0xFFFFFFFF for token in ids], "<u4").tobytes()
    num_tokens = len(raw) // 4
    if extra_ids is not None and len(extra_ids) != num_tokens:
        raise ValueError(f"extra_ids: {len(extra_ids)} for {num_tokens} tokens")
    if any(len(digest) != 32 for digest, _ in multimodal):
        raise ValueError("multimodal: a digest is not 32 bytes long")
    digests = b"".join(digest for digest, _ in multimodal)
    return lib.penstock_block_key_v1(
        raw,
        num_tokens,
        _u64("parent", parent),
        u64_pointer("salt_id", salt_id),
        u64_pointer("lora_id", lora_id),
        ffi.NULL if extra_ids is None else ffi.new("uint64_t[]", [_u64("extra_ids", value) for value in extra_ids]),
        len(multimodal),
        digests,
        ffi.new("uint64_t[]", [_u64("multimodal", offset) for _, offset in multimodal]),
    )


def u64_pointer(name: str, value: int | None) -> Any:
    return ffi.NULL if value is None else ffi.new("uint64_t *", _u64(name, value))


def _u64(name: str, value: int) -> int:
    if not 0 <= value <= MAX_U64:
        raise ValueError(f"{name}: {value} is outside 0 … 2^64 - 1")
    return value

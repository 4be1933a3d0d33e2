"""The block keys of the router, slowly and from the formulas: what csrc must agree with."""

import hashlib
from collections.abc import Sequence

MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1


def scatter_32(value: int) -> int:
    value &= MASK_32
    for _ in range(2):
        value = ((value >> 16 ^ value) * 0x45D9F3B) & MASK_32
    return value >> 16 ^ value


def mix(state: int, scattered: int) -> int:
    return state ^ (scattered + (state << 6) + (state >> 2)) & MASK_64


def mix_32(value: int, state: int) -> int:
    return mix(state, (scatter_32(value) + 0x9E3779B9) & MASK_32)


def v1_block(tokens: Sequence[int], parent: int) -> int:
    state = len(tokens) ^ (parent * 0xBF58476D1CE4E5B9 & MASK_64)
    for token in tokens:
        state = mix_32(token, state)
    return state


def v1_chain(tokens: Sequence[int], block_size: int) -> list[int]:
    """Of a request: the last token is left out, the last block may be short."""
    keys, parent = [], 0
    for start in range(0, len(tokens) - 1, block_size):
        parent = v1_block(tokens[start : min(start + block_size, len(tokens) - 1)], parent)
        keys.append(parent)
    return keys


def sha256_chain(tokens: bytes, block_size: int, root: bytes) -> list[int]:
    """The low 64 bits of the engine's keys."""
    keys = []
    for start in range(0, len(tokens) - 4 * block_size + 1, 4 * block_size):
        root = hashlib.sha256(root + tokens[start : start + 4 * block_size]).digest()
        keys.append(int.from_bytes(root[:8], "little"))
    return keys

"""The block keys of the router, slowly and from the formulas: what csrc must agree with."""

import hashlib


def sha256_chain(tokens: bytes, block_size: int, root: bytes) -> list[int]:
    """The low 64 bits of the engine's keys."""
    keys = []
    for start in range(0, len(tokens) - 4 * block_size + 1, 4 * block_size):
        root = hashlib.sha256(root + tokens[start : start + 4 * block_size]).digest()
        keys.append(int.from_bytes(root[:8], "little"))
    return keys

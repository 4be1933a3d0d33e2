"""What the router calls a block: the low 64 bits of the engine's own key, or a v1 key of TensorRT-LLM.

A `KeySpace` says how one kind of replica names its blocks; replicas of one model and block size share it. The
engine's rules (cache/keys.py) and these must agree on every id, or nothing ever matches: both call csrc/keys.c.
"""

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cache.keys import namespace_root

HashName = Literal["sha256", "v1"]
Keys = npt.NDArray[np.uint64]


class KeySpace(NamedTuple):
    """How replicas name blocks. v1 has no fingerprint in its keys; it is here so that models do not mix."""

    hash: HashName
    fingerprint: bytes
    block_size: int

    def num_keys(self, num_tokens: int) -> int:
        """v1 leaves out the last token and counts a block that is not full."""
        if self.hash == "v1":
            return -(-max(num_tokens - 1, 0) // self.block_size)
        return num_tokens // self.block_size

    def root(self, salt: str | None, adapter: str | None) -> bytes:
        return namespace_root(model=self.fingerprint, adapter=adapter, salt=salt)

"""csrc's v1 keys, which the router's index calls from C, as a function of Python."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock._csrc import ffi, lib


def block_keys_v1(
    tokens: Sequence[int] | bytes, block_size: int, *, salt_id: int | None = None, lora_id: int | None = None
) -> NDArray[np.uint64]:
    """Of a request: its last token is left out, a last block that is not full counts."""
    ids = np.frombuffer(tokens, "<u4") if isinstance(tokens, bytes) else np.asarray(tokens, "<u4")
    num_tokens = max(len(ids) - 1, 0)
    keys = np.empty(-(-num_tokens // block_size), np.uint64)
    others = [ffi.NULL if number is None else ffi.new("uint64_t *", number) for number in (salt_id, lora_id)]
    out = ffi.from_buffer("uint64_t[]", keys)
    lib.penstock_block_keys_v1(ids.tobytes(), num_tokens, min(block_size, num_tokens), *others, out)
    return keys

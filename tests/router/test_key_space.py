"""The router's keys: the formulas, and the engine's own chain."""

import numpy as np

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.placement.index import KeySpace, PromptKeys
from tests.support.slow_hash import sha256_chain


def test_one_call_gives_the_chain_whatever_the_lengths() -> None:
    rng = np.random.default_rng(5)
    root = namespace_root(model=b"m", salt="s")
    for _ in range(2000):
        block_size = int(rng.integers(1, 40))
        tokens = rng.integers(0, 2**31, rng.integers(0, 5000 if rng.random() < 0.01 else 200), dtype="<i4").tobytes()
        sha = PromptKeys.of(tokens, KeySpace(b"m", block_size), root)
        assert sha.keys.tolist() == sha256_chain(tokens, block_size, root)


def test_the_keys_are_the_first_8_bytes_of_the_engines() -> None:
    tokens = np.random.default_rng(1).integers(0, 100_000, 39_000, dtype="<i4").tobytes()
    space = KeySpace(b"fingerprint", 16)
    root = space.root("salt", "adapter")
    assert root == namespace_root(model=b"fingerprint", salt="salt", adapter="adapter")
    expected = [int.from_bytes(key[:8], "little") for key in block_keys(tokens, 16, root=root)]
    assert PromptKeys.of(tokens, space, root).keys.tolist() == expected

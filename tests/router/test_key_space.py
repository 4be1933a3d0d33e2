"""The router's keys are the first 8 bytes of the engine's, whatever the sizes."""

import numpy as np

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.placement.index import KeySpace, prompt_keys


def test_the_keys_are_the_first_8_bytes_of_the_engines() -> None:
    rng = np.random.default_rng(5)
    for _ in range(2000):
        space = KeySpace(b"fingerprint", int(rng.integers(1, 40)))
        tokens = rng.integers(0, 2**31, rng.integers(0, 5000 if rng.random() < 0.01 else 200), dtype="<i4").tobytes()
        root = space.root("salt", "adapter")
        assert root == namespace_root(model=b"fingerprint", salt="salt", adapter="adapter")
        expected = [int.from_bytes(key[:8], "little") for key in block_keys(tokens, space.block_size, root=root)]
        assert prompt_keys(tokens, space, root).tolist() == expected

"""The router's keys: the published v1 values, the formulas, and the engine's own chain."""

import random
from typing import Any

import numpy as np
import pytest

from penstock.cache.keys import block_keys, namespace_root
from penstock.router.placement.hasher import KeySpace, block_key_v1, route_keys
from penstock.router.placement.index import RouteIndex
from tests.support.slow_hash import sha256_chain, v1_block, v1_chain


def test_v1_gives_the_published_values_of_single_blocks() -> None:
    assert block_key_v1([]) == 0
    assert block_key_v1([1, 2, 3, 4]) == 0x0003488F88096B5F
    first = block_key_v1(range(32))
    assert first == 0xF2539ED039DA8E19
    assert block_key_v1(range(32, 64), parent=first) == 0x0D2E1F3774B6ADBB
    assert block_key_v1([151644, 872, 198], salt_id=0x0123456789ABCDEF, lora_id=7) == 0x9356B1751E1BA9DB
    image = (bytes(range(32)), 9)
    assert block_key_v1([0xFFFFFFFF, 0], parent=1, extra_ids=[0, 5], multimodal=[image]) == 0xA06EC2B26A741D33


def test_v1_gives_the_published_values_of_a_request_in_the_call_that_matches() -> None:
    tokens = np.array([i * 2654435761 % 151936 for i in range(100)], "<i4").tobytes()
    match = RouteIndex(10).hash_and_match(tokens, KeySpace("v1", b"", 32), b"")
    expected = [0x6D79796E645943A5, 0xA1307966E09EA59A, 0x76DADD0711D35738, 0xA6CD5A158FDB55C0]
    assert match.keys.tolist() == expected


def test_v1_equals_the_formulas_on_20000_random_blocks_with_everything_a_block_may_carry() -> None:
    rng = random.Random(3)
    for _ in range(20_000):
        tokens = [
            rng.choice((rng.getrandbits(32), rng.randrange(200_000), -rng.randrange(9)))
            for _ in range(rng.randrange(9))
        ]
        given = {
            "salt_id": rng.choice((None, rng.getrandbits(64))),
            "lora_id": rng.choice((None, rng.getrandbits(64))),
            "extra_ids": rng.choice((None, [rng.getrandbits(64) for _ in tokens])),
            "multimodal": [(rng.randbytes(32), rng.getrandbits(40)) for _ in range(rng.choice((0, 0, 1, 3)))],
        }
        parent = rng.choice((0, rng.getrandbits(64)))
        assert block_key_v1(tokens, parent=parent, **given) == v1_block(tokens, parent, **given)


def test_one_call_gives_the_chains_of_either_space_whatever_the_lengths() -> None:
    rng = np.random.default_rng(5)
    index = RouteIndex(10)
    root = namespace_root(model=b"m", salt="s")
    for _ in range(2000):
        block_size = int(rng.integers(1, 40))
        tokens = rng.integers(0, 2**31, rng.integers(0, 5000 if rng.random() < 0.01 else 200), dtype="<i4").tobytes()
        sha = index.hash_and_match(tokens, KeySpace("sha256", b"m", block_size), root)
        assert sha.keys.tolist() == sha256_chain(tokens, block_size, root)
        assert route_keys(tokens, block_size, root=root).tolist() == sha.keys.tolist()
        v1 = index.hash_and_match(tokens, KeySpace("v1", b"", block_size), root)
        assert v1.keys.tolist() == v1_chain(np.frombuffer(tokens, "<i4").tolist(), block_size)


def test_the_keys_are_the_first_8_bytes_of_the_engines() -> None:
    tokens = np.random.default_rng(1).integers(0, 100_000, 39_000, dtype="<i4").tobytes()
    space = KeySpace("sha256", b"fingerprint", 16)
    root = space.root("salt", "adapter")
    assert root == namespace_root(model=b"fingerprint", salt="salt", adapter="adapter")
    expected = [int.from_bytes(key[:8], "little") for key in block_keys(tokens, 16, root=root)]
    assert RouteIndex(10).hash_and_match(tokens, space, root).keys.tolist() == expected


@pytest.mark.parametrize(
    ("space", "message"),
    [(("md5", b"", 16), "hash: 'md5' is not one of"), (("v1", b"", 0), "block_size: 0 is outside 1")],
)
def test_a_space_that_cannot_be_is_refused_by_name(space: KeySpace, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KeySpace(*space).check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"salt_id": 2**64}, "salt_id: 18446744073709551616 is outside"),
        ({"parent": -1}, "parent: -1 is outside"),
        ({"extra_ids": [1]}, "extra_ids: 1 for 2 tokens"),
        ({"multimodal": [(b"short", 0)]}, "multimodal: a digest is not 32 bytes"),
    ],
)
def test_a_block_that_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_key_v1([1, 2], **given)

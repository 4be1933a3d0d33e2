"""Block keys against slow references written from the formulas, against pinned values, and against wrong input."""

import gc
import hashlib
import random
import struct
from array import array
from typing import Any

import pytest

from penstock._csrc import ffi, lib
from penstock.cache.keys import block_keys, namespace_root
from tests.support.refusals import cases

RNG = random.Random(20)


def slow_block_keys(tokens: list[int], block_size: int, root: bytes) -> list[bytes]:
    keys = []
    for end in range(block_size, len(tokens) + 1, block_size):
        root = hashlib.sha256(root + struct.pack(f"<{block_size}I", *tokens[end - block_size : end])).digest()
        keys.append(root)
    return keys


def random_ids(count: int) -> list[int]:
    return [RNG.choice((RNG.randrange(150_000), RNG.randrange(2**32))) for _ in range(count)]


@pytest.mark.parametrize("block_size", [1, 2, 7, 8, 9, 15, 16, 17, 21, 22, 23, 24, 25, 32, 33, 64, 128, 256])
def test_keys_equal_a_hashlib_loop_at_every_length_around_a_block_boundary(block_size: int) -> None:
    tokens, root = random_ids(4 * block_size + 1), RNG.randbytes(32)
    for num_blocks in range(5):
        for length in (num_blocks * block_size + delta for delta in (-1, 0, 1)):
            if length >= 0:
                prefix = tokens[:length]
                assert block_keys(prefix, block_size, root=root) == slow_block_keys(prefix, block_size, root)


@pytest.mark.parametrize("portable", [0, 1])
def test_the_sha_instructions_and_the_portable_code_give_what_hashlib_gives(portable: int) -> None:
    for block_size in range(1, 100):  # every way a message can end inside a 64-byte chunk
        tokens, root = random_ids(3 * block_size), RNG.randbytes(32)
        out = ffi.new("uint8_t[]", 96)
        lib.penstock_block_keys(root, struct.pack(f"<{len(tokens)}I", *tokens), 3, block_size, portable, out)
        assert bytes(ffi.buffer(out)) == b"".join(slow_block_keys(tokens, block_size, root))


def test_the_sha_instructions_are_used_where_the_cpu_has_them() -> None:
    try:
        with open("/proc/cpuinfo") as file:
            flags = file.read().split()
    except OSError:
        pytest.skip("no /proc/cpuinfo to ask")
    assert lib.penstock_has_sha_instructions() == int("sha_ni" in flags)


def test_every_form_of_tokens_gives_the_same_keys() -> None:
    ids = [RNG.randrange(2**31) for _ in range(100)]
    ints = array("i", ids)
    forms: list[Any] = [ids, tuple(ids), memoryview(ints), ints.tobytes(), memoryview(array("i", [0, *ids]))[1:]]
    for form in forms:
        assert block_keys(form, 16) == slow_block_keys(ids, 16, namespace_root())
    assert block_keys([], 16) == block_keys(b"", 16) == block_keys([1, 2, 3], 2**80) == []
    last = [0, 2**31 - 1, 2**31, 2**32 - 1]
    assert block_keys(last, 4) == slow_block_keys(last, 4, namespace_root())


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**32, 2**63, 2**70])
@pytest.mark.parametrize("position", [0, 5, 38])
def test_an_id_outside_u32_is_refused_with_its_value_and_position(bad: int, position: int) -> None:
    ids = random_ids(39)
    ids[position] = bad
    with pytest.raises(ValueError, match=rf"tokens\[{position}\]: {bad} is outside 0 … 4294967295"):
        block_keys(ids, 16)


def test_no_two_namespaces_share_a_root() -> None:
    models = [b"", b"\0", b"m", b"None", bytes(32)]
    names = [None, "", b"", "a", b"a", "None", b"\0", "1", "True", "aa", "\ud800", "a" * 256]
    roots = [namespace_root(model=m, adapter=a, salt=s) for m in models for a in names for s in names]
    assert len(set(roots)) == len(roots) == len(models) * len(names) ** 2


def test_a_root_is_the_digest_of_version_kinds_lengths_and_contents() -> None:
    sizes = [size.to_bytes(8, "little") for size in (5, 0, 2)]
    fields = b"\1" + sizes[0] + b"model" + b"\0" + sizes[1] + b"\2" + sizes[2] + "é".encode()
    assert namespace_root(model=b"model", salt="é") == hashlib.sha256(b"penstock block keys 1" + fields).digest()


TENANT = namespace_root(model=b"\1" * 32, adapter="sql", salt="tenant-1")
KEYS = {"namespace_root": namespace_root, "block_keys": block_keys, "TENANT": TENANT}


@pytest.mark.parametrize(("computed", "pinned"), cases(__file__, "pinned keys", **KEYS))
def test_keys_are_those_of_every_earlier_release(computed: bytes, pinned: str) -> None:
    """Disks and peers hold keys of older processes. A change here needs a new version in the namespace."""
    assert computed.hex() == pinned


def test_the_garbage_collector_tracks_nothing_per_block() -> None:
    tokens = array("i", range(39_000))
    gc.collect()
    before = len(gc.get_objects())
    keys = block_keys(memoryview(tokens), 16)
    assert len(gc.get_objects()) - before < 10  # the list itself and a few of the test's own
    assert len(keys) == 2437 and not any(gc.is_tracked(key) for key in keys)
    assert all(type(key) is bytes and len(key) == 32 for key in keys)

"""Metadata of GGUF files: what the gguf package wrote is read back, and lies in the bytes are found out."""

import random
import struct
from importlib import import_module
from pathlib import Path

import pytest

from penstock.engine.model_files import ModelRefused
from penstock.engine.text.gguf_tokenizer import read_gguf_metadata
from tests.support.refusals import table

HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_every_type_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    gguf = import_module("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        "a.u8": (writer.add_uint8, 200),
        "a.i8": (writer.add_int8, -100),
        "a.u16": (writer.add_uint16, 60_000),
        "a.i16": (writer.add_int16, -30_000),
        "a.u32": (writer.add_uint32, 4_000_000_000),
        "a.i32": (writer.add_int32, -2_000_000_000),
        "a.u64": (writer.add_uint64, 2**63),
        "a.i64": (writer.add_int64, -(2**62)),
        "a.f32": (writer.add_float32, 0.5),
        "a.f64": (writer.add_float64, 0.1),
        "a.bool": (writer.add_bool, True),
        "a.text": (writer.add_string, "é日本"),
        "a.texts": (writer.add_array, ["", "x", "日本"]),
        "a.ints": (writer.add_array, [1, -2, 3]),
        "a.floats": (writer.add_array, [0.5, -1.5]),
    }
    for key, (add, value) in values.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = read_gguf_metadata(tmp_path / "m.gguf")
    assert read == {"general.architecture": "llama", **{key: value for key, (_, value) in values.items()}}


@pytest.mark.parametrize(
    ("content", "sentence"), table(__file__, "gguf files", HEADER=HEADER, struct=struct, text=text)
)
def test_a_file_that_lies_is_refused_before_its_numbers_are_used(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelRefused, match=sentence):
        read_gguf_metadata(tmp_path / "m.gguf")


def test_a_thousand_random_changes_are_read_or_refused_and_nothing_else(tmp_path: Path) -> None:
    keys = [text(f"key.{n}") + struct.pack("<II", 4, n) for n in range(5)]
    keys.append(text("tokens") + struct.pack("<IIQ", 9, 8, 3) + text("a") + text("bc") + text("d"))
    sound = struct.pack("<4sIQQ", b"GGUF", 3, 0, len(keys)) + b"".join(keys)
    rng = random.Random(0)
    path = tmp_path / "m.gguf"
    refused = 0
    for _ in range(1000):
        content = bytearray(sound)
        for _ in range(rng.randint(1, 4)):
            content[rng.randrange(len(content))] = rng.choice((0, 1, 255, rng.randrange(256)))
        path.write_bytes(content[: rng.choice((len(content), rng.randrange(len(content))))])
        try:
            read_gguf_metadata(path)
        except ModelRefused:
            refused += 1
    assert 500 < refused < 1000

"""Metadata of GGUF files: what the gguf package wrote is read back, and lies in the bytes are found out."""

import random
import struct
from importlib import import_module
from pathlib import Path

import pytest

from penstock.engine.model_files import ModelError
from penstock.engine.text.gguf_tokenizer import read_gguf_metadata
from tests.support.refusals import cases, table

HEADER = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def test_every_type_of_value_is_read_as_it_was_written(tmp_path: Path) -> None:
    gguf = import_module("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = cases(__file__, "values of GGUF")
    for key, kind, value in values:
        getattr(writer, f"add_{kind}")(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    read = read_gguf_metadata(tmp_path / "m.gguf")
    assert read == {"general.architecture": "llama", **{key: value for key, _, value in values}}


@pytest.mark.parametrize(
    ("content", "sentence"), table(__file__, "gguf files", HEADER=HEADER, struct=struct, text=text)
)
def test_a_file_that_lies_is_refused_before_its_numbers_are_used(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=sentence):
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
        except ModelError:
            refused += 1
    assert 500 < refused < 1000

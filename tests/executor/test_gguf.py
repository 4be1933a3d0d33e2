"""GGUF files that the gguf package writes are read as its dequantizers read them, and hostile ones are refused."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorError
from tests.support import gguf_files
from tests.support.coded import FILE_TYPES
from tests.support.gguf_files import CASES, HEAD_DIM, HEADS, metadata, permuted, shapes, small_file, write
from tests.support.refusals import cases, table
from tests.support.small_models import random_model

TYPES = ["F32", "F16", "BF16", *FILE_TYPES]
CONFIGS = ["llama", "llama-biases", "qwen2", "qwen3-untied", "gemma3"]


def dequantized(stored: torch.Tensor | Weight) -> torch.Tensor:
    return stored if isinstance(stored, torch.Tensor) else stored.dequantize(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kind", TYPES)
def test_every_storage_type_gives_the_values_of_the_reference_dequantizer(kind: str, tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf", kind=kind)
    checkpoint = GgufCheckpoint(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, source in cases(__file__, "tensors of gguf files"):
        tensor = stored[source]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shapes()[source])
        got = checkpoint.read(name)
        assert isinstance(got, torch.Tensor) == (kind in ("F32", "F16", "BF16"))
        values = dequantized(got).float().numpy()
        if "q_proj" in name:
            values = permuted(torch.from_numpy(values), HEADS).flatten(0, 2).numpy()
        np.testing.assert_array_equal(values, expected)
        if isinstance(got, torch.Tensor):
            assert got.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
        assert tuple(got.shape) == checkpoint.shape(name)
    dtype = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert checkpoint.config["torch_dtype"] == dtype


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    fields = CASES["llama"].fields | {"rope_parameters": gguf_files.LLAMA3_SCALING, "max_position_embeddings": 65536}
    model = random_model("LlamaConfig", fields)
    plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = (plain / model.model.rotary_emb.inv_freq).float().round(decimals=5)

    path = tmp_path / "model.gguf"
    keys = metadata(context_length=65536) | {"llama.rope.freq_base": 500000.0}
    tensors = {name: (np.zeros(shape, np.float32), "F32") for name, shape in shapes().items()}
    write(path, "llama", keys, tensors | {"rope_freqs.weight": (divisors.numpy(), "F32")})
    config = GgufCheckpoint(path).config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {
        key: value for key, value in gguf_files.LLAMA3_SCALING.items() if key != "rope_theta"
    }

    other = divisors.numpy() * np.linspace(1, 2, HEAD_DIM // 2, dtype=np.float32)
    write(path, "llama", keys, tensors | {"rope_freqs.weight": (other, "F32")})
    with pytest.raises(ExecutorError, match=r"rope_freqs\.weight.*factor 16"):
        GgufCheckpoint(path)


def test_every_id_that_ends_a_turn_is_an_end_token(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf", metadata() | {"tokenizer.ggml.eot_token_id": 7})
    assert GgufCheckpoint(path).config["eos_token_id"] == [2, 7]


def test_layers_that_only_draft_are_passed_over(tmp_path: Path) -> None:
    tensors = {name: (np.zeros(shape, np.float32), "F32") for name, shape in shapes().items()}
    tensors["blk.2.nextn.eh_proj.weight"] = np.zeros((256, 512), np.float32), "F32"
    keys = metadata(block_count=3) | {"llama.nextn_predict_layers": 1}
    checkpoint = GgufCheckpoint(write(tmp_path / "model.gguf", "llama", keys, tensors))
    assert checkpoint.config["num_hidden_layers"] == 2
    assert len(checkpoint.names()) == len(shapes())


def test_an_absent_file_an_unknown_architecture_and_a_split_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ExecutorError, match="cannot be read"):
        GgufCheckpoint(path)
    write(path, "mamba", {}, {})
    with pytest.raises(ExecutorError, match="general.architecture: 'mamba' found; one of llama, qwen2, qwen3"):
        GgufCheckpoint(path)
    small_file(path, metadata() | {"split.count": 2})
    with pytest.raises(ExecutorError, match="split.count: 2 found"):
        GgufCheckpoint(path)


HUGE = 1 << 62


def header(num_tensors: int, num_keys: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def one_tensor(dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    info = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header(1, 0, text(b"w") + info + bytes(256))


@pytest.mark.parametrize(("content", "message"), table(__file__, "gguf headers", **globals()))
def test_a_lying_header_is_refused_before_memory_is_taken(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExecutorError) as caught:
        GgufCheckpoint(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def read_all(path: Path) -> bool:
    """Return whether a file loads; every tensor then has its shape. Only ExecutorError may be raised."""
    try:
        checkpoint = GgufCheckpoint(path)
    except ExecutorError:
        return False
    for name in checkpoint.names():
        assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name)
    return True


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "model.gguf"
    for length in [*range(1, 3000, 7), *range(3000, len(whole) - 32, 9973)]:
        path.write_bytes(whole[:length])
        assert not read_all(path)
    path.write_bytes(whole)
    assert read_all(path)


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
def test_mutations_are_read_or_refused_but_never_crash(tmp_path: Path, count: int) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    header_size = whole.index(b"blk.1.ffn_down.weight") + 100
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(7)
    outcomes = set()
    for _ in range(count):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(header_size))
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, content[at] ^ 1 << int(rng.integers(8))])
        path.write_bytes(content)
        outcomes.add(read_all(path))
    assert outcomes == {True, False}

"""GGUF files are written with the gguf package (its writer, name map and dequantizers are the oracle), read with ours."""

import math
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.protocol import ExecutorError
from tests.support.coded import FILE_TYPES, packed

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 96
TYPES = ["F32", "F16", "BF16", *FILE_TYPES]


def metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Keys of a small model; `changes` go by the key's last part, None removes it."""
    keys = {
        "context_length": 128,
        "embedding_length": HIDDEN,
        "block_count": LAYERS,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    if architecture == "gemma3":
        keys["attention.sliding_window"] = 32
    full = {f"{architecture}.{key}": value for key, value in (keys | changes).items()}
    full |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    full["tokenizer.ggml.tokens"] = [f"<{i}>" for i in range(VOCAB)]
    return full


def shapes() -> dict[str, tuple[int, ...]]:
    """GGUF names and shapes of a Llama of the sizes above, untied."""
    result: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "output.weight": (VOCAB, HIDDEN),
    }
    for i in range(LAYERS):
        result |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_gate.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": (INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, INNER),
        }
    return result


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """A GGUF file. Tensors are (values or packed rows, type name)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers(stored: torch.Tensor | Weight) -> torch.Tensor:
    return stored if isinstance(stored, torch.Tensor) else stored.dequantize(torch.device("cpu"), torch.float32)


def permute(values: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k: (i, i + dim/2) become neighbours."""
    halves = values.reshape(num_heads, 2, -1, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def small_file(path: Path, keys: dict[str, Any] | None = None, skip: str = "", kind: str = "Q4_1") -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        name: (packed(rng, shape, kind if len(shape) == 2 else "F32"), kind if len(shape) == 2 else "F32")
        for name, shape in shapes().items()
        if name != skip
    }
    return write(path, "llama", metadata() if keys is None else keys, tensors)


@pytest.mark.parametrize("kind", TYPES)
def test_every_storage_type_gives_the_values_of_the_reference_dequantizer(kind: str, tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf", kind=kind)
    checkpoint = GgufCheckpoint(path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, source in [
        ("lm_head.weight", "output.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.0.self_attn.q_proj.weight", "blk.0.attn_q.weight"),
    ]:
        tensor = stored[source]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shapes()[source])
        got = checkpoint.read(name)
        assert isinstance(got, torch.Tensor) == (kind in ("F32", "F16", "BF16"))
        values = numbers(got).float().numpy()
        if "q_proj" in name:
            values = permute(values, HEADS)
        np.testing.assert_array_equal(values, expected)
        if isinstance(got, torch.Tensor):
            assert got.dtype == {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
        assert tuple(got.shape) == checkpoint.shape(name)
    dtype = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert checkpoint.config["torch_dtype"] == dtype


CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama with biases": ("llama", {"attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen3 untied": ("qwen3", {"tie_word_embeddings": False}),
    "gemma3": ("gemma3", {"sliding_window": 4, "query_pre_attn_scalar": HEAD_DIM, "rms_norm_eps": 1e-5}),
}


def random_model(architecture: str, extra: dict[str, Any]) -> Any:
    """A transformers model with random weights (norms too) of the sizes above."""
    import transformers

    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3": "Gemma3"}[architecture]
    config_class = getattr(transformers, f"{prefix}TextConfig" if architecture == "gemma3" else f"{prefix}Config")
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 7 if architecture == "gemma3" else LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**(sizes | extra)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    return model.eval()


def gguf_of(model: Any, architecture: str, path: Path, **changes: Any) -> Path:
    """What llama.cpp's converter makes of a model, in float32; names come from the gguf package's own map."""
    config = model.config
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    name_map = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tensors = {}
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.detach().numpy()
        if architecture == "llama" and re.search(r"[qk]_proj", name):
            values = permute(values, HEADS if "q_proj" in name else KV_HEADS)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            values = values + 1
        tensors[name_map.get_name(name, try_suffixes=(".weight", ".bias"))] = (values, "F32")
    keys = metadata(architecture, block_count=config.num_hidden_layers)
    if architecture == "gemma3":
        keys |= {"gemma3.attention.sliding_window": 4, "gemma3.rope.freq_base": 1e6}
    keys |= {f"{architecture}.{key}": value for key, value in changes.items()}
    return write(path, architecture, keys, tensors)


def loaded(checkpoint: GgufCheckpoint, like: Any) -> Any:
    """A transformers model made of nothing but the checkpoint's config and tensors."""
    model = type(like)(type(like.config)(**checkpoint.config))
    tensors = {name: numbers(checkpoint.read(name)) for name in checkpoint.names()}
    missing = model.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys
    assert missing.missing_keys == (["lm_head.weight"] if checkpoint.config["tie_word_embeddings"] else [])
    return model.eval()


@pytest.mark.parametrize("case", CONFIGS)
def test_a_converted_model_comes_back_with_its_tensors_and_its_logits(case: str, tmp_path: Path) -> None:
    architecture, extra = CONFIGS[case]
    model = random_model(architecture, extra)
    checkpoint = GgufCheckpoint(gguf_of(model, architecture, tmp_path / "model.gguf"))
    state = model.state_dict()
    for name in checkpoint.names():
        torch.testing.assert_close(checkpoint.read(name), state[name], rtol=0, atol=1e-6 if "gemma" in case else 0)
    tokens = torch.arange(3, 43)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(checkpoint, model)(tokens).logits, model(tokens).logits, rtol=0, atol=2e-5)
    assert checkpoint.config["architectures"] == [type(model).__name__]
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (1, 2)


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = random_model("llama", {"rope_parameters": scaling, "max_position_embeddings": 65536})
    plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = (plain / model.model.rotary_emb.inv_freq).float().round(decimals=5)

    path = tmp_path / "model.gguf"
    keys = metadata(context_length=65536) | {"llama.rope.freq_base": 500000.0}
    tensors = {name: (np.zeros(shape, np.float32), "F32") for name, shape in shapes().items()}
    write(path, "llama", keys, tensors | {"rope_freqs.weight": (divisors.numpy(), "F32")})
    config = GgufCheckpoint(path).config
    assert config["rope_theta"] == 500000.0
    assert config["rope_scaling"] == {key: value for key, value in scaling.items() if key != "rope_theta"}

    other = divisors.numpy() * np.linspace(1, 2, HEAD_DIM // 2, dtype=np.float32)
    write(path, "llama", keys, tensors | {"rope_freqs.weight": (other, "F32")})
    with pytest.raises(ExecutorError, match=r"rope_freqs\.weight.*factor 16"):
        GgufCheckpoint(path)


def test_every_id_that_ends_a_turn_is_an_end_token(tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf", metadata() | {"tokenizer.ggml.eot_token_id": 7})
    assert GgufCheckpoint(path).config["eos_token_id"] == [2, 7]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": 3}, r"'blk\.2\.attn_norm\.weight' is missing"),
        ({"block_count": 1}, r"'blk\.1\..*' is not part of a model"),
        ({"block_count": 1 << 31}, r"llama\.block_count: 2147483648 found; an integer from 1 to 4096"),
        ({"context_length": 0}, r"llama\.context_length: 0 found; an integer from 1 to 16777216"),
        ({"context_length": None}, r"llama\.context_length: nothing found"),
        ({"embedding_length": "big"}, r"llama\.embedding_length: 'big'"),
        ({"feed_forward_length": 511}, r"ffn_gate\.weight' has shape \(512, 256\); the metadata says \(511, 256\)"),
        ({"attention.head_count": 3}, r"attn_q\.weight' has shape \(256, 256\); the metadata says \(192, 256\)"),
        ({"attention.layer_norm_rms_epsilon": math.nan}, r"rms_epsilon: nan found; a positive number"),
        ({"rope.dimension_count": 32}, r"rope\.dimension_count: 32 found; 64 is expected"),
        ({"rope.scaling.type": "longrope"}, r"rope\.scaling\.type: 'longrope' found; .*'linear' or 'yarn' is expected"),
        ({"expert_count": 8}, r"llama\.expert_used_count: nothing found"),
        ({"attention.sliding_window": 64}, r"sliding_window: 64 found; at least the context 128"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv: \[2, 1\]"),
    ],
)
def test_metadata_that_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = small_file(tmp_path / "model.gguf", metadata(**changes))
    with pytest.raises(ExecutorError, match=message):
        GgufCheckpoint(path)


def test_an_unknown_architecture_and_a_split_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, "mamba", {}, {})
    with pytest.raises(ExecutorError, match="general.architecture: 'mamba' found; one of llama, qwen2, qwen3"):
        GgufCheckpoint(path)
    small_file(path, metadata() | {"split.count": 2})
    with pytest.raises(ExecutorError, match="split.count: 2 found"):
        GgufCheckpoint(path)


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(ExecutorError, match="cannot be read"):
        GgufCheckpoint(path)
    for content, message in [
        (b"", "cannot be read"),
        (b"PK\x03\x04" + bytes(60), "a GGUF file starts with b'GGUF'"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 0x1; 2 and 3"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 0x3000000; 2 and 3, little-endian"),
        (b"GGUF\x03\0", "needs 4 bytes at 4"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ExecutorError, match=message):
            GgufCheckpoint(path)


HUGE = 1 << 62


def header(num_tensors: int, num_keys: int, body: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_keys) + body


def text(value: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(value) if length is None else length) + value


def one_tensor(dims: tuple[int, ...], kind: int, offset: int = 0) -> bytes:
    info = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return header(1, 0, text(b"w") + info + bytes(256))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(HUGE, 0, bytes(64)), f"tensor count {HUGE}; at most 2 are possible"),
        (header(0, HUGE, bytes(64)), f"key count {HUGE}; at most 4 are possible"),
        (header(0, 1, text(b"k", HUGE) + bytes(64)), f"a string of {HUGE} bytes; at most 65535"),
        (header(0, 1, text(b"k", 2**64 - 8) + bytes(64)), "a string of 18446744073709551608 bytes"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, HUGE) + bytes(64)), f"'k': array length {HUGE}"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 10, 1 << 61) + bytes(64)), "'k': array length"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(64)), "'k': array of value type 9"),
        (header(0, 1, text(b"k") + struct.pack("<I", 13) + bytes(64)), "'k': value type 13 is unknown"),
        (header(0, 1, text(b"k\xff") + bytes(64)), "a string is not UTF-8"),
        (header(0, 2, (text(b"k") + struct.pack("<IB", 0, 1)) * 2), "'k' appears twice"),
        (header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 0)), "0; a power of two from 8"),
        (header(0, 1, text(b"general.alignment") + struct.pack("<II", 4, 48)), "48; a power of two from 8"),
        (one_tensor((32,) * 5, 0), "'w': 5 dimensions; 1 to 4"),
        (one_tensor((), 0), "'w': 0 dimensions"),
        (one_tensor((32, 0), 0), r"'w': shape \(0, 32\)"),
        (one_tensor((33,), 8), r"'w': shape \(33,\) of type Q8_0; rows must be a positive multiple of 32"),
        (one_tensor((32,), 16), "'w': type 16 cannot be read"),
        (one_tensor((1 << 32, 1 << 32), 0), "'w': bytes 96 to 73786976294838206560; the file has"),
        (one_tensor((32,), 0, offset=1 << 63), "'w': bytes 9223372036854775872"),
        (one_tensor((32,), 0, offset=2**64 - 32), "'w': bytes 18446744073709551648"),
        (one_tensor((32,), 0, offset=12), "'w': offset 12 is not a multiple of the alignment 32"),
    ],
)
def test_a_lying_header_is_refused_before_memory_is_taken(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ExecutorError, match=re.escape(str(path)) + ".*" + message):
        GgufCheckpoint(path)


def read_all(path: Path) -> bool:
    """Whether a file loads; every tensor then has its shape. Only ExecutorError may be raised."""
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


def test_a_thousand_mutations_are_read_or_refused_but_never_crash(tmp_path: Path) -> None:
    whole = small_file(tmp_path / "whole.gguf").read_bytes()
    header_size = whole.index(b"blk.1.ffn_down.weight") + 100
    path = tmp_path / "model.gguf"
    rng = np.random.default_rng(7)
    outcomes = set()
    for _ in range(1000):
        content = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            at = int(rng.integers(header_size))
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, content[at] ^ 1 << int(rng.integers(8))])
        path.write_bytes(content)
        outcomes.add(read_all(path))
    assert outcomes == {True, False}

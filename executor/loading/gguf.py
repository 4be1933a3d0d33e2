"""A GGUF file seen as a Hugging Face checkpoint: its config, its tensors' names, and their values.

llama.cpp's converter renames every tensor, reorders the rows of Llama's q and k for its own RoPE, and adds
one to Gemma's norms. All of it is undone here, so that what loads a model knows one layout.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.kernels.codes import Coded
from penstock.executor.loading.gguf_config import config_of
from penstock.executor.loading.gguf_families import BY_TYPE, FACTORS, layer_names
from penstock.executor.loading.gguf_file import GgufFile, open_gguf
from penstock.executor.protocol import ExecutorError


class _Source(NamedTuple):
    """Where an HF tensor comes from and what the converter did to it."""

    name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0  # the rows of each of so many heads are interleaved
    plus_one: bool = False


class GgufCheckpoint:
    """The Checkpoint protocol over one GGUF file. Quantized matrices are read as codes.

    Raises ExecutorError when a tensor is missing, unknown, or of another shape than the metadata says.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_gguf(path)
        self.config: dict[str, Any] = config_of(self._file)
        self.has_codes = any(entry.type.codes for entry in self._file.tensors.values())
        self._sources = _sources(self.config)
        _check(self._file, self._sources)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def read(self, name: str) -> Tensor | Coded:
        source = self._sources[name]
        entry = self._file.tensors[source.name]
        raw = torch.frombuffer(self._file.data, dtype=torch.uint8, count=entry.size_bytes, offset=entry.offset)
        if source.permuted_heads:
            # Stored: pairs (i, i + dim/2) side by side.
            rows = raw.view(source.permuted_heads, -1, 2, raw.numel() // source.shape[0])
            raw = rows.transpose(1, 2).reshape(-1)
        codes, is_matrix = entry.type.codes, len(source.shape) > 1
        if codes is None:
            values = raw.view(_FLOATS[entry.type.name]).view(source.shape)
        else:
            coded = Coded(source.name, codes, raw.view(source.shape[0] if is_matrix else 1, -1))
            if is_matrix and not source.plus_one:
                return coded
            values = coded.numbers(torch.device("cpu"), torch.float32).view(source.shape)
        return values - 1 if source.plus_one else values


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _sources(config: dict[str, Any]) -> dict[str, _Source]:
    """HF name → source, for every tensor that a model of this config has."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    plus_one = config["model_type"] == "gemma3_text"
    sources = {
        "model.embed_tokens.weight": _Source("token_embd.weight", (vocab, hidden)),
        "model.norm.weight": _Source("output_norm.weight", (hidden,), plus_one=plus_one),
    }
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = _Source("output.weight", (vocab, hidden))
    layer = _layer(config)
    if config["model_type"] in BY_TYPE:
        own = {name: _Source(*stored) if stored else None for name, stored in layer_names(config).items()}
        layer = {name: source for name, source in {**layer, **own}.items() if source is not None}
    for index in range(config["num_hidden_layers"]):
        for name, source in layer.items():
            sources[f"model.layers.{index}.{name}"] = source._replace(name=f"blk.{index}.{source.name}")
    return sources


def _layer(config: dict[str, Any]) -> dict[str, _Source]:
    """The tensors of one decoder layer, without the prefixes."""
    kind, hidden, inner, dim = (config[k] for k in ("model_type", "hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    permuted, gemma = kind == "llama" or (kind in BY_TYPE and BY_TYPE[kind].is_permuted), kind == "gemma3_text"
    q_rows, kv_rows = heads * dim, kv_heads * dim
    layer = {
        "input_layernorm.weight": _Source("attn_norm.weight", (hidden,), plus_one=gemma),
        "self_attn.q_proj.weight": _Source("attn_q.weight", (q_rows, hidden), heads * permuted),
        "self_attn.k_proj.weight": _Source("attn_k.weight", (kv_rows, hidden), kv_heads * permuted),
        "self_attn.v_proj.weight": _Source("attn_v.weight", (kv_rows, hidden)),
        "self_attn.o_proj.weight": _Source("attn_output.weight", (hidden, q_rows)),
        "mlp.gate_proj.weight": _Source("ffn_gate.weight", (inner, hidden)),
        "mlp.up_proj.weight": _Source("ffn_up.weight", (inner, hidden)),
        "mlp.down_proj.weight": _Source("ffn_down.weight", (hidden, inner)),
    }
    if config["attention_bias"]:
        layer["self_attn.q_proj.bias"] = _Source("attn_q.bias", (q_rows,), heads * permuted)
        layer["self_attn.k_proj.bias"] = _Source("attn_k.bias", (kv_rows,), kv_heads * permuted)
        layer["self_attn.v_proj.bias"] = _Source("attn_v.bias", (kv_rows,))
        if kind != "qwen2":
            layer["self_attn.o_proj.bias"] = _Source("attn_output.bias", (hidden,))
    if kind in ("qwen3", "gemma3_text"):
        layer["self_attn.q_norm.weight"] = _Source("attn_q_norm.weight", (dim,), plus_one=gemma)
        layer["self_attn.k_norm.weight"] = _Source("attn_k_norm.weight", (dim,), plus_one=gemma)
    if gemma:
        layer["post_attention_layernorm.weight"] = _Source("post_attention_norm.weight", (hidden,), plus_one=True)
        layer["pre_feedforward_layernorm.weight"] = _Source("ffn_norm.weight", (hidden,), plus_one=True)
        layer["post_feedforward_layernorm.weight"] = _Source("post_ffw_norm.weight", (hidden,), plus_one=True)
    else:
        layer["post_attention_layernorm.weight"] = _Source("ffn_norm.weight", (hidden,))
    return layer


def _check(file: GgufFile, sources: dict[str, _Source]) -> None:
    """The file has exactly the tensors that its metadata calls for."""
    for source in sources.values():
        entry = file.tensors.get(source.name)
        if entry is None:
            raise ExecutorError(f"{file.path}: tensor {source.name!r} is missing")
        if entry.shape != source.shape:
            raise ExecutorError(
                f"{file.path}: tensor {source.name!r} has shape {entry.shape}; the metadata says {source.shape}"
            )
        if source.permuted_heads and source.shape[0] // source.permuted_heads % 2:
            raise ExecutorError(f"{file.path}: tensor {source.name!r} has heads of odd size; RoPE needs even ones")
    known = {source.name for source in sources.values()} | {"rope_freqs.weight", *FACTORS}
    for name in file.tensors:
        if name not in known:
            raise ExecutorError(f"{file.path}: tensor {name[:80]!r} is not part of a model of this architecture")

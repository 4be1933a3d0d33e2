"""Presents a GGUF file as a Hugging Face checkpoint: its config, tensor names and tensor values.

llama.cpp's converter renames every tensor, permutes the rows of Llama's q and k for its own RoPE, and adds one to
Gemma's norms. This module reverts all of it, so that the model loader has to support only one layout.
"""

import math
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.gguf_header import GgufFile, open_gguf
from penstock.executor.kernels.weight import CPU, Ggml, Weight
from penstock.executor.loading.gguf_config import BY_TYPE, FACTORS, config_of, layer_names
from penstock.executor.moe_spec import PROJECTIONS
from penstock.executor.protocol import ExecutorError


class _Source(NamedTuple):
    """The tensor of the file that contains an HF tensor, and how the converter changed it."""

    name: str
    shape: tuple[int, ...]
    permuted_heads: int = 0  # number of heads whose rows are interleaved; 0: the rows are not permuted
    plus_one: bool = False
    expert: tuple[int, int] | None = None  # (index, count): the file's tensor stacks `count` tensors of this shape
    parts: "tuple[_Source, ...]" = ()  # the tensors of transposed keys and of values per head; then `name` is unused

    @property
    def stored_shape(self) -> tuple[int, ...]:
        shape = self.shape if self.expert is None else (self.expert[1], *self.shape)
        return tuple(size for size in shape if size > 1)


class GgufCheckpoint:
    """Implements `Checkpoint` for a GGUF file. Quantized matrices are read without dequantizing them.

    Raises ExecutorError if a tensor is missing or unknown, or has another shape than the metadata requires.
    """

    def __init__(self, path: str | Path, file: GgufFile | None = None) -> None:
        self._file = file or open_gguf(path)
        self.config: dict[str, Any] = config_of(self._file)
        self.has_codes = any(entry.type.is_quantized for entry in self._file.tensors.values())
        self._sources = _sources(self.config, self._file.tensors)
        _check(self._file, self._sources)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._sources[name].shape

    def read(self, name: str) -> Tensor | Weight:
        return self._read(self._sources[name])

    def _read(self, source: _Source) -> Tensor | Weight:
        if source.parts:
            keys, values = (self._numbers(part) for part in source.parts)
            return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        entry = self._file.tensors[source.name]
        index, of = source.expert or (0, 1)
        size = entry.size_bytes // of
        offset = entry.offset + index * size
        raw = torch.frombuffer(self._file.data, dtype=torch.uint8, count=size, offset=offset)
        if source.permuted_heads:
            # The file stores the rows i and i + dim/2 of a head next to each other.
            rows = raw.view(source.permuted_heads, -1, 2, raw.numel() // source.shape[0])
            raw = rows.transpose(1, 2).reshape(-1)
        if not entry.type.is_quantized:
            values = raw.view(_FLOATS[entry.type.name]).view(source.shape)
        else:
            is_whole = not source.permuted_heads and source.expert is None
            packed = self._file.packed.get(source.name) if is_whole else None
            rows = raw.view(math.prod(source.shape[:-1]), -1)
            weight = Weight(Ggml(entry.type), rows, name=source.name, panels=packed)
            if len(source.shape) > 1 and not source.plus_one:
                return weight
            values = weight.dequantize(CPU, torch.float32).view(source.shape)
        return values - 1 if source.plus_one else values

    def _numbers(self, source: _Source) -> Tensor:
        read = self._read(source)
        values = read.dequantize(CPU, torch.float32) if isinstance(read, Weight) else read.float()
        return values.view(source.shape)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _sources(config: dict[str, Any], tensors: Container[str]) -> dict[str, _Source]:
    """Return HF name → source for every tensor of a model with this config."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    plus_one = BY_TYPE[config["model_type"]].plus_one
    sources = {
        "model.embed_tokens.weight": _Source("token_embd.weight", (vocab, hidden)),
        "model.norm.weight": _Source("output_norm.weight", (hidden,), plus_one=plus_one),
    }
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = _Source("output.weight", (vocab, hidden))
    attention = _latent_attention(config, tensors) if "kv_lora_rank" in config else _attention(config)
    num_experts = next((config[key] for key in _EXPERT_COUNTS if key in config), 0)
    norms = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    shared = {f"{name}.weight": _Source(f"{stored}.weight", (hidden,)) for name, stored in norms.items()} | attention
    own = {name: _Source(*stored) if stored else None for name, stored in layer_names(config).items()}
    mlps = _mlp("mlp.", config["intermediate_size"], hidden), _experts(config, num_experts) if num_experts else {}
    dense, sparse = ({**shared, **mlp, **own} for mlp in mlps)
    first_sparse = config.get("first_k_dense_replace", 0) if num_experts else config["num_hidden_layers"]
    for index in range(config["num_hidden_layers"]):
        at = f"blk.{index}."
        for name, source in (dense if index < first_sparse else sparse).items():
            if source is None:
                continue
            parts = tuple(part._replace(name=at + part.name) for part in source.parts)
            has_one = plus_one and name.endswith("norm.weight")
            placed = source._replace(name=at + source.name, parts=parts, plus_one=has_one)
            sources[f"model.layers.{index}.{name}"] = placed
    return sources


def _attention(config: dict[str, Any]) -> dict[str, _Source]:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    permuted = BY_TYPE[config["model_type"]].is_permuted
    q_rows, kv_rows = heads * dim, kv_heads * dim
    found = {
        "self_attn.q_proj.weight": _Source("attn_q.weight", (q_rows, hidden), heads * permuted),
        "self_attn.k_proj.weight": _Source("attn_k.weight", (kv_rows, hidden), kv_heads * permuted),
        "self_attn.v_proj.weight": _Source("attn_v.weight", (kv_rows, hidden)),
        "self_attn.o_proj.weight": _Source("attn_output.weight", (hidden, q_rows)),
    }
    return found | _biases(found) if config["attention_bias"] else found


def _latent_attention(config: dict[str, Any], tensors: Container[str]) -> dict[str, _Source]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rank, q_rank, nope, rope, value = (
        config[k] for k in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    expand = _Source("attn_kv_b.weight", (heads * (nope + value), rank))
    if "blk.0.attn_kv_b.weight" not in tensors:
        keys, values = (heads, rank, nope), (heads, value, rank)
        expand = expand._replace(parts=(_Source("attn_k_b.weight", keys), _Source("attn_v_b.weight", values)))
    found = {
        "self_attn.kv_a_proj_with_mqa.weight": _Source("attn_kv_a_mqa.weight", (rank + rope, hidden)),
        "self_attn.kv_a_layernorm.weight": _Source("attn_kv_a_norm.weight", (rank,)),
        "self_attn.kv_b_proj.weight": expand,
        "self_attn.o_proj.weight": _Source("attn_output.weight", (hidden, heads * value)),
    }
    q_rows = heads * (nope + rope)
    if q_rank is None:
        return found | {"self_attn.q_proj.weight": _Source("attn_q.weight", (q_rows, hidden))}
    return found | {
        "self_attn.q_a_proj.weight": _Source("attn_q_a.weight", (q_rank, hidden)),
        "self_attn.q_a_layernorm.weight": _Source("attn_q_a_norm.weight", (q_rank,)),
        "self_attn.q_b_proj.weight": _Source("attn_q_b.weight", (q_rows, q_rank)),
    }


def _mlp(
    prefix: str,
    inner: int,
    hidden: int,
    stored: str = "",
    expert: tuple[int, int] | None = None,
    projections: Sequence[str] = PROJECTIONS,
) -> dict[str, _Source]:
    """Return the sources of an MLP; `stored` is the suffix of the names in the file."""
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    return {
        f"{prefix}{name}.weight": _Source(f"ffn_{part}{stored}.weight", shape, expert=expert)
        for name, (part, shape) in zip(projections, shapes.items(), strict=True)
    }


def _biases(weights: dict[str, _Source]) -> dict[str, _Source]:
    """Return the sources of the biases of these weights: one number per row."""

    def bias_of(weight: str) -> str:
        return weight.removesuffix("weight") + "bias"

    sources = weights.items()
    return {bias_of(name): each._replace(name=bias_of(each.name), shape=each.shape[:1]) for name, each in sources}


def _experts(config: dict[str, Any], num: int) -> dict[str, _Source]:
    kind, hidden = config["model_type"], config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    block, projections = ("block_sparse_moe.", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp.", PROJECTIONS)
    router = f"{block}router" if kind == "gpt_oss" else f"{block}gate"
    found = {f"{router}.weight": _Source("ffn_gate_inp.weight", (num, hidden))}
    for index in range(num):
        found |= _mlp(f"{block}experts.{index}.", inner, hidden, "_exps", (index, num), projections)
    if kind == "gpt_oss":
        found |= _biases(found)
    if kind == "deepseek_v3":
        found[f"{block}gate.e_score_correction_bias"] = _Source("exp_probs_b.bias", (num,))
    if kind == "qwen2_moe":
        found[f"{block}shared_expert_gate.weight"] = _Source("ffn_gate_inp_shexp.weight", (1, hidden))
        found |= _mlp(f"{block}shared_expert.", config["shared_expert_intermediate_size"], hidden, "_shexp")
    elif shared := config.get("n_shared_experts"):
        found |= _mlp(f"{block}shared_experts.", shared * inner, hidden, "_shexp")
    return found


def _check(file: GgufFile, sources: dict[str, _Source]) -> None:
    """Raise ExecutorError unless the file has exactly the tensors that its metadata requires."""
    stored = [part for source in sources.values() for part in source.parts or (source,)]
    for source in stored:
        entry = file.tensors.get(source.name)
        if entry is None:
            raise ExecutorError(f"{file.path}: tensor {source.name!r} is missing")
        if tuple(size for size in entry.shape if size > 1) != source.stored_shape:
            raise ExecutorError(
                f"{file.path}: tensor {source.name!r} has shape {entry.shape}; the metadata says {source.stored_shape}"
            )
        if source.permuted_heads and source.shape[0] // source.permuted_heads % 2:
            raise ExecutorError(f"{file.path}: tensor {source.name!r} has heads of odd size; RoPE needs even ones")
    known = {source.name for source in stored} | {"rope_freqs.weight", *FACTORS}
    for name in file.tensors:
        if name not in known:
            raise ExecutorError(f"{file.path}: tensor {name[:80]!r} is not part of a model of this architecture")

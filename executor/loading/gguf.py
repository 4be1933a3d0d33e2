"""Presents a GGUF file as a Hugging Face checkpoint: its config, tensor names and tensor values.

llama.cpp's converter renames every tensor, permutes the rows of Llama's q and k for its own RoPE, and adds one to
Gemma's norms. This module reverts all of it, so that the model loader has to support only one layout.
"""

import math
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.executor.gguf_header import GgufFile, open_gguf
from penstock.executor.kernels.stored_formats import Ggml
from penstock.executor.kernels.weight import CPU, Weight
from penstock.executor.loading.gguf_config import BY_TYPE, FACTORS, config_of
from penstock.executor.moe_spec import PROJECTIONS
from penstock.executor.protocol import ExecutorError


class _Source(NamedTuple):
    """The tensor of the file that contains an HF tensor, and how the converter changed it."""

    name: str
    permuted_heads: int = 0  # number of heads whose rows are interleaved; 0: the rows are not permuted
    plus_one: bool = False
    expert: tuple[int, int] | None = None  # (index, count): the file's tensor stacks `count` tensors
    is_row: bool = False  # a matrix of one row, which the file has as a vector
    parts: tuple[str, ...] = ()  # the tensors of transposed keys and of values per head; then `name` is unused


class GgufCheckpoint:
    """Implements `Checkpoint` for a GGUF file. Quantized matrices are read without dequantizing them.

    Raises ExecutorError if a tensor is missing or unknown. Shapes are those of the file, which its reader compares.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open_gguf(path)
        self.config: dict[str, Any] = config_of(self._file)
        self.has_codes = any(entry.type.is_quantized for entry in self._file.tensors.values())
        self._sources = _sources(self.config, self._file.tensors)
        _check(self._file, self._sources)

    def names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shape(self._sources[name])

    def _shape(self, source: _Source) -> tuple[int, ...]:
        if source.parts:
            (heads, rank, nope), (_, value, _) = (self._file.tensors[part].shape for part in source.parts)
            return heads * (nope + value), rank
        shape = self._file.tensors[source.name].shape
        if source.is_row:
            return 1, shape[-1]
        return shape if source.expert is None else shape[1:]

    def read(self, name: str) -> Tensor | Weight:
        return self._read(self._sources[name])

    def _read(self, source: _Source) -> Tensor | Weight:
        if source.parts:
            keys, values = (self._float_tensor(part) for part in source.parts)
            return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)
        entry, shape = self._file.tensors[source.name], self._shape(source)
        index, of = source.expert or (0, 1)
        size = entry.size_bytes // of
        offset = entry.offset + index * size
        raw = torch.frombuffer(self._file.data, dtype=torch.uint8, count=size, offset=offset)
        if source.permuted_heads:
            # The file stores the rows i and i + dim/2 of a head next to each other.
            rows = raw.view(source.permuted_heads, -1, 2, raw.numel() // shape[0])
            raw = rows.transpose(1, 2).reshape(-1)
        if not entry.type.is_quantized:
            values = raw.view(_FLOATS[entry.type.name]).view(shape)
        else:
            rows = raw.view(math.prod(shape[:-1]), -1)
            weight = Weight(Ggml(entry.type), rows, name=source.name)
            if len(shape) > 1 and not source.plus_one:
                return weight
            values = weight.dequantize(CPU, torch.float32).view(shape)
        return values - 1 if source.plus_one else values

    def _float_tensor(self, name: str) -> Tensor:
        """Return a tensor of the file as numbers, in its own shape."""
        read = self._read(_Source(name))
        values = read.dequantize(CPU, torch.float32) if isinstance(read, Weight) else read.float()
        return values.view(self._file.tensors[name].shape)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _sources(config: dict[str, Any], tensors: Container[str]) -> dict[str, _Source]:
    """Return HF name → source for every tensor of a model with this config."""
    family, num_layers = BY_TYPE[config["model_type"]], config["num_hidden_layers"]
    sources = {
        "model.embed_tokens.weight": _Source("token_embd.weight"),
        "model.norm.weight": _Source("output_norm.weight", plus_one=family.plus_one),
    }
    if not config["tie_word_embeddings"]:
        sources["lm_head.weight"] = _Source("output.weight")
    attention = _latent_attention(config, tensors) if "kv_lora_rank" in config else _attention(config)
    num_experts = next((config[key] for key in _EXPERT_COUNTS if key in config), 0)
    norms = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight"}
    mlps = _mlp("mlp."), _experts(config, num_experts) if num_experts else {}
    own = {ours: _Source(name) for ours, name in family.renamed.items()}
    dense, sparse = ({**_sources_of(norms), **attention, **mlp, **own} for mlp in mlps)
    first_sparse = config.get("first_k_dense_replace", 0) if num_experts else num_layers
    for index in range(num_layers):
        at = f"blk.{index}."
        for name, source in (dense if index < first_sparse else sparse).items():
            if source.name:
                parts = tuple(at + part for part in source.parts)
                has_one = family.plus_one and name.endswith("norm.weight")
                placed = source._replace(name=at + source.name, parts=parts, plus_one=has_one)
                sources[f"model.layers.{index}.{name}"] = placed
    return sources


def _sources_of(names: Mapping[str, str]) -> dict[str, _Source]:
    return {ours: _Source(name) for ours, name in names.items()}


def _attention(config: dict[str, Any]) -> dict[str, _Source]:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    permuted = heads if BY_TYPE[config["model_type"]].is_permuted else {}
    return {
        f"self_attn.{part}_proj.{kind}": _Source(f"attn_{stored}.{kind}", permuted.get(part, 0))
        for part, stored in {"q": "q", "k": "k", "v": "v", "o": "output"}.items()
        for kind in (("weight", "bias") if config["attention_bias"] else ("weight",))
    }


def _latent_attention(config: dict[str, Any], tensors: Container[str]) -> dict[str, _Source]:
    names = {"kv_a_proj_with_mqa": "kv_a_mqa", "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b", "o_proj": "output"}
    of_latents = {"q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b"}
    names |= {"q_proj": "q"} if config["q_lora_rank"] is None else of_latents
    found = _sources_of({f"self_attn.{ours}.weight": f"attn_{name}.weight" for ours, name in names.items()})
    if "blk.0.attn_kv_b.weight" not in tensors:
        expand = _Source("attn_kv_b.weight", parts=("attn_k_b.weight", "attn_v_b.weight"))
        found["self_attn.kv_b_proj.weight"] = expand
    return found


def _mlp(
    prefix: str, stored: str = "", expert: tuple[int, int] | None = None, projections: Sequence[str] = PROJECTIONS
) -> dict[str, _Source]:
    """Return the sources of an MLP; `stored` is the suffix of the names in the file."""
    return {
        f"{prefix}{name}.weight": _Source(f"ffn_{part}{stored}.weight", expert=expert)
        for name, part in zip(projections, ("gate", "up", "down"), strict=True)
    }


def _experts(config: dict[str, Any], num: int) -> dict[str, _Source]:
    kind = config["model_type"]
    block, projections = ("block_sparse_moe.", ("w1", "w3", "w2")) if kind == "mixtral" else ("mlp.", PROJECTIONS)
    router = f"{block}router" if kind == "gpt_oss" else f"{block}gate"
    found = {f"{router}.weight": _Source("ffn_gate_inp.weight")}
    for index in range(num):
        found |= _mlp(f"{block}experts.{index}.", "_exps", (index, num), projections)
    if kind == "gpt_oss":
        found |= {_bias_of(ours): source._replace(name=_bias_of(source.name)) for ours, source in found.items()}
    if kind == "deepseek_v3":
        found[f"{block}gate.e_score_correction_bias"] = _Source("exp_probs_b.bias")
    if kind == "qwen2_moe":
        found[f"{block}shared_expert_gate.weight"] = _Source("ffn_gate_inp_shexp.weight", is_row=True)
        found |= _mlp(f"{block}shared_expert.", "_shexp")
    elif config.get("n_shared_experts"):
        found |= _mlp(f"{block}shared_experts.", "_shexp")
    return found


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _check(file: GgufFile, sources: dict[str, _Source]) -> None:
    """Raise ExecutorError unless the file has exactly these tensors, and `read` can divide them."""

    def error(name: str, reason: str) -> ExecutorError:
        return ExecutorError(f"{file.path}: tensor {name[:80]!r} {reason}")

    known = {"rope_freqs.weight", *FACTORS}
    for source in sources.values():
        for name in (names := source.parts or (source.name,)):
            if name not in file.tensors:
                raise error(name, "is missing")
        known.update(names)
        shape, *values = (file.tensors[name].shape for name in names)
        if values and not (len(shape) == len(values[0]) == 3 and shape[:2] == values[0][::2]):
            raise error(name, f"has shape {values[0]}; [heads, value, rank] of the keys {shape} is expected")
        if source.expert is not None and shape[0] != source.expert[1]:
            raise error(name, f"has shape {shape}; the metadata says {source.expert[1]} experts")
        if source.permuted_heads and shape[0] % (2 * source.permuted_heads):
            raise error(name, f"has shape {shape}; {source.permuted_heads} heads of an even size are expected")
    for name in file.tensors:
        if name not in known:
            raise error(name, "is not part of a model of this architecture")

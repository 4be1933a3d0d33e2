"""GGUF files of small random models, as llama.cpp's converter writes them: names and values are the gguf package's.

The models and the metadata of their files are in gguf_files.json. A file has every matrix in another storage type, in
types that are listed, or in float32; the model has the values of the file.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFValueType

from tests.support.coded import FILE_TYPES, packed
from tests.support.small_models import random_model, reference

HEADS, HEAD_DIM, VOCAB = 4, 64, 96
PERMUTED = ("llama", "granite", "smollm3")  # the converter reorders the rows of queries and keys of these architectures
PLUS_ONE = ("gemma2", "gemma3", "qwen35", "qwen35moe")  # and adds one to the norms of these
_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
# Names of transformers 5 that the gguf package does not know, and those of the same tensors that it does.
_RENAMED: dict[str, str] = _DATA["renamed"]
LLAMA3_SCALING: dict[str, Any] = _DATA["llama3 scaling"]


class Case(NamedTuple):
    model: str  # transformers' config class, or a small model
    fields: dict[str, Any]  # of that config
    architecture: str
    keys: dict[str, Any]  # of the file, by their last parts
    kinds: list[str]  # storage types, in turn; none: float32


def _joined(parts: list[str], own: dict[str, Any]) -> dict[str, Any]:
    return {**{name: value for part in parts for name, value in _DATA["parts"][part].items()}, **own}


CASES = {
    name: Case(model, _joined(*fields), architecture, _joined(*keys), FILE_TYPES if kinds == "mixed" else kinds)
    for name, (model, fields, architecture, keys, kinds) in _DATA["cases"].items()
}


def metadata(architecture: str = "llama", vocab_size: int = VOCAB, **changes: Any) -> dict[str, Any]:
    """Return the keys of a file. `changes` go by the key's last part; None removes it."""
    full = {f"{architecture}.{key}": value for key, value in (_DATA["metadata"] | changes).items()}
    full |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    full["tokenizer.ggml.tokens"] = [f"<{i}>" for i in range(vocab_size)]
    return full


def write(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, tuple[np.ndarray, str]]) -> Path:
    """Write a file. Tensors are (values or packed rows, type name)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        if value not in (None, "", []):
            kind = GGUFValueType.UINT32 if type(value) is int else GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permuted(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return a view of the rows of queries or keys in llama.cpp's order: rows i and i + dim / 2 are neighbours."""
    return values.view(num_heads, 2, -1, *values.shape[1:]).transpose(1, 2)


def _stored(model: Any, architecture: str, has_split_latents: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of the file by transformers' name for it: a view of the parameter that it is made of."""
    config, is_permuted = model.config, architecture in PERMUTED
    for name, values in model.state_dict().items():
        at, is_mamba = name.removesuffix(".weight"), ".mixer." in name or ".mamba." in name
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "gpt-oss" and name.endswith("sinks"):
            yield f"{name}.weight", values
        elif architecture == "gpt-oss" and ".experts." in name:
            kind = ".bias" if name.endswith("_bias") else ".weight"
            product, view = name.removesuffix("_bias"), values if kind == ".bias" else values.transpose(1, 2)
            if product.endswith("down_proj"):
                yield product + kind, view
            else:
                yield product.replace("gate_up", "gate") + kind, view[:, 0::2]
                yield product.replace("gate_up", "up") + kind, view[:, 1::2]
        elif name.endswith("experts.gate_up_proj"):
            inner = values.shape[1] // 2
            yield name.replace("gate_up_proj", "gate_proj.weight"), values[:, :inner]
            yield name.replace("gate_up_proj", "up_proj.weight"), values[:, inner:]
        elif name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate_proj", "up_proj"), values.chunk(2), strict=True):
                yield name.replace("shared_mlp.input_linear", f"mlp.shared_expert.{part}"), half
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            yield f"{name}.weight", values
        elif name.endswith(("A_log", ".D")):
            numbers = -values.exp() if name.endswith("A_log") else values
            yield name, numbers[:, None] if is_mamba else numbers
        elif is_mamba and name.endswith(".norm.weight"):
            yield name, values.view(config.mamba_n_groups if ".mamba." in name else config.n_groups, -1)
        elif "conv" in name and values.dim() == 3:
            yield name, values[:, 0]
        elif at.endswith("kv_b_proj") and has_split_latents:
            heads = values.view(config.num_attention_heads, -1, values.shape[1])
            yield name.replace("kv_b", "k_b"), heads[:, : config.qk_nope_head_dim].transpose(1, 2)
            yield name.replace("kv_b", "v_b"), heads[:, config.qk_nope_head_dim :]
        elif is_permuted and ".q_proj." in name:
            yield name, permuted(values, config.num_attention_heads)
        elif is_permuted and ".k_proj." in name:
            yield name, permuted(values, config.num_key_value_heads)
        elif at.endswith("shared_expert_gate"):
            yield name, values[0]
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), values


def tensors_of(model: Any, case: Case) -> dict[str, tuple[np.ndarray, str]]:
    """Return the tensors of the file. The model gets the values that the file's storage types leave."""
    kinds, rng = cycle(case.kinds), np.random.default_rng(3)
    architecture = next(each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    found: dict[str, tuple[np.ndarray, str]] = {}
    for kind in ("long", "short"):
        if factors := getattr(model.config, "rope_parameters", {}).get(f"{kind}_factor"):
            found[f"rope_factors_{kind}.weight"] = np.array(factors, "<f4"), "F32"
    for given, view in _stored(model, case.architecture, "attention.key_length_mla" in case.keys):
        known = given
        for new, old in _RENAMED.items():
            known = known.replace(new, old)
        spellings = known, known.replace("model.", "backbone.", 1)
        name = next(filter(None, (names.get_name(each, (".weight", ".bias")) for each in spellings)), None)
        assert name is not None, given
        is_permuted = view.dim() > 2 and (".q_proj." in given or ".k_proj." in given)
        values = view.reshape((-1, *view.shape[3:]) if is_permuted else view.shape).numpy()
        if case.architecture in PLUS_ONE and given.endswith("norm.weight") and "linear_attn" not in given:
            values = values + 1
        kind = "F32"
        if case.kinds and values.ndim > 1 and "ffn_gate_inp" not in name and "conv1d" not in name:
            kind = next(kinds) if values.shape[-1] % 256 == 0 else "Q5_0"
            # An embedding that is the head, too, would drown what the layers add.
            is_tied = name == "token_embd.weight" and model.config.tie_word_embeddings
            data = packed(rng, values.shape, kind, 0.004 if is_tied else 0.06)
            numbers = gguf.quants.dequantize(data, GGMLQuantizationType[kind])
            view.copy_(torch.from_numpy(np.ascontiguousarray(numbers)).view(view.shape))
            values = data
        found[name] = np.array(values, order="C"), kind  # a copy: the model's value heads move
    _neighbour_value_heads(model)
    return found


def _neighbour_value_heads(model: Any) -> None:
    """Give the value heads of the gated delta rule the order of transformers: those of a key head are neighbours. In the
    file, the first ones of all key heads come first, then the second ones."""
    for name, values in model.state_dict().items():
        heads, size = getattr(model.config, "linear_num_key_heads", 0), 1
        start = 0
        if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
            continue
        if any(part in name for part in ("in_proj_qkv", "in_proj_z", "out_proj", "conv1d")):
            size = model.config.linear_value_head_dim
        if "in_proj_qkv" in name or "conv1d" in name:
            start = 2 * heads * model.config.linear_key_head_dim
        rows = values.T if "out_proj" in name else values[start:]
        rows.copy_(rows.unflatten(0, (-1, heads, size)).transpose(0, 1).flatten(0, 2).clone())


@torch.no_grad()
def written(name: str, path: Path, without: str = "nothing", **changes: Any) -> tuple[Path, Any]:
    """Write the file of a case, with other keys and without some tensors; return it, and the model that it holds."""
    case = CASES[name]
    is_own = case.model.endswith("Config")
    model = random_model(case.model, case.fields) if is_own else deepcopy(reference(case.model))
    model.generation_config.eos_token_id = None
    keys = metadata(case.architecture, model.config.vocab_size, **case.keys | changes)
    tensors = {name: data for name, data in tensors_of(model, case).items() if without not in name}
    return write(path, case.architecture, keys, tensors), model


@cache
def shapes() -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors of a Llama of the sizes above, untied."""
    case = CASES["llama"]
    model = random_model(case.model, case.fields | {"tie_word_embeddings": False})
    return {name: data.shape for name, (data, _) in tensors_of(model, case).items()}


def small_file(path: Path, keys: dict[str, Any] | None = None, kind: str = "Q4_1") -> Path:
    """Write a Llama of random weights of one storage type."""
    rng = np.random.default_rng(0)
    kinds = {name: kind if len(shape) == 2 else "F32" for name, shape in shapes().items()}
    tensors = {name: (packed(rng, shape, kinds[name]), kinds[name]) for name, shape in shapes().items()}
    return write(path, "llama", metadata() if keys is None else keys, tensors)

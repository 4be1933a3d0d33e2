"""Converts a GGUF file's metadata to the config.json of the same model on the hub, and lists families' tensor names.

The tables are gguf_families.json, plain data: which metadata key each field of a config comes from, and which tensors of
a layer differ from Llama's. RoPE settings use the older fields (`rope_theta`, `rope_scaling`), which all readers of
config.json support. Metadata that is neither read nor known to change nothing is refused, never ignored.
"""

import math
from collections import ChainMap, Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from penstock.executor.gguf_header import GgufFile
from penstock.executor.loading.fields import MISSING, Fields
from penstock.executor.protocol import ExecutorError

SIGMOID = 2  # expert_gating_func; 1 is the softmax
MAX_CONTEXT = 1 << 24  # it is the length of tables
FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
Config = dict[str, Any]

_SIZES = ("attention.head_count_kv", "feed_forward_length")


@dataclass(frozen=True)
class Key:
    """The metadata key of a config field, without the architecture's prefix, and the field's default: a value, or the
    name of another field, or two divided, as text. With `is_optional`, zero or absence becomes None."""

    key: str
    default: bool | int | float | str | UnsetType = UNSET
    kind: Literal["", "number"] = ""  # otherwise that of the default, or an integer
    low: int = 1
    high: int | None = None
    is_optional: bool = False
    old_key: str = ""  # the key that other files have instead
    per: str = ""  # the field that the value is divided by

    def read(self, keys: Fields, config: Config) -> Any:
        keys.pass_over(self.old_key)
        name = self.old_key if self.old_key and self.key not in keys else self.key
        if self.is_optional and not keys.has_value(name):
            return None
        default: Any = MISSING if self.default is UNSET else self.default
        if isinstance(default, str):
            field, _, divisor = default.partition(" // ")
            default = config[field] // config[divisor] if divisor else config[field]
        if isinstance(default, bool):
            return keys.flag(name, default)
        if self.kind == "number" or isinstance(default, float):
            number = keys.number(name, default)
            return _shortest(number) if name in keys else number
        value = keys.integer(name, default, self.low, self.high)
        if not self.per:
            return value
        if value % config[self.per]:
            raise keys.error(name, value, f"a multiple of {self.per} ({config[self.per]})")
        return value // config[self.per]


@dataclass(frozen=True)
class GgufFamily:
    """A GGUF architecture. The names in `names` and `keys` are those of the groups that it uses beside Llama's."""

    model_type: str
    class_name: str  # of transformers, without ForCausalLM
    names: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)  # config fields that are the same for all models
    is_permuted: bool = False  # the rows of queries and keys are permuted, as in Llama
    plus_one: bool = False  # norms are stored with one added
    finish: str = ""  # the function of _FINISH that computes further fields
    recurrent: str = ""  # the type of layers without attention


@dataclass(frozen=True)
class GgufTables:
    keys: dict[str, dict[str, Key | str]]  # config field → its key; a text is a key with an integer
    # Names in the file → HF names. The group "model" has tensors outside of the layers, the others have those of a layer.
    # A tensor with # in its HF name stacks all experts; # stands for an expert's number.
    names: dict[str, dict[str, str]]
    families: dict[str, GgufFamily]
    variants: dict[str, GgufFamily]  # models whose files have another architecture's name
    # Keys of features that are supported only where the key is read → the values that turn them off elsewhere.
    off: dict[str, tuple[int, ...]]
    without_effect: tuple[str, ...]  # keys: the tensors show the same, or no feature that is supported uses them


TABLES = msgspec.json.decode(Path(__file__).with_name("gguf_families.json").read_bytes(), type=GgufTables)
FAMILIES = TABLES.families
BY_TYPE = {family.model_type: family for family in (*FAMILIES.values(), *TABLES.variants.values())}


def _gemma(_keys: Fields, _file: GgufFile, config: Config) -> Config:
    """Return the scale of attention. Only the 27B models scale by hidden/heads; the file does not contain this."""
    is_largest = (config["model_type"], config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3_text", 62))
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
    gelu = dict.fromkeys(("hidden_act", "hidden_activation"), "gelu_pytorch_tanh")
    return {"query_pre_attn_scalar": scalar, **gelu}


def _gpt_oss(_keys: Fields, _file: GgufFile, config: Config) -> Config:
    scaling = config["rope_scaling"]
    return {"rope_scaling": scaling and scaling | {"truncate": False}}


def _rotated(keys: Fields, _file: GgufFile, config: Config) -> Config:
    """Return the rotated part of a head; the metadata has the number of its dimensions."""
    rotated, head_dim = config["partial_rotary_factor"], config["head_dim"]
    if rotated > head_dim:
        raise keys.error("rope.dimension_count", rotated, f"an integer from 1 to {head_dim}")
    return {"partial_rotary_factor": rotated / head_dim}


def _phi3(keys: Fields, file: GgufFile, config: Config) -> Config:
    rotated = config["partial_rotary_factor"]
    found = _rotated(keys, file, config)
    if FACTORS[0] not in file.tensors:
        return found
    short, long = (_float32(file, name, rotated // 2).tolist() for name in FACTORS)
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling["attention_factor"] = keys.number("rope.scaling.attn_factor", 1.0)
    original = keys.integer("rope.scaling.original_context_length")
    return found | {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _deepseek(keys: Fields, _file: GgufFile, config: Config) -> Config:
    key_length, rope_dim = config["qk_head_dim"], config["head_dim"]
    if key_length <= rope_dim:
        raise keys.error("attention.key_length", key_length, f"more than rope.dimension_count ({rope_dim})")
    found: Config = {"qk_nope_head_dim": key_length - rope_dim, "qk_rope_head_dim": rope_dim}
    if config["model_type"] == "deepseek_v2":
        found["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return found | {"num_key_value_heads": config["num_attention_heads"]}


def _granite(_keys: Fields, _file: GgufFile, config: Config) -> Config:
    return {"attention_multiplier": config["attention_multiplier"] or config["head_dim"] ** -0.5}


def _granite_hybrid(keys: Fields, file: GgufFile, config: Config) -> Config:
    keys.only("rope.scaling.finetuned", None, False)  # true: rotated
    biases = {"mamba_proj_bias": _has(file, "ssm_in.bias"), "mamba_conv_bias": _has(file, "ssm_conv1d.bias")}
    return _granite(keys, file, config) | biases


def _lfm2(keys: Fields, _file: GgufFile, config: Config) -> Config:
    keys.only("expert_gating_func", None, SIGMOID)
    return {"norm_eps": config["rms_norm_eps"]}


def _nemotron_h(keys: Fields, file: GgufFile, config: Config) -> Config:
    """Return the kind of each block, by its tensors, and which biases there are."""
    keys.pass_over("rope.dimension_count")  # these models do not rotate
    signs = {"mamba": "ssm_a", "attention": "attn_q.weight", "moe": "ffn_gate_inp.weight", "mlp": "ffn_up.weight"}
    kinds = [
        next((kind for kind, name in signs.items() if f"blk.{index}.{name}" in file.tensors), "")
        for index in range(config["num_hidden_layers"])
    ]
    biases = {"use_bias": _has(file, "ssm_in.bias"), "use_conv_bias": _has(file, "ssm_conv1d.bias")}
    return biases | {"layer_types": kinds}


def _has(file: GgufFile, name: str) -> bool:
    """Return whether a block has the tensor."""
    return any(each.endswith(f".{name}") for each in file.tensors)


_FINISH = {
    each.__name__: each
    for each in (_gemma, _gpt_oss, _rotated, _phi3, _deepseek, _granite, _granite_hybrid, _lfm2, _nemotron_h)
}


def config_of(file: GgufFile) -> Config:
    """Return the config of the model in `file`; its sizes are checked only against absolute limits."""
    metadata = Fields(file.metadata, str(file.path))
    architecture = metadata.text("general.architecture")
    if architecture not in FAMILIES:
        raise metadata.error("general.architecture", architecture, f"one of {', '.join(FAMILIES)}")
    if (parts := metadata.integer("split.count", 1, low=0)) > 1:
        raise metadata.error("split.count", parts, "1 (join the parts with gguf-split --merge)")
    prefix = f"{architecture}."
    own = {key: _uniform(key, value) for key, value in file.metadata.items() if key.startswith(prefix)}
    keys = Fields(own, str(file.path), prefix)
    family = _family(architecture, keys)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ExecutorError(f"{file.path}: tensor 'token_embd.weight': a matrix of that name is expected")
    config: Config = {}
    for name, key in ChainMap(*(TABLES.keys[group] for group in (*reversed(family.keys), "base"))).items():
        config[name] = (Key(key) if isinstance(key, str) else key).read(keys, config)
    drafting = keys.integer("nextn_predict_layers", 0, low=0, high=config["num_hidden_layers"] - 1)
    config["num_hidden_layers"] -= drafting
    config |= {
        "num_nextn_predict_layers": drafting,
        "architectures": [f"{family.class_name}ForCausalLM"],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "rope_scaling": _rope_scaling(keys),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        "torch_dtype": _dtype(file),
        **_token_ids(metadata, embedding.shape[0]),
        **family.constants,
    }
    if "rope_freqs.weight" in file.tensors:
        config["rope_scaling"] = _llama3_scaling(file, config)
    if every := config.get("sliding_window_pattern"):  # every so many layers, one has full attention
        layers = range(1, config["num_hidden_layers"] + 1)
        config["layer_types"] = ["sliding_attention" if index % every else "full_attention" for index in layers]
    if family.recurrent:
        blocks = range(config["num_hidden_layers"])
        attends = [f"blk.{index}.attn_k.weight" in file.tensors for index in blocks]
        config["layer_types"] = ["full_attention" if each else family.recurrent for each in attends]
    if family.finish:
        config |= _FINISH[f"_{family.finish}"](keys, file, config)
    _refuse_unread(keys, config)
    return config


def _family(architecture: str, keys: Fields) -> GgufFamily:
    if architecture == "llama" and keys.integer("expert_count", 0, low=0):
        return TABLES.variants["mixtral"]
    if architecture == "deepseek2":
        keys.only("expert_gating_func", None, 0, 1, SIGMOID)
        is_third = keys.integer("expert_gating_func", 0, low=0) == SIGMOID
        return TABLES.variants["deepseek_v3"] if is_third else FAMILIES[architecture]
    return FAMILIES[architecture]


def _uniform(key: str, value: Any) -> Any:
    """Return the common value of a per-layer list if all layers have the same, else the value unchanged. Layers without
    such a part have zeros in a list of sizes."""
    if not isinstance(value, list):
        return value
    values = [each for each in value if each or not key.endswith(_SIZES)] or value
    return values[0] if values and values.count(values[0]) == len(values) else value


def _token_ids(metadata: Fields, vocab_size: int) -> dict[str, Any]:
    """Return bos_token_id, and eos_token_id with all ids that end the text, a turn or a message."""

    def token(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        return metadata.integer(key, low=0, high=vocab_size - 1) if key in metadata else None

    ends = [i for i in dict.fromkeys(token(name) for name in ("eos", "eot", "eom")) if i is not None]
    return {"bos_token_id": token("bos"), "eos_token_id": ends[0] if len(ends) == 1 else ends or None}


def _rope_scaling(keys: Fields) -> dict[str, Any] | None:
    keys.only("rope.scaling.type", None, "none", "linear", "yarn")
    if "rope.scaling.type" not in keys and "rope.scale_linear" in keys:
        return {"rope_type": "linear", "factor": _shortest(keys.number("rope.scale_linear"))}
    kind = keys.text("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _shortest(keys.number("rope.scaling.factor"))}
    if kind == "yarn":
        original = keys.integer("rope.scaling.original_context_length", high=MAX_CONTEXT)
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (key := f"rope.scaling.yarn_{name}") in keys:
                scaling[name] = _shortest(keys.number(key))
        if growth := keys.number_or_zero("rope.scaling.yarn_log_multiplier"):  # DeepSeek's mscale, stored divided by 10
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(10 * growth))
    return scaling


def _refuse_unread(keys: Fields, config: Config) -> None:
    """Raise ExecutorError for settings that were not read, unless they have the value of a Llama or change nothing."""
    for key in keys.unread(*TABLES.off):
        keys.only(key, None, *TABLES.off[key])
    for key in keys.unread("attention.value_length", "rope.dimension_count"):
        keys.only(key, config["head_dim"], default=config["head_dim"])
    for key in keys.unread("attention.sliding_window"):
        window, context = keys.integer(key, 0, low=0), config["max_position_embeddings"]
        if 0 < window < context:
            raise keys.error(key, window, f"at least the context {context}")
    keys.pass_over(*TABLES.without_effect)
    keys.no_others("no such key")


def _float32(file: GgufFile, name: str, count: int) -> Any:
    """Return a tensor of `count` numbers."""
    entry = file.tensors.get(name)
    if entry is None or entry.type.name != "F32" or entry.shape != (count,):
        raise ExecutorError(f"{file.path}: tensor {name!r}: {count} numbers as F32 are expected")
    return np.frombuffer(file.data, "<f4", count, entry.offset)


_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_scaling(file: GgufFile, config: Config) -> Config:
    """Return Llama 3.1's RoPE scaling, which GGUF stores only as one divisor per frequency.

    The largest divisor is the factor; the other parameters have been the same in every release. If they do not yield
    the divisors in the file, the file has a scaling that the config cannot express: raise ExecutorError.
    """
    head_dim = config["head_dim"]
    stored = _float32(file, "rope_freqs.weight", head_dim // 2)
    factor, (low, high, original) = float(stored.max()), _LLAMA3_SCALING.values()
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if not (math.isfinite(factor) and factor > 0 and np.allclose(stored, 1 / ((1 - smooth) / factor + smooth), 1e-3)):
        raise ExecutorError(
            f"{file.path}: tensor 'rope_freqs.weight' is not Llama 3's scaling with factor {factor:g}; "
            f"expected low_freq_factor {low:g}, high_freq_factor {high:g}, {original} original positions"
        )
    return {"rope_type": "llama3", "factor": _shortest(factor), **_LLAMA3_SCALING}


def _dtype(file: GgufFile) -> str:
    """Return the dtype of most values; quantized ones count as bfloat16, in which all these models were trained."""
    names = {"F32": "float32", "F16": "float16"}
    sizes = Counter[str]()
    for entry in file.tensors.values():
        sizes[names.get(entry.type.name, "bfloat16")] += math.prod(entry.shape)
    return sizes.most_common(1)[0][0]


def _shortest(value: float) -> float:
    """Return the number with the shortest decimal form for the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))

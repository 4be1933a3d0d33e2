"""The supported architectures, by the name in config.json, and how each is built: as a model that writes text, as the
text part of a model of images, or beneath a classifier's head.

Their modules are imported when a model asks for them: a dense model loads no experts and none of `penstock.eplb`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.cache_layout import LayerCache
from penstock.executor.kernels import Ops
from penstock.executor.kernels.linear import Linear
from penstock.executor.loading.fields import Fields
from penstock.executor.models.catalogue import TEXT_PARTS, missing
from penstock.executor.models.decoder import Decoder
from penstock.executor.models.weights import Weights
from penstock.executor.protocol import Activation, LabelInfo

if TYPE_CHECKING:
    from penstock.executor.models.moe import Experts


class Spec(Protocol):
    """What is asked of any model's settings before the model exists."""

    vocab_size: int
    hidden_size: int
    head_dim: int
    max_positions: int
    tied_head: bool


class CausalModel(Protocol):
    num_layers: int
    caches: tuple[LayerCache, ...]  # what each layer keeps
    unit_bytes: int  # of a state's largest unit; 0: no layer has a state
    kv_parts: int  # 2: keys and values; 1: one vector that is both
    kv_width: int  # of each part, of one position in one layer
    # What adapters may change, the layers of all slots of experts in one; with any, `forward` heeds
    # `ForwardBatch.adapters`.
    adapted: tuple[Linear, ...]

    @property
    def experts(self) -> "list[Experts]": ...

    def forward(self, batch: ForwardBatch, pages: KvPages) -> Tensor:
        """Final hidden states of the tokens `batch.wanted`: [W, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, hidden] -> [S, vocabulary] on the first rank of the group, None on the others."""
        ...


class Architecture(NamedTuple):
    read_spec: Callable[[Fields], Any]
    build: Callable[[Any, Weights, Ops, int, torch.device], CausalModel]  # spec, weights, ops, positions, device


# The module beside this one, and the function in it that reads the settings. A module that has no `build` of its own
# makes settings of `Decoder`.
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": ("moe_families", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ("moe_families", "deepseek_v3"),
    "Ernie4_5ForCausalLM": ("families", "ernie4_5"),
    "Ernie4_5_MoeForCausalLM": ("moe_families", "ernie4_5_moe"),
    "Gemma2ForCausalLM": ("families", "gemma2"),
    "Gemma3ForCausalLM": ("families", "gemma3"),
    "Gemma4ForCausalLM": ("gemma4", "gemma4"),
    "Glm4ForCausalLM": ("families", "glm4"),
    "Glm4MoeForCausalLM": ("moe_families", "glm4_moe"),
    "Glm4MoeLiteForCausalLM": ("moe_families", "glm4_moe_lite"),
    "GptOssForCausalLM": ("moe_families", "gpt_oss"),
    "GraniteForCausalLM": ("families", "granite"),
    "GraniteMoeForCausalLM": ("moe_families", "granite_moe"),
    "GraniteMoeHybridForCausalLM": ("recurrent_families", "granite_hybrid"),
    "GraniteMoeSharedForCausalLM": ("moe_families", "granite_moe_shared"),
    "HunYuanDenseV1ForCausalLM": ("families", "hunyuan_dense"),
    "Lfm2ForCausalLM": ("recurrent_families", "lfm2"),
    "LlamaForCausalLM": ("families", "llama"),
    "MiniMaxM2ForCausalLM": ("moe_families", "minimax_m2"),
    "MinistralForCausalLM": ("families", "ministral"),
    "Ministral3ForCausalLM": ("families", "ministral3"),
    "MistralForCausalLM": ("families", "mistral"),
    "MixtralForCausalLM": ("moe_families", "mixtral"),
    "Olmo2ForCausalLM": ("families", "olmo2"),
    "Olmo3ForCausalLM": ("families", "olmo3"),
    "OPTForCausalLM": ("opt", "read_opt"),
    "Phi3ForCausalLM": ("families", "phi3"),
    "Qwen2ForCausalLM": ("families", "qwen2"),
    "Qwen2MoeForCausalLM": ("moe_families", "qwen2_moe"),
    "Qwen3ForCausalLM": ("families", "qwen3"),
    "Qwen3MoeForCausalLM": ("moe_families", "qwen3_moe"),
    "Qwen3NextForCausalLM": ("recurrent_families", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("recurrent_families", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("recurrent_families", "qwen3_5_moe"),
    "SeedOssForCausalLM": ("families", "seed_oss"),
    "SmolLM3ForCausalLM": ("families", "smollm3"),
}
HEAD = "score.weight"
ENDING = "ForSequenceClassification"
_ACTIVATIONS: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
_OF_ALL = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")  # what the outer config may say


def text_of(config: dict[str, Any], where: str) -> dict[str, Any]:
    """The config of a multimodal model's text part; of another model its own."""
    fields = Fields(config, where)
    parts = TEXT_PARTS.get((fields.texts("architectures") or [""])[0])
    if parts is None:
        return config
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", config.get("text_config"), "an object")
    text.only("model_type", *parts)
    inner = config["text_config"]
    outer = {name: config[name] for name in _OF_ALL if config.get(name) is not None}
    return {**inner, **outer, "architectures": [parts[inner["model_type"]]]}


def without_head(config: dict[str, Any], where: str) -> tuple[dict[str, Any], LabelInfo | None]:
    """Return the config of the model beneath a classifier's head and what the head says; for another model its own config
    and None. A classifier is a model that writes text, with a head of a row for each label in place of the vocabulary's
    (transformers' …ForSequenceClassification), or with two tokens of the vocabulary that stand for no and yes."""
    fields = Fields(config, where)
    name, tokens = (fields.texts("architectures") or [""])[0], fields.texts("classifier_from_token")
    if tokens is not None and len(tokens) != 2:
        raise fields.error("classifier_from_token", tokens, "two tokens, of no and of yes,")
    if name.endswith(ENDING):
        family = name.removesuffix(ENDING)
        bases = [f"{each}ForCausalLM" for each in (family, family.removesuffix("Text"))]
        config = {**config, "architectures": [next((base for base in bases if base in ARCHITECTURES), name)]}
    elif tokens is None:
        return config, None
    if tokens is not None:
        return config, LabelInfo(names=("LABEL_0",), activation="sigmoid", tokens=(tokens[0], tokens[1]))
    names = _names(fields)
    kind = fields.text("problem_type", "")
    activation = _ACTIVATIONS.get(kind)
    if kind and activation is None:
        raise fields.error("problem_type", kind, f"one of {', '.join(_ACTIVATIONS)}")
    activation = activation or ("sigmoid" if len(names) == 1 else "softmax")
    return {**config, "tie_word_embeddings": True}, LabelInfo(names=names, activation=activation)  # there is no lm_head


def _names(fields: Fields) -> tuple[str, ...]:
    named = fields.section("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(fields.integer("num_labels", 2, high=4096)))
    if sorted(named.names()) != sorted(str(index) for index in range(len(named.names()))):
        raise fields.error("id2label", named.names(), "the labels' numbers from 0 on")
    return tuple(named.text(str(index)) for index in range(len(named.names())))


def find_architecture(fields: Fields) -> tuple[str, Architecture]:
    """The first entry of `architectures` and how to build it."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        if names and (needed := missing(names[0])):
            raise fields.error("architectures", names, f"a family of `penstock models`; {names[0]} needs {needed}")
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    home, reader = ARCHITECTURES[names[0]]
    module = import_module(f"penstock.executor.models.{home}")
    return names[0], Architecture(getattr(module, reader), getattr(module, "build", Decoder))

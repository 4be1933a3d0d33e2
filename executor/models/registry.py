"""Which architectures there are, by the name that config.json gives, and how each is built.

Their modules are imported when a model asks for them: a dense model loads no experts and none of `penstock.eplb`.
"""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import Ops
from penstock.executor.loading.fields import Fields
from penstock.executor.models.decoder import Decoder
from penstock.executor.models.weights import Weights

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
    kv_parts: int  # 2: keys and values; 1: one vector that is both
    kv_width: int  # of each part, of one position in one layer

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
    renamed: tuple[tuple[str, str], ...]  # parts of tensors' names, and what they are in the checkpoint
    left: tuple[str, ...]  # how the names of tensors begin that are not computed: of images, of tokens ahead


# The module beside this one, and the function in it that reads the settings. A module that has no `build` of its own
# makes settings of `Decoder`.
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": ("moe_families", "deepseek_v2"),
    "DeepseekV3ForCausalLM": ("moe_families", "deepseek_v3"),
    "Gemma3ForCausalLM": ("families", "gemma3"),
    "Lfm2ForCausalLM": ("recurrent_families", "lfm2"),
    "LlamaForCausalLM": ("families", "llama"),
    "MistralForCausalLM": ("families", "mistral"),
    "MixtralForCausalLM": ("moe_families", "mixtral"),
    "OPTForCausalLM": ("opt", "read_opt"),
    "Qwen2ForCausalLM": ("families", "qwen2"),
    "Qwen2MoeForCausalLM": ("moe_families", "qwen2_moe"),
    "Qwen3ForCausalLM": ("families", "qwen3"),
    "Qwen3MoeForCausalLM": ("moe_families", "qwen3_moe"),
    "Qwen3NextForCausalLM": ("recurrent_families", "qwen3_next"),
    "Qwen3_5ForCausalLM": ("recurrent_families", "qwen3_5"),
    "Qwen3_5ForConditionalGeneration": ("recurrent_families", "qwen3_5"),
    "Qwen3_5MoeForCausalLM": ("recurrent_families", "qwen3_5_moe"),
    "Qwen3_5MoeForConditionalGeneration": ("recurrent_families", "qwen3_5_moe"),
}


def find_architecture(fields: Fields) -> tuple[str, Architecture]:
    """The first entry of `architectures` and how to build it."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    home, reader = ARCHITECTURES[names[0]]
    module = import_module(f"penstock.executor.models.{home}")
    renamed, left = getattr(module, "STORED", {}).get(reader, ((), ()))
    return names[0], Architecture(getattr(module, reader), getattr(module, "build", Decoder), renamed, left)

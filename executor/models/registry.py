"""Which architectures there are, by the name that config.json gives, and how each is built."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import Ops
from penstock.executor.loading.fields import Fields
from penstock.executor.models import families, moe_families
from penstock.executor.models.decoder import Decoder
from penstock.executor.models.moe import Experts
from penstock.executor.models.opt import Opt, read_opt
from penstock.executor.models.weights import Weights


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
    def experts(self) -> list[Experts]: ...

    def forward(self, batch: ForwardBatch, pages: KvPages) -> Tensor:
        """Final hidden states of the tokens `batch.wanted`: [W, hidden]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """[S, hidden] -> [S, vocabulary] on the first rank of the group, None on the others."""
        ...


class Architecture(NamedTuple):
    read_spec: Callable[[Fields], Any]
    build: Callable[[Any, Weights, Ops, int, torch.device], CausalModel] = (
        Decoder  # spec, weights, ops, positions, device
    )


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": Architecture(moe_families.deepseek_v2),
    "DeepseekV3ForCausalLM": Architecture(moe_families.deepseek_v3),
    "Gemma3ForCausalLM": Architecture(families.gemma3),
    "LlamaForCausalLM": Architecture(families.llama),
    "MistralForCausalLM": Architecture(families.mistral),
    "MixtralForCausalLM": Architecture(moe_families.mixtral),
    "OPTForCausalLM": Architecture(read_opt, Opt),
    "Qwen2ForCausalLM": Architecture(families.qwen2),
    "Qwen2MoeForCausalLM": Architecture(moe_families.qwen2_moe),
    "Qwen3ForCausalLM": Architecture(families.qwen3),
    "Qwen3MoeForCausalLM": Architecture(moe_families.qwen3_moe),
}


def find_architecture(fields: Fields) -> tuple[str, Architecture]:
    """The first entry of `architectures` and how to build it."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return names[0], ARCHITECTURES[names[0]]

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
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Weights


class Spec(Protocol):
    """What is asked of any model's settings before the model exists."""

    vocab_size: int
    hidden_size: int
    head_dim: int
    max_positions: int
    tied_head: bool


class Model(Protocol):
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
    build: Callable[[Any, Weights, Ops, int, torch.device], Model]  # spec, weights, ops, positions, device


def _decoder(read_spec: Callable[[Fields], DecoderSpec]) -> Architecture:
    return Architecture(read_spec, Decoder)


ARCHITECTURES: dict[str, Architecture] = {
    "DeepseekV2ForCausalLM": _decoder(moe_families.deepseek_v2),
    "DeepseekV3ForCausalLM": _decoder(moe_families.deepseek_v3),
    "Gemma3ForCausalLM": _decoder(families.gemma3),
    "LlamaForCausalLM": _decoder(families.llama),
    "MistralForCausalLM": _decoder(families.mistral),
    "MixtralForCausalLM": _decoder(moe_families.mixtral),
    "OPTForCausalLM": Architecture(read_opt, Opt),
    "Qwen2ForCausalLM": _decoder(families.qwen2),
    "Qwen2MoeForCausalLM": _decoder(moe_families.qwen2_moe),
    "Qwen3ForCausalLM": _decoder(families.qwen3),
    "Qwen3MoeForCausalLM": _decoder(moe_families.qwen3_moe),
}


def find_architecture(fields: Fields) -> tuple[str, Architecture]:
    """The first entry of `architectures` and how to build it."""
    names = fields.texts("architectures") or []
    if not names or names[0] not in ARCHITECTURES:
        raise fields.error("architectures", names, f"one of {', '.join(ARCHITECTURES)}")
    return names[0], ARCHITECTURES[names[0]]

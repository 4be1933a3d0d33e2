"""Small models with a layer for multi-token prediction: stored as published, and computed by plain torch as the oracle.

The layer of a family is one layer of the family's own model, so the oracle is a model of transformers with one layer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import WEIGHTS, copied, edit_config
from tests.support.small_models import CASES, ONE_LAYER, RECURRENT, random_model, reference

# The tensors beside the layer's own: the product, the norms of embedding and state, and the norm before the head.
QWEN = ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
DEEPSEEK = ("", "eh_proj", "enorm", "hnorm", "shared_head.norm")


@dataclass
class DraftModel:
    path: Path  # the checkpoint
    whole: Any  # transformers' model
    layer: Any  # transformers' model of the draft layer alone
    project: torch.Tensor
    norms: tuple[torch.Tensor, torch.Tensor]
    offset: float  # what is added to weights of norms

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the tokens that are drafted after `tokens`, of which the last was just sampled."""
        ids = torch.tensor([tokens])
        states, drafted = self.whole.model(ids[:, :-1]).last_hidden_state[0], list[int]()
        for _ in range(count):
            following = torch.tensor([*tokens, *drafted][1:])
            parts = self.whole.model.embed_tokens(following), states
            joined = torch.cat([self._norm(*pair) for pair in zip(parts, self.norms, strict=True)], dim=1)
            out = self.layer.model(inputs_embeds=(joined @ self.project.T)[None]).last_hidden_state[0]
            states = torch.cat((states, out[-1:]))
            drafted.append(int(self.whole.lm_head(out[-1]).argmax()))
        return drafted

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        eps = self.whole.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + self.offset)


def draft_model(case: str, path: Path) -> DraftModel:
    """Store a small model with a random draft layer."""
    whole, (config, fields) = reference(case), (CASES | RECURRENT)[case]
    layer = random_model(config, fields | {"num_hidden_layers": 1} | ONE_LAYER[case])
    copied(case, path)
    is_qwen, number = case.startswith("qwen"), whole.config.num_hidden_layers
    outside = "" if is_qwen else f"model.layers.{number}."
    inside, product, *norms = (outside + name for name in (QWEN if is_qwen else DEEPSEEK))
    size, generator = whole.config.hidden_size, torch.Generator().manual_seed(11)
    project = torch.randn(size, 2 * size, generator=generator) / (2 * size) ** 0.5
    first, second = (0.3 * torch.randn(size, generator=generator) + (not is_qwen) for _ in range(2))
    tensors = load_file(path / WEIGHTS) | {f"{product}.weight": project, f"{norms[0]}.weight": first}
    tensors |= {f"{norms[1]}.weight": second, f"{norms[2]}.weight": layer.model.norm.weight.detach().clone()}
    stored = path.with_name(f"{path.name}-layer")
    layer.save_pretrained(stored)
    tensors |= {
        inside + name.removeprefix("model.layers.0."): tensor
        for name, tensor in load_file(stored / WEIGHTS).items()
        if name.startswith("model.layers.0.")
    }
    if not is_qwen:  # DeepSeek's checkpoints repeat the embedding and the head
        tensors[f"{outside}embed_tokens.weight"] = torch.zeros(4)
        tensors[f"{outside}shared_head.head.weight"] = torch.zeros(4)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    edit_config(path, **{"mtp_num_hidden_layers" if is_qwen else "num_nextn_predict_layers": 1})
    return DraftModel(path, whole, layer, project, (first, second), float(is_qwen))

"""Log-probabilities of the raw distribution, for sampled tokens and for prompts.

`rank` counts the tokens that are strictly more likely, plus one: where several tie for the first place, as
bfloat16 logits often do, each of them has rank 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.executor.protocol import TokenLogprobs


class PendingLogprobs(NamedTuple):
    """Tensors that become `TokenLogprobs` once they are on the host."""

    ids: Tensor  # [n, 1 + num]: the chosen token, then the most likely ones
    values: Tensor  # [n, 1 + num]
    ranks: Tensor  # [n]

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self.ids.tolist(), self.values.tolist(), self.ranks.tolist(), strict=True)
        return [TokenLogprobs(tuple(ids), tuple(values), rank) for ids, values, rank in rows]


def token_logprobs(logits: Tensor, chosen: Tensor, num: int) -> PendingLogprobs:
    """logits [n, V], chosen [n] int64 → those of the chosen token and of the `num` most likely (-1: of all)."""
    logits, chosen = logits.float(), chosen[:, None]
    values = logits.log_softmax(-1)
    ranks = (logits > logits.gather(1, chosen)).sum(-1) + 1
    if num < 0:
        ids = torch.argsort(logits, dim=-1, descending=True, stable=True)
    else:
        ids = logits.topk(min(num, logits.shape[1]), -1).indices
    ids = torch.cat([chosen, ids], 1)
    return PendingLogprobs(ids, values.gather(1, ids), ranks)


def prompt_logprobs(logits: Tensor, chosen: Tensor, num: int) -> list[TokenLogprobs]:
    """logits [n, V] that predicted the prompt tokens `chosen` [n]. Raises ValueError if one is NaN or infinite."""
    if not torch.isfinite(logits.amax(-1)).all():
        raise ValueError("prompt_logprobs: the model's logits are not finite")
    return token_logprobs(logits, chosen.long(), num).read()

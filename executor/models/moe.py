"""The mixture of experts: a router picks some experts per token, each computes, their outputs are weighed and added.

Ranks share the work in one of two ways. By columns, as in any MLP: every rank has a slice of every expert. Or by
experts (`--enable-expert-parallel`): every rank has some experts whole, and computes the tokens that picked those.
Either way every rank sees all tokens, and the layer's one sum over ranks puts the parts together.
"""

import torch

from penstock.executor.kernels import Ops
from penstock.executor.linear import make_linear
from penstock.executor.loading.weights import Weights
from penstock.executor.models.mlp import Mlp, projections
from penstock.executor.models.spec import DecoderSpec, MoeSpec


class MoeMlp:
    def __init__(self, spec: DecoderSpec, moe: MoeSpec, index: int, weights: Weights, ops: Ops) -> None:
        prefix = f"model.layers.{index}.{moe.block}."
        self._moe = moe
        # The choice of experts is made in float32: a near tie decided by rounding would change the layer's output.
        self._gate = make_linear(weights.float32(f"{prefix}gate.weight", (moe.num_experts, spec.hidden_size)))
        self._bias = None
        if moe.has_bias:
            self._bias = weights.float32(f"{prefix}gate.e_score_correction_bias", (moe.num_experts,))
        self._experts = Experts(spec, moe, prefix, weights, ops)
        self._shared = self._shared_gate = None
        if moe.shared_size:
            names = projections(f"{prefix}{moe.shared_name}.")
            self._shared = Mlp(spec, moe.shared_size, names, weights, ops)
        if moe.has_shared_gate:
            self._shared_gate = make_linear(
                weights.float32(f"{prefix}shared_expert_gate.weight", (1, spec.hidden_size))
            )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; a rank's part of the sum."""
        wide = hidden.float()
        ids, shares = choose_experts(self._gate(wide), self._bias, self._moe)
        out = self._experts(hidden, ids, shares)
        if self._shared is None:
            return out
        shared = self._shared(hidden)
        if self._shared_gate is not None:
            shared = (self._shared_gate(wide).sigmoid() * shared).to(hidden.dtype)
        return out + shared


def choose_experts(logits: torch.Tensor, bias: torch.Tensor | None, moe: MoeSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [T, experts] float32 -> the experts of each token [T, k], and their shares [T, k] float32."""
    scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
    wanted = scores if bias is None else scores + bias  # the bias steers the choice, never the share
    if moe.num_groups > 1:
        grouped = wanted.unflatten(-1, (moe.num_groups, -1))
        # A group is as good as its best expert, or (with a bias) its best two together.
        best = grouped.amax(-1) if bias is None else grouped.topk(2, dim=-1).values.sum(-1)
        chosen = best.topk(moe.top_groups, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        wanted = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    ids = wanted.topk(moe.top_k, dim=-1).indices
    shares = scores.gather(1, ids)
    if moe.renormalize:
        shares = shares / (shares.sum(-1, keepdim=True) + moe.renormalize_eps)
    return ids, shares * moe.scale


class Experts:
    """The rank's experts. Tokens are sorted by expert, so that each one's weights are read once for all its tokens."""

    def __init__(self, spec: DecoderSpec, moe: MoeSpec, prefix: str, weights: Weights, ops: Ops) -> None:
        group = weights.group
        self._num_experts, self._first = moe.num_experts, 0
        if weights.by_experts:
            self._first, end = group.share(moe.num_experts)
        else:
            end = moe.num_experts
        self._experts: list[Mlp] = []
        for expert in range(moe.num_experts):
            names = moe.names(f"{prefix}experts.{expert}.")
            if self._first <= expert < end:
                is_split = not weights.by_experts
                self._experts.append(Mlp(spec, moe.intermediate_size, names, weights, ops, is_split))
            else:  # another rank's, but part of the model that the fingerprint names
                shape = (moe.intermediate_size, spec.hidden_size)
                for name, of in zip(names, (shape, shape, shape[::-1]), strict=True):
                    weights.pass_over(f"{name}.weight", of)

    def __call__(self, hidden: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """hidden [T, hidden], ids and shares [T, k] -> [T, hidden]: what this rank's experts add up to."""
        num_tokens, top_k = ids.shape
        order = ids.flatten().argsort(stable=True)  # [T * k] by expert
        counts = torch.bincount(ids.flatten(), minlength=self._num_experts).tolist()
        out = hidden.new_zeros(num_tokens * top_k, hidden.shape[1])
        start = sum(counts[: self._first])
        for expert, count in zip(self._experts, counts[self._first :], strict=False):
            if count:
                places = order[start : start + count]
                out.index_copy_(0, places, expert(hidden.index_select(0, places // top_k)))
            start += count
        # A token's experts are added in the order of its choice, so the sum does not depend on the batch.
        return (out.view(num_tokens, top_k, hidden.shape[1]) * shares[..., None]).sum(1).to(hidden.dtype)

"""Multi-head latent attention (DeepSeek): what is cached of a position is one short vector for all heads.

A position's keys and values are linear in its latent. So a query is taken to the latent's space before it meets the
keys, and what it attends to is taken to the values' space afterwards ("absorbed"): the cache holds, per position, the
part that all heads rotate and the latent, once, and every head reads the same. Each rank caches all of it.
"""

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import Ops
from penstock.executor.linear import Narrow, multiply, take_narrow
from penstock.executor.loading.weights import Weights
from penstock.executor.models.attention import Pages, heads_of
from penstock.executor.models.rope import Tables
from penstock.executor.models.spec import DecoderSpec

NORM_EPS = 1e-6  # of the two inner norms, whatever the config says of the outer ones


class LatentAttention:
    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        assert spec.latent is not None
        self._ops, self._sizes, self._scale = ops, spec.latent, spec.attention_scale
        self._cos, self._sin = tables[spec.layers[index].rope]
        self._num_heads, _ = heads_of(spec, weights.group)
        sizes, hidden, heads = spec.latent, spec.hidden_size, spec.num_heads
        prefix = f"model.layers.{index}.self_attn."
        q_width = heads * (sizes.nope_dim + sizes.rope_dim)
        self._q_down = self._q_norm = None
        q_name, q_columns = "q_proj", hidden
        if sizes.q_rank is not None:
            self._q_down = weights.linear((f"{prefix}q_a_proj",), (sizes.q_rank,), hidden, spec.qkv_bias)
            self._q_norm = weights.norm(f"{prefix}q_a_layernorm.weight", sizes.q_rank)
            q_name, q_columns = "q_b_proj", sizes.q_rank
        self._q = weights.linear((f"{prefix}{q_name}",), (q_width,), q_columns, split="rows", units=(heads,))
        kv_rows = sizes.kv_rank + sizes.rope_dim
        self._kv_down = weights.linear((f"{prefix}kv_a_proj_with_mqa",), (kv_rows,), hidden, spec.qkv_bias)
        self._kv_norm = weights.norm(f"{prefix}kv_a_layernorm.weight", sizes.kv_rank)
        expand_shape = (heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank)
        expand = weights.tensor(f"{prefix}kv_b_proj.weight", expand_shape, split="rows", units=heads)
        expand = expand.view(self._num_heads, -1, sizes.kv_rank)
        self._to_latent = expand[:, : sizes.nope_dim].contiguous()  # [heads, nope, rank]
        self._from_latent = expand[:, sizes.nope_dim :].transpose(1, 2).contiguous()  # [heads, rank, value]
        self.output = weights.linear(
            (f"{prefix}o_proj",), (hidden,), heads * sizes.value_dim, spec.output_bias, split="columns", units=(heads,)
        )

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._kv_down, self._q if self._q_down is None else self._q_down)

    def attend(self, hidden: torch.Tensor | Narrow, batch: ForwardBatch, pages: Pages) -> torch.Tensor:
        """[T, hidden] -> [T, heads * value]; the new latents are in their pages before any is read."""
        ops, sizes = self._ops, self._sizes
        latent, rotating = multiply(self._kv_down, hidden).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        latent = ops.rms_norm(latent.contiguous(), self._kv_norm, NORM_EPS)
        key = torch.cat((_pairs_apart(rotating), latent), dim=-1)[:, None]  # [T, 1, rope + rank]
        latents = pages[0]
        q = ops.rope_and_store(
            self._queries(hidden), key, None, self._cos, self._sin, batch.positions, latents, latents, batch.kv_slots
        )
        attended = ops.latent_attention(q, latents, batch, self._scale, sizes.rope_dim)
        return torch.bmm(attended.transpose(0, 1), self._from_latent).transpose(0, 1).flatten(1)

    def _queries(self, hidden: torch.Tensor | Narrow) -> torch.Tensor:
        """[T, hidden] -> [T, heads, rope + rank], not yet rotated."""
        sizes = self._sizes
        if self._q_down is not None:
            hidden = self._ops.rms_norm(multiply(self._q_down, hidden), self._q_norm, NORM_EPS)
        q = multiply(self._q, hidden).unflatten(1, (self._num_heads, -1))
        nope, rotating = q.split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        absorbed = torch.bmm(nope.transpose(0, 1), self._to_latent).transpose(0, 1)
        return torch.cat((_pairs_apart(rotating), absorbed), dim=-1)


def _pairs_apart(x: torch.Tensor) -> torch.Tensor:
    """The checkpoint rotates neighbours (2i, 2i + 1), our kernels (i, i + half): queries and keys move alike."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

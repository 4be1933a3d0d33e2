"""Multi-head latent attention (DeepSeek): what is cached of a position is one short vector for all heads.

A position's keys and values are linear in its latent. So a query is taken to the latent's space before it meets the
keys, and what it attends to is taken to the values' space afterwards ("absorbed"): the cache holds, per position, the
part that all heads rotate and the latent, once, and every head reads the same. Each rank caches all of it.

Many tokens of one prompt make it cheaper to expand the latents they see into each head's keys and values, less than a
third as wide. Where the device has a kernel for it, `LatentSpec.is_expanded` decides by the chunk's length alone.
"""

from bisect import bisect_left

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
        self._expand = expand.view(self._num_heads, -1, sizes.kv_rank)  # [heads, nope + value, rank]
        self._to_latent = self._expand[:, : sizes.nope_dim]
        self._from_latent = self._expand[:, sizes.nope_dim :].transpose(1, 2)  # [heads, rank, value]
        if ops.expanded_attention is None:  # then the whole is not needed, and one token's product is 8 times as fast
            self._to_latent, self._from_latent = self._to_latent.contiguous(), self._from_latent.contiguous()
            del self._expand
        self.output = weights.linear(
            (f"{prefix}o_proj",), (hidden,), heads * sizes.value_dim, spec.output_bias, split="columns", units=(heads,)
        )

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self._kv_down, self._q if self._q_down is None else self._q_down)

    def attend(self, hidden: torch.Tensor | Narrow, batch: ForwardBatch, pages: Pages) -> torch.Tensor:
        """[T, hidden] -> [T, heads * value]; the new latents are in their pages before any is read."""
        sizes = self._sizes
        latent, rotating = multiply(self._kv_down, hidden).split((sizes.kv_rank, sizes.rope_dim), dim=-1)
        latent = self._ops.rms_norm(latent.contiguous(), self._kv_norm, NORM_EPS)
        key = torch.cat((_pairs_apart(rotating), latent), dim=-1)[:, None]  # [T, 1, rope + rank]
        nope, rotating = self._queries(hidden).split((sizes.nope_dim, sizes.rope_dim), dim=-1)
        rotating = _pairs_apart(rotating)
        num_rows, end = self._absorbed(batch)
        absorbed, expanded = slice(0, end), slice(end, len(key))
        q_absorbed = q_expanded = None
        if end:
            to_latent = torch.bmm(nope[absorbed].transpose(0, 1), self._to_latent).transpose(0, 1)
            q_absorbed = self._rotate_and_store(rotating[absorbed], to_latent, key, batch, pages, absorbed)
        if end < len(key):
            q_expanded = self._rotate_and_store(rotating[expanded], nope[expanded], key, batch, pages, expanded)
        parts = []
        if q_absorbed is not None:
            first = batch if q_expanded is None else batch.first_rows(num_rows)
            attended = self._ops.latent_attention(q_absorbed, pages[0], first, self._scale, sizes.rope_dim)
            parts.append(torch.bmm(attended.transpose(0, 1), self._from_latent).transpose(0, 1).flatten(1))
        if q_expanded is not None:
            assert self._ops.expanded_attention is not None
            attended = self._ops.expanded_attention(
                q_expanded, pages[0], self._expand, batch, num_rows, self._scale, sizes.rope_dim
            )
            parts.append(attended.flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _absorbed(self, batch: ForwardBatch) -> tuple[int, int]:
        """How many rows, and tokens of theirs, stay with the latents: the first, as rows with more tokens come later."""
        if self._ops.expanded_attention is None or not batch.query_lens:
            return len(batch.context_lens), len(batch.positions)
        several = bisect_left(batch.query_lens, True, key=self._sizes.is_expanded)
        return batch.num_single_rows + several, batch.num_single_rows + sum(batch.query_lens[:several])

    def _rotate_and_store(
        self,
        rotating: torch.Tensor,
        rest: torch.Tensor,
        key: torch.Tensor,
        batch: ForwardBatch,
        pages: Pages,
        tokens: slice,
    ) -> torch.Tensor:
        """The tokens' queries [T, heads, rope + rest], rotated; their keys are in the pages."""
        q, positions, latents = torch.cat((rotating, rest), dim=-1), batch.positions[tokens], pages[0]
        return self._ops.rope_and_store(
            q, key[tokens], None, self._cos, self._sin, positions, latents, latents, batch.kv_slots[tokens]
        )

    def _queries(self, hidden: torch.Tensor | Narrow) -> torch.Tensor:
        """[T, hidden] -> [T, heads, nope + rope], not yet rotated."""
        if self._q_down is not None:
            hidden = self._ops.rms_norm(multiply(self._q_down, hidden), self._q_norm, NORM_EPS)
        return multiply(self._q, hidden).unflatten(1, (self._num_heads, -1))


def _pairs_apart(x: torch.Tensor) -> torch.Tensor:
    """The checkpoint rotates neighbours (2i, 2i + 1), our kernels (i, i + half): queries and keys move alike."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

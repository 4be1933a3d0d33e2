"""Multi-head latent attention (MLA, DeepSeek): the cache has one short vector per position for all heads.

A position's keys and values are linear functions of its latent. So queries are projected to the latent space before
attention, and its outputs to the value space afterwards ("absorbed" projections). The cache holds the rotated part and
the latent of each position once, and every head reads the same vector. Each rank caches all of it.

For long prompt chunks it is cheaper to expand the latents to each head's keys and values, which are less than a third
as wide. If the device has a kernel for this, `LatentSpec.is_expanded` decides by the length of the chunk alone.
"""

from bisect import bisect_left

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import LatentStore, Ops, Pages, Rotation, Rows
from penstock.executor.kernels.cpu_product import CpuProduct, is_repacked
from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.weight import plain_weight
from penstock.executor.models.attention import heads_of
from penstock.executor.models.rope import Tables
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Weights

NORM_EPS = 1e-6  # the eps of the two inner norms, independent of the config's eps for the outer norms


class LatentAttention:
    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        assert spec.latent is not None and not spec.has_sinks and spec.score_cap is None
        self._ops, self._sizes, self._scale = ops, spec.latent, spec.attention_scale
        self._tables = tables[spec.layers[index].rope]
        self._num_heads, _ = heads_of(spec.num_heads, spec.num_kv_heads, weights.group)
        sizes, hidden, heads = spec.latent, spec.hidden_size, spec.num_heads
        prefix = f"model.layers.{index}.self_attn."
        q_width, kv_rows = heads * (sizes.nope_dim + sizes.rope_dim), sizes.kv_rank + sizes.rope_dim
        latents = Matrix(f"{prefix}kv_a_proj_with_mqa", kv_rows, has_bias=spec.qkv_bias)
        # One product computes all projections of the layer's input: the latents, and the queries or their latents.
        self._q: Linear | None = None
        if sizes.q_rank is None:
            self._down = weights.linear(hidden, Matrix(f"{prefix}q_proj", q_width, "rows", heads), latents)
        else:
            q_latents = Matrix(f"{prefix}q_a_proj", sizes.q_rank, has_bias=spec.qkv_bias)
            self._down = weights.linear(hidden, q_latents, latents)
            self._q_norm = weights.norm(f"{prefix}q_a_layernorm.weight", sizes.q_rank)
            self._q = weights.linear(sizes.q_rank, Matrix(f"{prefix}q_b_proj", q_width, "rows", heads))
        self.takes_fp8 = self._down.takes_fp8
        self.takes_normed = False
        self._kv_norm = weights.norm(f"{prefix}kv_a_layernorm.weight", sizes.kv_rank)
        expand_shape = (heads * (sizes.nope_dim + sizes.value_dim), sizes.kv_rank)
        expand = weights.tensor(f"{prefix}kv_b_proj.weight", expand_shape, split="rows", units=heads)
        self._expand = expand.view(self._num_heads, -1, sizes.kv_rank)  # [heads, nope + value, rank]
        to_latent, from_latent = self._expand[:, : sizes.nope_dim], self._expand[:, sizes.nope_dim :].transpose(1, 2)
        if ops.expanded_attention is None:  # the whole is not needed; products of one token are 8 times as fast
            to_latent, from_latent = to_latent.contiguous(), from_latent.contiguous()
            del self._expand
        self._to_latent, self._from_latent = _ByHead(to_latent, ops), _ByHead(from_latent, ops)
        output = Matrix(f"{prefix}o_proj", hidden, "columns", heads, spec.output_bias)
        self.output = weights.linear(heads * sizes.value_dim, output)

    def attend(self, hidden: Rows, batch: ForwardBatch, pages: Pages) -> Tensor:
        """[T, hidden] -> [T, heads * value]; new latents are written to their pages before any are read."""
        sizes, heads = self._sizes, self._num_heads
        rope_dim, width = sizes.rope_dim, sizes.kv_rank + sizes.rope_dim
        made = self._down(hidden)
        q, down = made[:, :-width], made[:, -width:]
        if self._q is not None:
            q = self._q(self._ops.rms_norm(q, self._q_norm, NORM_EPS))
        q = q.unflatten(1, (heads, -1))  # [T, heads, nope + rope]
        num_rows, end = self._absorbed(batch)
        q_absorbed, q_expanded = q.new_empty(end, heads, width), q.new_empty(len(q) - end, *q.shape[1:])
        rotation = Rotation(*self._tables, batch.positions)
        store = LatentStore((self._kv_norm, NORM_EPS), rotation, pages[0], batch.kv_cells)
        if end:
            self._to_latent(q[:end, :, : sizes.nope_dim], q_absorbed[..., rope_dim:])
            self._ops.latent_rope_and_store(q_absorbed, q, down, store, first=0, is_whole=False)
        if end < len(q):
            self._ops.latent_rope_and_store(q_expanded, q, down, store, first=end, is_whole=True)
        out: Tensor = q.new_empty(len(q), heads, sizes.value_dim)
        if end:
            first = batch if end == len(q) else batch.first_rows(num_rows)
            attended = self._ops.latent_attention(q_absorbed, pages[0], first, self._scale, rope_dim)
            self._from_latent(attended, out[:end])
        if end < len(q):
            assert self._ops.expanded_attention is not None
            attended = self._ops.expanded_attention(
                q_expanded, pages[0], self._expand, batch, num_rows, self._scale, rope_dim
            )
            if not end:
                return attended.flatten(1)
            out[end:] = attended
        return out.flatten(1)

    def _absorbed(self, batch: ForwardBatch) -> tuple[int, int]:
        """Return the number of rows, and of their tokens, for absorbed attention; these come first, being shorter.
        In a graph these are all, because only the device knows the rows."""
        if self._ops.expanded_attention is None or not batch.query_lens or batch.single_contexts is not None:
            return len(batch.context_lens), len(batch.positions)
        several = bisect_left(batch.query_lens, True, key=self._sizes.is_expanded)
        return batch.num_single_rows + several, batch.num_single_rows + sum(batch.query_lens[:several])


class _ByHead:
    """Multiplies x [T, heads, in] by weight [heads, in, out] into out [T, heads, out]. On a CPU it uses C, because
    torch's summation order depends on the number of rows."""

    def __init__(self, weight: Tensor, ops: Ops) -> None:
        rows = weight.transpose(1, 2)
        is_in_c = ops.expanded_attention is None and is_repacked(rows[0])
        self._products = [CpuProduct([plain_weight(each)], each.dtype) for each in rows] if is_in_c else []
        self._weight = None if is_in_c else weight

    def __call__(self, x: Tensor, out: Tensor) -> None:
        x = x.transpose(0, 1)
        if self._weight is None:
            made = CpuProduct.each(self._products, [x.shape[1]] * len(x), x.flatten(0, 1))
            out.copy_(made.unflatten(0, x.shape[:2]).transpose(0, 1))
        else:
            torch.bmm(x, self._weight, out=out.transpose(0, 1))

"""Grouped-query attention over paged keys and values, with RoPE and optional norms of queries and keys."""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_NORMS, KeyStore, Ops, Pages, Rotation, Rows, ScoreExtras
from penstock.executor.models.rope import Tables
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Matrix, Weights
from penstock.executor.parallel import RankGroup, divide


class GroupedAttention:
    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        self._spec, self._ops = spec, ops
        self.tables = tables[spec.layers[index].rope]
        self._no_turns = self.tables[0][:, :0].contiguous()  # empty tables, for heads that must not be rotated
        prefix = f"model.layers.{index}.self_attn."
        own, self._has_own = spec.heads_of(index), spec.layers[index].heads is not None
        assert 2 * self.tables[0].shape[1] <= own.dim  # the kernels trust this
        self._dim, parts = own.dim, "q" if own.reads_only else "qkv" if own.has_values else "qk"
        num_heads, num_kv_heads = heads_of(spec.num_heads, own.num_kv, weights.group)
        self._head_split: tuple[int, ...] = (num_heads, num_kv_heads, num_kv_heads)[: len(parts)]
        self._width = num_kv_heads * self._dim  # numbers per position in the pages
        self.norms = NO_NORMS
        self._wide_norms = WideNorms(spec, prefix, weights, ops) if spec.is_qk_norm_wide else None
        if spec.qk_norm:
            q_norm, k_norm = (
                weights.norm(f"{prefix}{part}_norm.weight", self._dim, spec.norm_offset) if part in parts else None
                for part in "qk"
            )
            self.norms = q_norm, k_norm, spec.norm_eps
        self._value_norm = torch.ones(self._dim, device=self.tables[0].device)
        sinks = weights.tensor(f"{prefix}sinks", (spec.num_heads,), "rows").float() if spec.has_sinks else None
        self.extras = ScoreExtras(spec.score_cap, sinks, spec.layers[index].window)
        heads = (spec.num_heads, own.num_kv, own.num_kv)[: len(parts)]
        matrices = [
            Matrix(f"{prefix}{part}_proj", num * self._dim, "rows", num, spec.qkv_bias)
            for part, num in zip(parts, heads, strict=True)
        ]
        if spec.output_gate:  # stored as a query and its gate for each head; the layer has all queries, then all gates
            self._head_split = (num_heads, num_heads, num_kv_heads, num_kv_heads)
            matrices[0] = matrices[0]._replace(rows=2 * matrices[0].rows, pieces=(spec.head_dim, spec.head_dim))
        self.qkv = weights.linear(spec.hidden_size, *matrices)
        self.takes_fp8, self.takes_normed = self.qkv.takes_fp8, self.qkv.takes_normed
        output = Matrix(f"{prefix}o_proj", spec.hidden_size, "columns", has_bias=spec.output_bias)
        self.output = weights.linear(heads[0] * self._dim, output)

    @property
    def is_plain(self) -> bool:
        """True if the layer is just a product, `rope_and_store`, `paged_attention`, an optional gate, and a product."""
        has_more = self._spec.rotates_first or self._spec.query_growth
        return self._wide_norms is None and not self._has_own and not has_more

    def attend(self, hidden: Rows, batch: ForwardBatch, pages: Pages) -> Tensor:
        """[T, hidden] -> [T, heads * dim]; new keys and values are written to their pages before any are read."""
        projected = self.qkv(hidden)
        if batch.adapters is not None:
            assert isinstance(hidden, Tensor)
            batch.adapters.add(self.qkv.number, hidden, projected)
        heads = projected.unflatten(1, (-1, self._dim))
        if self._has_own:
            return self._attend_own(torch.split_with_sizes(heads, self._head_split, dim=1), batch, pages)
        q, *gates, k, v = torch.split_with_sizes(heads, self._head_split, dim=1)
        rotation = Rotation(*self.tables, batch.positions)
        if self._wide_norms is not None:
            q, k = self._wide_norms(q, k)
        if self._spec.rotates_first:  # the keys stored here are overwritten below
            both = heads[:, : q.shape[1] + k.shape[1]]
            both = self._ops.rope_and_store(both, k, None, KeyStore(rotation, pages, batch.kv_cells))
            q, k = torch.split_with_sizes(both, self._head_split[:2], dim=1)
            rotation = Rotation(self._no_turns, self._no_turns, batch.positions)
        q = self._ops.rope_and_store(q, k, v, KeyStore(rotation, pages, batch.kv_cells, self.norms))
        if self._spec.query_growth is not None:
            q *= _growth(batch, *self._spec.query_growth).to(q.dtype)
        out = self._ops.paged_attention(q, pages, batch, self._spec.attention_scale, self.extras).flatten(1)
        return self._ops.apply_gate(out, gates[0].flatten(1)) if gates else out

    def _attend_own(self, parts: Sequence[Tensor], batch: ForwardBatch, pages: Pages) -> Tensor:
        """Attend with layer-specific heads (`LayerHeads`); the pages may belong to an earlier layer, and be wider."""
        (q, *kv), dim, ops = parts, self._dim, self._ops
        seen = pages[0][..., : self._width], pages[1][..., : self._width]
        k, v, written = q[:, :0], None, (seen[0][..., :0], seen[1][..., :0])  # the default: nothing to store
        if kv:
            values = ops.rms_norm(kv[-1].reshape(-1, dim), self._value_norm, self._spec.norm_eps)
            k, v, written = kv[0], values.view(len(q), -1, dim), seen
        rotation = Rotation(*self.tables, batch.positions)
        q = ops.rope_and_store(q, k, v, KeyStore(rotation, written, batch.kv_cells, self.norms))
        return ops.paged_attention(q, seen, batch, self._spec.attention_scale, self.extras).flatten(1)


def _growth(batch: ForwardBatch, slope: float, length: int) -> Tensor:
    """Return the factors of the tokens' queries [T, 1, 1], computed once per batch for all layers."""
    found: Tensor | None = batch.memo.get(_growth)
    if found is None:
        lengths = torch.div(batch.positions, length, rounding_mode="floor")
        found = batch.memo[_growth] = (1 + slope * torch.log1p(lengths.float()))[:, None, None]
    return found


class WideNorms:
    """Norms of queries and keys over all heads of a token. The ranks sum the squares of their heads with all-reduce."""

    def __init__(self, spec: DecoderSpec, prefix: str, weights: Weights, ops: Ops) -> None:
        self._ops, self._eps, self._group = ops, spec.norm_eps, weights.group
        self._weights, self._shares = [], []
        for part, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads)):
            first, end = self._group.share(heads)
            whole = weights.norm(f"{prefix}{part}_norm.weight", heads * spec.head_dim)
            self._weights.append(whole[first * spec.head_dim : end * spec.head_dim].clone())
            # The factor from the rank's sum of squares to its share of the mean; replicated heads count repeatedly.
            self._shares.append(1 / (self._group.world * len(self._weights[-1])))

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize the rank's queries and keys, [T, heads, dim] each."""
        rows = [heads.flatten(1) for heads in (q, k)]
        if self._group.world == 1:
            normed = [self._ops.rms_norm(x, weight, self._eps) for x, weight in zip(rows, self._weights, strict=True)]
        else:
            parts = [x.float().square().sum(1) * share for x, share in zip(rows, self._shares, strict=True)]
            scales = (self._group.sum(torch.stack(parts)) + self._eps).rsqrt()[..., None]  # [2, T, 1]
            given = zip(rows, scales, self._weights, strict=True)
            normed = [(x.float() * scale * weight).to(x.dtype) for x, scale, weight in given]
        return normed[0].view(q.shape), normed[1].view(k.shape)


def heads_of(heads: int, kv_heads: int, group: RankGroup) -> tuple[int, int]:
    """Return the rank's number of query heads and of key-value heads. Ranks may share a key-value head."""
    own = divide(heads, group.world, "attention heads")
    if group.world % kv_heads:  # otherwise several ranks share a head
        divide(kv_heads, group.world, "key-value heads, or be a multiple of them")
    return own, max(1, kv_heads // group.world)

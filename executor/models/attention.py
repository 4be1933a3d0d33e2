"""Attention with grouped query heads: rotated, perhaps normalized per head, over the pages of keys and values."""

import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_NORMS, Ops, Pages, Rotation
from penstock.executor.kernels.linear import Narrow, multiply, take_narrow
from penstock.executor.models.rope import Tables
from penstock.executor.models.spec import DecoderSpec
from penstock.executor.models.weights import Weights
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorError


class GroupedAttention:
    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, ops: Ops, tables: Tables) -> None:
        self._spec, self._ops = spec, ops
        self.tables = tables[spec.layers[index].rope]
        self.window = spec.layers[index].window
        prefix = f"model.layers.{index}.self_attn."
        num_heads, num_kv_heads = heads_of(spec.num_heads, spec.num_kv_heads, weights.group)
        self._head_split: tuple[int, ...] = (num_heads, num_kv_heads, num_kv_heads)
        self.norms = NO_NORMS
        if spec.qk_norm:
            q_norm, k_norm = (
                weights.norm(f"{prefix}{part}_norm.weight", spec.head_dim, spec.norm_offset) for part in "qk"
            )
            self.norms = q_norm, k_norm, spec.norm_eps
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        names, rows = tuple(f"{prefix}{part}_proj" for part in "qkv"), tuple(each * spec.head_dim for each in heads)
        pieces = None
        if spec.output_gate:  # stored head by head, a query and its gate; here all gates are behind all queries
            self._head_split = (num_heads, num_heads, num_kv_heads, num_kv_heads)
            rows, pieces = (2 * rows[0], *rows[1:]), ((spec.head_dim, spec.head_dim), None, None)
        self.qkv = weights.linear(
            names, rows, spec.hidden_size, spec.qkv_bias, split="rows", units=heads, pieces=pieces
        )
        self.output = weights.linear(
            (f"{prefix}o_proj",), (spec.hidden_size,), heads[0] * spec.head_dim, spec.output_bias, split="columns"
        )

    @property
    def takes_narrow(self) -> bool:
        return take_narrow(self.qkv)

    def attend(self, hidden: Tensor | Narrow, batch: ForwardBatch, pages: Pages) -> Tensor:
        """[T, hidden] -> [T, heads * dim]; the new keys and values are in their pages before any is read."""
        heads = multiply(self.qkv, hidden).unflatten(1, (-1, self._spec.head_dim))
        q, *gates, k, v = torch.split_with_sizes(heads, self._head_split, dim=1)
        rotation = Rotation(*self.tables, batch.positions)
        q = self._ops.rope_and_store(q, k, v, rotation, pages, batch.kv_slots, self.norms)
        out = self._ops.paged_attention(q, *pages, batch, self._spec.attention_scale, self.window)
        for gate in gates:
            out *= gate.sigmoid()
        return out.flatten(1)


def heads_of(heads: int, kv_heads: int, group: RankGroup) -> tuple[int, int]:
    """The rank's query heads and key-value heads; a key-value head may be on several ranks, each with its queries."""
    world = group.world
    if heads % world:
        raise ExecutorError(f"tensor_parallel_size: {world} given; it must divide the model's {heads} attention heads")
    if kv_heads % world and world % kv_heads:
        raise ExecutorError(
            f"tensor_parallel_size: {world} given; it must divide the model's {kv_heads} key-value heads, "
            "or be a multiple of them"
        )
    return heads // world, max(1, kv_heads // world)

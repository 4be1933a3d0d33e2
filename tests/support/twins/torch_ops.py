"""`Ops` in plain torch, as this module is one: the reference that the kernels in C and in Triton are tested against.

Arithmetic is float32 inside each operation and rounded once at its end, whatever the tensors' dtype.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import (
    NO_EXTRAS,
    Activation,
    BlockOps,
    Fp8Rows,
    KeyStore,
    LatentStore,
    NormedRows,
    Pages,
    Rows,
    ScoreExtras,
)
from penstock.executor.kernels.cpu_ops import CpuOps, latent_parts
from penstock.executor.kernels.weight import Weight
from tests.support.twins import eight_bits, grouped
from tests.support.twins import recurrent as recurrent_twin

wide_linear = None

fused_experts: Callable[..., Tensor] | None = None
blocks: BlockOps | None = None
has_packed = False
max_normed_rows = max_plain_rows = 0
convolve, delta_rule = recurrent_twin.convolve, recurrent_twin.delta_rule
choose_experts = CpuOps.choose_experts  # plain torch


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_and_store(q: Tensor, k: Tensor, v: Tensor | None, store: KeyStore) -> Tensor:
    rotation, (k_pages, v_pages), kv_cells, (q_weight, k_weight, eps) = store
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    if k_weight is not None:
        k = rms_norm(k, k_weight, eps)
    cos = rotation.cos.index_select(0, rotation.positions).unsqueeze(1)  # [T, 1, rot / 2]
    sin = rotation.sin.index_select(0, rotation.positions).unsqueeze(1)
    page = k_pages.shape[1]
    blocks, offsets = kv_cells // page, kv_cells % page
    k_pages[blocks, offsets] = _convert(_rotate(k, cos, sin), k_pages.dtype).flatten(1)
    if v is not None:
        v_pages[blocks, offsets] = _convert(v, v_pages.dtype).flatten(1)
    return _rotate(q, cos, sin)


def latent_rope_and_store(
    goal: Tensor, q: Tensor, down: Tensor, store: LatentStore, first: int, is_whole: bool
) -> None:
    tokens, rope_dim = slice(first, first + len(goal)), 2 * store.rotation.cos.shape[1]
    rotation, kv_cells = store.rotation._replace(positions=store.rotation.positions[tokens]), store.kv_cells[tokens]
    rotating, key = latent_parts(rms_norm, q[tokens], down[tokens], store)
    goal[..., :rope_dim] = rope_and_store(rotating, key, None, KeyStore(rotation, (store.pages,) * 2, kv_cells))
    if is_whole:
        goal[..., rope_dim:] = q[tokens, :, :-rope_dim]


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Eight-bit pages take what they can hold, never infinity or NaN for it."""
    if dtype == x.dtype:
        return x
    limit = torch.finfo(dtype).max
    return x.float().clamp(-limit, limit).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + rot / 2) of the first rot dimensions; the rest passes through."""
    half = cos.shape[-1]
    if half == 0:
        return x
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    first, second = first.float(), second.float()
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((rotated[0].to(x.dtype), rotated[1].to(x.dtype), rest), dim=-1)


def paged_attention(
    q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
) -> Tensor:
    if batch.single_contexts is not None:
        batch = _without_padding(batch)
        real = int(batch.query_starts[-1])
        padding = q.new_zeros((len(q) - real, *q.shape[1:]))
        return torch.cat((paged_attention(q[:real], pages, batch, scale, extras), padding))
    singles = batch.num_single_rows  # of tokens and of rows alike: each of these rows has one token
    attend = partial(_attend_rows, pages=pages, batch=batch, scale=scale, extras=extras)
    outputs = [attend(q[:singles, None], slice(singles), batch.max_single_context)] if singles else [q[:0]]
    parts = zip(q[singles:].split(batch.query_lens), batch.query_contexts, strict=True)
    for row, (part, context) in enumerate(parts, singles):
        outputs.append(attend(part[None], slice(row, row + 1), context))
    return torch.cat(outputs)


def latent_attention(q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
    return paged_attention(q, (latents, latents), batch, scale)[..., rope_dim:]


def expanded_attention(
    q: Tensor, latents: Tensor, expand: Tensor, batch: ForwardBatch, first_row: int, scale: float, rope_dim: int
) -> Tensor:
    nope_dim = q.shape[2] - rope_dim
    out, passed = [q.new_empty(0, q.shape[1], expand.shape[1] - nope_dim)], first_row - batch.num_single_rows
    rows = zip(batch.query_contexts[passed:], batch.block_tables[first_row:], strict=True)
    parts = q.split(batch.query_lens[passed:])
    for queries, (context, table) in zip(parts, rows, strict=True):
        pages = latents.index_select(0, table[: -(-context // latents.shape[1])])
        rotated, latent = pages.flatten(0, 1)[:context].to(q.dtype).split((rope_dim, expand.shape[2]), dim=1)
        mask = torch.ones(len(queries), context, dtype=torch.bool, device=q.device).tril(context - len(queries))
        made = torch.matmul(latent, expand.transpose(1, 2))  # [heads, context, nope + value]
        keys = torch.cat((rotated.expand(len(made), -1, -1), made[..., :nope_dim]), dim=-1)
        wide = queries.transpose(0, 1)[None], keys[None], made[None, ..., nope_dim:]
        out.append(F.scaled_dot_product_attention(*wide, attn_mask=mask, scale=scale)[0].transpose(0, 1))
    return torch.cat(out)


def _without_padding(batch: ForwardBatch) -> ForwardBatch:
    """Return a padded batch without its padding, as the host could have made it."""
    counts, contexts = batch.query_starts.diff().tolist(), batch.context_lens.tolist()
    rows = sum(context > 0 for context in contexts)
    singles = sum(count == 1 for count in counts[:rows])
    return replace(
        batch,
        query_starts=batch.query_starts[: rows + 1],
        context_lens=batch.context_lens[:rows],
        block_tables=batch.block_tables[:rows],
        num_single_rows=singles,
        query_lens=tuple(counts[singles:rows]),
        query_contexts=tuple(contexts[singles:rows]),
        max_single_context=max(contexts[:singles], default=0),
        single_contexts=None,
    )


def _attend_rows(
    q: Tensor, rows: slice, longest: int, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras
) -> Tensor:
    """Rows [R, count, Hq, D] of as many tokens each, padded to the longest context; [R * count, Hq, D]."""
    count, page, window = q.shape[1], pages[0].shape[1], extras.window
    blocks = batch.block_tables[rows, : -(-longest // page)]
    seen = torch.arange(blocks.shape[1] * page, device=q.device)
    position = batch.context_lens[rows, None, None] - count + torch.arange(count, device=q.device)[:, None]
    mask = seen <= position  # [R, count, positions]
    if window is not None:
        mask &= seen > position - window
    # Cells that no query sees may hold anything, even NaN, which no mask and no weight of zero would hide.
    unseen = ~mask.any(1)[:, None, :, None]
    keys, values = (_gather(part, blocks, q).masked_fill_(unseen, 0) for part in pages)
    group = q.shape[2] // keys.shape[1]  # its queries are folded with the positions: no key is read twice
    folded = q.unflatten(2, (-1, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [R, Hkv, group * count, D]
    attended = _attend(folded, keys, values, mask.repeat(1, group, 1)[:, None], scale, extras)
    out: Tensor = attended.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4).reshape(-1, *q.shape[2:])
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, extras: ScoreExtras) -> Tensor:
    """q [rows, Hkv, group * count, D], a group's first head first."""
    if extras.cap is None and extras.sinks is None:
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ keys.to(wide).transpose(-1, -2) * scale
    if extras.cap is not None:
        scores = extras.cap * torch.tanh(scores / extras.cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if extras.sinks is not None:
        num_heads, num_keys = keys.shape[1], scores.shape[-1]
        count = q.shape[2] * num_heads // len(extras.sinks)
        sinks = extras.sinks.to(wide).view(num_heads, -1).repeat_interleave(count, 1)[..., None]
        weights = torch.cat((scores, sinks.expand(len(q), -1, -1, -1)), dim=-1).softmax(-1)[..., :num_keys]
    else:
        weights = scores.softmax(-1)
    return (weights @ values.to(wide)).to(q.dtype)


def _gather(pages: Tensor, tables: Tensor, q: Tensor) -> Tensor:
    """Pages of the rows' tables in the queries' dtype, [rows, Hkv, positions, D]; the copy is the caller's."""
    rows, num_blocks = tables.shape
    gathered = pages.index_select(0, tables.flatten()).to(q.dtype)
    return gathered.view(rows, num_blocks * pages.shape[1], -1, q.shape[-1]).transpose(1, 2)


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if activation == "clamped_swish":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(gate_up.dtype)
    opened = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return (opened * up).to(gate_up.dtype)


def apply_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()


def linear(x: Rows, weight: Weight, bias: Tensor | None = None) -> Tensor:
    if isinstance(x, Fp8Rows):
        assert weight.scales is not None
        product = eight_bits.block_linear(x.rows, weight.codes, weight.scales, x.dtype)
        return product if bias is None else product + bias
    rows = _normed(x) if isinstance(x, NormedRows) else x
    return F.linear(rows, weight.codes if weight.is_numbers else grouped.widen(weight).to(rows.dtype), bias)


def gated_linear(x: Tensor | NormedRows, weight: Weight, activation: Activation) -> Tensor:
    return gate(linear(x, weight), activation)


def _normed(x: NormedRows) -> Tensor:
    y, total = add_rms_norm(x.update, x.residual, x.weight, x.eps)
    x.total.copy_(total)
    return y

"""Launches the attention kernels for attention over paged keys and values, and over paged latents (MLA).

A graph captured for a bucket of rows serves every batch that fits: grids depend only on the number of rows and on the
longest context that the host expects. Padding rows of a graph have a context of 0 and get zeros.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_EXTRAS, Pages, ScoreExtras
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda import attention_kernels as kernels
from penstock.executor.kernels.cuda.attention_kernels import AttentionShape
from penstock.executor.kernels.cuda.pages import layout_of
from penstock.executor.kernels.cuda.softmax import LOG2_E
from penstock.executor.kernels.cuda.tile_order import count_tiles, once
from penstock.executor.kernels.cuda.tiles import Tile, decode_tile, fixed_attention_tile, latent_tile, prefill_tile

# Positions that are summed together with `is_fixed`. Two accumulators of a head of more than 128 numbers would not fit
# into registers, so its positions are not split.
FIXED_SPLIT, UNSPLIT = 512, 1 << 30
MIN_PROGRAMS = 3  # per row and key-value head, if its context may be long
MAX_EVEN_SPLITS = 32  # parts of a row that merge quickly; a context of many times MAX_SPLIT has more


class Attention(NamedTuple):
    """The operands and constants that decode and prefill share."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    sinks: Tensor  # any tensor if the shape has none
    out: Tensor
    scaling: tuple[Any, ...]  # scale, cap and window of the kernels
    shape: AttentionShape
    split: int  # positions that are summed together; 0: whatever fills the GPU


def constants_of(shape: AttentionShape, pages: Tensor, split: int, tile: Tile) -> dict[str, Any]:
    """Return the launch options and constants of both kernels."""
    return {"SHAPE": shape, "PAGES": layout_of(pages), "SPLIT": split, "AHEAD": tile.num_stages > 2, **tile.constants()}


def paged_attention(
    q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS, is_fixed: bool = False
) -> Tensor:
    """Compute the attention of `Ops.paged_attention`. is_fixed: sum in an order that does not depend on the batch."""
    (k_pages, v_pages), (cap, sinks, window), (num_heads, dim) = pages, extras, q.shape[1:]
    kv_heads = k_pages.shape[2] // dim
    assert k_pages.stride() == v_pages.stride() and k_pages.dtype is v_pages.dtype
    assert k_pages.shape[2] % dim == 0 and num_heads % kv_heads == 0
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype is torch.float32)
    group, itemsize, singles = num_heads // kv_heads, q.element_size(), batch.singles
    # Padding tokens go through the rest of the model, so their attention output must be finite.
    out = torch.empty_like(q) if batch.single_contexts is None else torch.zeros_like(q)
    has = window is not None, sinks is not None, cap is not None
    shape = AttentionShape("paged", kv_heads, group, dim, 0, dim, *has)
    scales = (scale, 0.0) if cap is None else (2 * scale / cap, cap)
    scaling = *(each * LOG2_E for each in scales), window or 0
    split = 0 if not is_fixed else FIXED_SPLIT if dim <= 128 else UNSPLIT
    attention = Attention(q, k_pages, v_pages, q if sinks is None else sinks, out, scaling, shape, split)
    if singles.num_single_rows:
        tile = decode_tile(group, dim, itemsize, k_pages.element_size())
        decode(singles, attention, fixed_attention_tile(dim, group, itemsize, is_single=True) if is_fixed else tile)
    if batch.query_lens:
        tile = prefill_tile(dim, itemsize, k_pages.element_size())
        prefill(batch, attention, fixed_attention_tile(dim, group, itemsize, is_single=False) if is_fixed else tile)
    return out


def latent_attention(q: Tensor, latents: Tensor, batch: ForwardBatch, scale: float, rope_dim: int) -> Tensor:
    """Compute the attention of `Ops.latent_attention`. Queries are absorbed, i.e. already projected to the latent space
    (executor/models/latent.py)."""
    tokens, num_heads, width = q.shape
    rank = width - rope_dim
    assert latents.shape[2] == width
    new, singles = torch.empty if batch.single_contexts is None else torch.zeros, batch.singles
    out = new((tokens, num_heads, rank), dtype=q.dtype, device=q.device)
    shape = AttentionShape("latent", 1, num_heads, rank, rope_dim, rank)
    attention = Attention(q, latents, latents, q, out, (scale * LOG2_E, 0.0, 0), shape, 0)
    if singles.num_single_rows:
        decode(singles, attention, latent_tile(num_heads, True, q.element_size(), latents.element_size()))
    if batch.query_lens:
        prefill(batch, attention, latent_tile(num_heads, False, q.element_size(), latents.element_size()))
    return out


def decode(batch: ForwardBatch, attention: Attention, tile: Tile) -> None:
    q, k_pages, v_pages, sinks, out, scaling, shape, split = attention
    rows, longest = batch.num_single_rows, batch.max_single_context
    tiles = shape.kv_heads * triton.cdiv(shape.group, tile.rows)
    even_splits, programs = num_splits(rows, tiles, longest, split)
    parts, partial_sums, arrivals = max(1, triton.cdiv(longest, split)) if split else programs, out, out
    if parts > 1:
        width = min(shape.group, tile.rows) * (shape.value_dim + 2)
        partial_sums = torch.empty(rows * tiles * parts * width, dtype=torch.float32, device=q.device)
        key = "arrivals", rows * tiles
        arrivals = once(batch, key, lambda: torch.zeros(rows * tiles, dtype=torch.int32, device=q.device))
    kernels._decode[(tiles, programs, rows)](
        *(q, k_pages, v_pages, sinks, batch.block_tables, batch.context_lens, out),
        *(partial_sums, arrivals, batch.block_tables.stride(0), *scaling, even_splits, parts),
        **constants_of(shape, k_pages, split, tile),
    )


def num_splits(rows: int, tiles: int, longest: int, split: int) -> tuple[int, int]:
    """Return the number of parts per row that occupies the GPU if all contexts are equally long, and the number of
    programs per row. The latter is larger, so that a long context among short ones is read by more programs; those of
    short rows end at once, but starting them takes time. `longest`: the longest context that a row may have."""
    processors = current_card().num_processors
    even = min(MAX_EVEN_SPLITS, max(1, processors // (rows * tiles)))
    programs = max(MIN_PROGRAMS, 4 * processors // (rows * tiles))
    programs = min(programs, 3 * processors // tiles, triton.cdiv(longest, kernels.MAX_SPLIT.value))
    limit = max(1, triton.cdiv(longest, split or kernels.MIN_SPLIT.value))
    return min(even, limit), min(max(even, programs), limit)


def prefill(batch: ForwardBatch, attention: Attention, tile: Tile) -> None:
    q, k_pages, v_pages, sinks, out, scaling, shape, split = attention
    tiles = count_tiles(batch, batch.query_lens, shape.group, tile)
    starts, contexts = batch.query_starts, batch.context_lens
    counts, num_rows = (starts, len(batch.query_lens)) if batch.row_counts is None else (batch.row_counts, -1)
    kernels._prefill[(shape.kv_heads, tiles)](
        *(q, k_pages, v_pages, k_pages, sinks, batch.block_tables, starts, contexts),
        *(starts, counts, out, batch.block_tables.stride(0), *scaling),
        *(0, batch.num_single_rows, num_rows, 0),
        **constants_of(shape, k_pages, split, tile),
    )

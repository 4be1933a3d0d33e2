"""Multi-head latent attention for prompt chunks, with keys and values expanded from the latents for each head.

The work is cut into pieces of bounded size: all heads of several rows, or some heads of one long context. A piece's
latents are gathered from the pages, multiplied by the heads' up-projection, and attended to. The rotated part, shared
by all heads, is read from the pages. A chunk's own latents also come from the pages, so eight-bit pages round them too.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda import attention_kernels as kernels
from penstock.executor.kernels.cuda.attention_kernels import AttentionShape
from penstock.executor.kernels.cuda.attention_ops import constants_of
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import block_of, layout_of, page_numbers, page_offsets
from penstock.executor.kernels.cuda.softmax import LOG2_E
from penstock.executor.kernels.cuda.tile_order import count_tiles, find_row
from penstock.executor.kernels.cuda.tiles import expanded_tile

PIECE_ELEMENTS = 1 << 27  # maximum elements of expanded keys and values: 256 MiB in bfloat16
GATHERED_ROWS = tl.constexpr(16)  # positions per program of the gathering kernel


class ExpandedPiece(NamedTuple):
    """Heads first_head … end_head - 1 of rows first … end - 1, which have `positions` in total."""

    first: int
    end: int
    first_head: int
    end_head: int
    positions: int


def pieces(contexts: Sequence[int], num_heads: int, width: int, limit: int) -> Iterator[ExpandedPiece]:
    """Divide all heads of all rows into pieces of at most `limit` elements, or single heads of a row that is larger."""
    first = 0
    while first < len(contexts):
        end, positions = first + 1, contexts[first]
        while end < len(contexts) and (positions + contexts[end]) * num_heads * width <= limit:
            positions += contexts[end]
            end += 1
        heads = max(1, min(num_heads, limit // (positions * width)))
        for head in range(0, num_heads, heads):
            yield ExpandedPiece(first, end, head, min(head + heads, num_heads), positions)
        first = end


def expanded_attention(
    q: Tensor, latents: Tensor, expand: Tensor, batch: ForwardBatch, first_row: int, scale: float, rope_dim: int
) -> Tensor:
    """Compute causal attention of the rows from `first_row` on: q [T, H, rope + nope] -> [T, H, value].
    expand: [H, nope + value, rank]."""
    num_heads, width, rank = expand.shape
    value_dim = width - (q.shape[2] - rope_dim)
    out = torch.empty((len(q), num_heads, value_dim), dtype=q.dtype, device=q.device)
    contexts = batch.query_contexts[first_row - batch.num_single_rows :]
    row, gathered = None, q
    for piece in pieces(contexts, num_heads, width, PIECE_ELEMENTS):
        first, end = first_row + piece.first, first_row + piece.end
        if first != row:  # otherwise the piece has other heads of the same latents
            row, rows = first, end - first
            starts = F.pad(batch.context_lens[first:end].cumsum(0, dtype=torch.int32), (1, 0))
            gathered = torch.empty((piece.positions, rank), dtype=q.dtype, device=q.device)
            # Every row may end with a partially filled tile.
            _gather_latents[(piece.positions // GATHERED_ROWS.value + rows,)](
                *(latents, batch.block_tables, starts, gathered),
                *(batch.block_tables.stride(0), first, rows),
                ROPE=rope_dim,
                RANK=rank,
                PAGES=layout_of(latents),
                num_warps=4,
            )
        heads = slice(piece.first_head, piece.end_head)
        expanded = F.linear(gathered, expand[heads].flatten(0, 1))  # [positions, heads * (nope + value)]
        _attend(q, latents, expanded, starts, batch, first_row, piece, scale, out)
    return out


def _attend(q, latents, expanded, key_starts, batch, first_row, piece, scale, out) -> None:
    _, num_heads, q_dim = q.shape
    value_dim, heads = out.shape[2], piece.end_head - piece.first_head
    nope_dim = expanded.shape[1] // heads - value_dim
    rope_dim = q_dim - nope_dim
    assert q.is_contiguous() and expanded.is_contiguous()
    tile = expanded_tile(q.element_size())
    passed = first_row - batch.num_single_rows
    tiles = count_tiles(batch, batch.query_lens[passed + piece.first : passed + piece.end], 1, tile)
    shape = AttentionShape("expanded", num_heads, 1, nope_dim, rope_dim, value_dim)
    kernels._prefill[(heads, tiles)](
        *(q, expanded, expanded, latents, q, batch.block_tables, batch.query_starts, batch.context_lens, key_starts),
        *(batch.query_starts, out, batch.block_tables.stride(0), scale * LOG2_E, 0.0, 0),
        *(first_row, first_row + piece.first, piece.end - piece.first, piece.first_head),
        **constants_of(shape, latents, 0, tile),
    )


@kernel
def _gather_latents(
    latents_ptr,
    tables_ptr,
    starts_ptr,
    gathered_ptr,
    table_stride,
    first_row,
    num_rows,
    ROPE: tl.constexpr,
    RANK: tl.constexpr,
    PAGES: tl.constexpr,
):
    """Gather the latents of the rows from `first_row` on; `starts` [rows + 1] holds their offsets."""
    row, tile = find_row(tl.program_id(0), starts_ptr, 0, num_rows, 1, GATHERED_ROWS)
    start = tl.load(starts_ptr + row)
    position = tile * GATHERED_ROWS + tl.arange(0, GATHERED_ROWS)
    inside = position < tl.load(starts_ptr + row + 1) - start
    table_ptr = tables_ptr + (first_row + row).to(tl.int64) * table_stride
    cells = page_offsets(page_numbers(table_ptr, position, inside, PAGES), position, PAGES)
    rank = tl.arange(0, block_of(RANK))
    mask = inside[:, None] & (rank < RANK)[None, :]
    latent = tl.load(latents_ptr + ROPE + cells[:, None] + rank[None, :], mask=mask, other=0.0)
    goal = (start + position).to(tl.int64) * RANK
    tl.store(gathered_ptr + goal[:, None] + rank[None, :], latent.to(gathered_ptr.dtype.element_ty), mask=mask)

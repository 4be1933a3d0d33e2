"""Attention over paged keys and values, with query heads of a group in one tile: a kernel each for decode and prefill.

Single-token rows are bound by reading: a fixed number of programs share all positions evenly (split-KV), so one long
context uses as much of the GPU as many short ones. The last program to finish a part of a row merges its parts. Rows of
several tokens are bound by computing: tiles of 128 (token, head) pairs against 64 positions are large enough for
warpgroup products, and the longest start first. Pages hold the model's dtype or float8_e4m3fn.

A graph captured for a bucket of rows serves every batch that fits (work.py). Padding rows of a graph have a context of
0 and get zeros.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_EXTRAS, Pages, ScoreExtras
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.pages import block_of, layout_of, load_inside, page_rows
from penstock.executor.kernels.cuda.softmax import LOG2_E, add_sinks, empty_softmax, soft_cap, softmax_step
from penstock.executor.kernels.cuda.tiles import decode_tile, prefill_tile
from penstock.executor.kernels.cuda.work import order_tiles, share_singles, span, store_item, take_share, take_tile


class HeadSizes(NamedTuple):
    kv_heads: int
    group: int  # query heads per key-value head
    dim: int
    has_window: bool
    has_sinks: bool
    has_cap: bool


def paged_attention(
    q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
) -> Tensor:
    sizes, read, out, numbers, constants = prepare(q, pages, batch, scale, extras)
    singles = batch.singles
    if singles.num_single_rows:
        tile = decode_tile(singles.num_single_rows, sizes.group, sizes.dim, q.element_size(), pages[0].element_size())
        shares = share_singles(singles, sizes.kv_heads, extras.window, tile, sizes.group, sizes.dim)
        _decode[(len(shares.plan),)](
            *read, singles.context_lens, out, *shares, *numbers, **constants, **tile.constants()
        )
    if batch.query_lens:
        tile = prefill_tile(sizes.dim, q.element_size())
        order = order_tiles(batch, batch.num_single_rows, len(batch.context_lens), sizes.group, tile)
        _prefill[(sizes.kv_heads, len(order))](
            *read, batch.query_starts, batch.context_lens, order, out, *numbers, **constants, **tile.constants()
        )
    return out


def prepare(
    q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras
) -> tuple[HeadSizes, tuple[Tensor, ...], Tensor, tuple[float, ...], dict[str, Any]]:
    """Return the arguments that all launches share: sizes, tensors to read, output, numbers, constants."""
    (k_pages, v_pages), (cap, sinks, window), (num_heads, dim) = pages, extras, q.shape[1:]
    kv_heads = k_pages.shape[2] // dim
    # Padding tokens go through the rest of the model, so their attention output must be finite.
    make = torch.empty if batch.single_contexts is None else torch.zeros
    out = make(q.shape, dtype=q.dtype, device=q.device)
    assert q.is_contiguous() and len(q) == batch.num_single_rows + sum(batch.query_lens)
    assert k_pages.stride() == v_pages.stride() and k_pages.dtype is v_pages.dtype
    assert k_pages.shape[2] % dim == 0 and num_heads % kv_heads == 0
    has = window is not None, sinks is not None, cap is not None
    sizes = HeadSizes(kv_heads, num_heads // kv_heads, dim, *has)
    assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype is torch.float32)
    read = q, k_pages, v_pages, q if sinks is None else sinks, batch.block_tables
    scales = (scale, 0.0) if cap is None else (2 * scale / cap, cap)
    numbers = batch.block_tables.stride(0), *(each * LOG2_E for each in scales), window or 0
    return sizes, read, out, numbers, {"SIZES": sizes, "PAGES": layout_of(k_pages)}


@kernel
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    tables_ptr,
    contexts_ptr,
    out_ptr,
    plan_ptr,
    parts_ptr,
    sums_ptr,
    arrivals_ptr,
    table_stride,
    scale,
    cap,
    window,
    SIZES: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process this program's share of blocks, which may span several (row, key-value head) items."""
    wait_and_allow_next()
    shares = plan_ptr, parts_ptr, sums_ptr, arrivals_ptr
    row, kv_head, block, left, context = take_share(plan_ptr)
    taken = 0
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, block_of(SIZES.dim))
    is_dim = dim < SIZES.dim
    mask = (member < SIZES.group)[:, None] & is_dim[None, :]
    inner = member[:, None] * SIZES.dim + dim[None, :]  # index of an element within the group's vectors
    places = inner, mask, member, member < SIZES.group
    while left > 0:
        first, blocks = span(context, window, COLUMNS, SIZES.has_window)
        count = tl.minimum(left, blocks - block)
        begin = (row.to(tl.int64) * SIZES.kv_heads + kv_head) * SIZES.group
        q = tl.load(q_ptr + begin * SIZES.dim + inner, mask=mask, other=0.0)
        best, total, acc = empty_softmax(ROWS, block_of(SIZES.dim))
        is_first = (member < SIZES.group) & (block == 0)
        best, total = add_sinks(best, total, sinks_ptr, kv_head * SIZES.group + member, is_first, SIZES.has_sinks)
        low = first + block * COLUMNS
        high = tl.minimum(context, low + count * COLUMNS)
        table_ptr = tables_ptr + row.to(tl.int64) * table_stride
        for start in range(low, high, COLUMNS):
            position = start + tl.arange(0, COLUMNS)
            inside = position < high
            cells = page_rows(table_ptr, position, inside, PAGES) + kv_head * SIZES.dim
            # Positions past the context may hold anything, even NaN, so they are not read.
            k = tl.load(k_ptr + cells[None, :] + dim[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
            v = tl.load(v_ptr + cells[:, None] + dim[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            scores = soft_cap(scores, cap, SIZES.has_cap)
            scores = tl.where(inside[None, :], scores, -float("inf"))
            best, total, acc = softmax_step(scores, v.to(q.dtype), best, total, acc)
        softmax_state, item = (best, total, acc), (begin, taken, block, count, blocks)
        store_item(shares, out_ptr, softmax_state, places, item, SIZES.group, SIZES.group, SIZES.dim)
        left -= count
        taken += count
        block = 0
        kv_head += 1
        if kv_head == SIZES.kv_heads:
            kv_head = 0
            row += 1
            context = tl.load(contexts_ptr + row, mask=left > 0, other=0)


@kernel
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    order_ptr,
    out_ptr,
    table_stride,
    scale,
    cap,
    window,
    SIZES: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Attend for one key-value head and a tile of ROWS (token, head of the group) pairs of one row."""
    kv_head = tl.program_id(0)
    if tl.load(order_ptr + 2 * tl.program_id(1)) < 0:  # a graph launches the maximum number of tiles
        return
    row, tile, begin, count = take_tile(order_ptr, tl.program_id(1), starts_ptr)
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // SIZES.group
    before = tl.load(contexts_ptr + row) - count  # positions computed in earlier steps
    position = before + token
    is_pair = token < count
    head = (begin + token).to(tl.int64) * (SIZES.kv_heads * SIZES.group) + kv_head * SIZES.group + pair % SIZES.group
    dim = tl.arange(0, block_of(SIZES.dim))
    is_dim = dim < SIZES.dim
    mask = is_pair[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + head[:, None] * SIZES.dim + dim[None, :], mask=mask, other=0.0)
    best, total, acc = empty_softmax(ROWS, block_of(SIZES.dim))
    own = kv_head * SIZES.group + pair % SIZES.group
    best, total = add_sinks(best, total, sinks_ptr, own, is_pair, SIZES.has_sinks)
    k_ptr += kv_head * SIZES.dim
    v_ptr += kv_head * SIZES.dim
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first = before + tile * ROWS // SIZES.group  # position of the tile's first token
    last = before + tl.minimum(count - 1, (tile * ROWS + ROWS - 1) // SIZES.group)
    low = 0
    whole = (first + 1) // COLUMNS * COLUMNS  # every token of the tile sees all positions before this one: no mask
    if SIZES.has_window:
        low = tl.maximum(0, first + 1 - window) // COLUMNS * COLUMNS
        whole = low
    are_whole: tl.constexpr = SIZES.dim == block_of(SIZES.dim)
    for is_edge in tl.static_range(2):
        for start in range(whole if is_edge else low, last + 1 if is_edge else whole, COLUMNS):
            seen = start + tl.arange(0, COLUMNS)
            inside = seen <= last if is_edge else seen >= 0
            if SIZES.has_window:  # blocks before the window may belong to another request by now
                inside &= seen > first - window
            cells = page_rows(table_ptr, seen, inside, PAGES)
            is_k = inside[None, :] & is_dim[:, None] if is_edge else is_dim[:, None]
            is_v = inside[:, None] & is_dim[None, :] if is_edge else is_dim[None, :]
            k = load_inside(k_ptr + cells[None, :] + dim[:, None], is_k, are_whole and not is_edge)
            v = load_inside(v_ptr + cells[:, None] + dim[None, :], is_v, are_whole and not is_edge)
            scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            scores = soft_cap(scores, cap, SIZES.has_cap)
            if is_edge:
                visible = seen[None, :] <= position[:, None]
                if SIZES.has_window:
                    visible &= seen[None, :] > position[:, None] - window
                scores = tl.where(visible, scores, -float("inf"))
            best, total, acc = softmax_step(scores, v.to(q.dtype), best, total, acc)
    out = acc / total[:, None]
    tl.store(out_ptr + head[:, None] * SIZES.dim + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)

"""Attention over paged keys and values, grouped heads sharing a tile: one kernel for rows of one token, one for more.

Rows of one token read much and compute little, so their context is cut into parts that fill the GPU, and a third
kernel puts the parts together. Rows of several tokens compute: tiles of 128 (token, head) pairs against 64 positions,
large enough for warpgroup products. Pages may hold the model's dtype or float8_e4m3fn.

No grid depends on a context's length beyond an upper bound, and programs with nothing to do leave at once: a graph
captured for a bucket of rows serves every batch that fits. A row with a context of 0 (a graph's padding) gets zeros.
"""

import torch
import triton
import triton.language as tl

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.tiles import choose_splits, decode_tile, power_of_2, prefill_tile

LOG2_E = 1.4426950408889634
LOWEST = tl.constexpr(-1e38)  # where maxima begin: finite, so that a row of masked scores gives weights of 0, not NaN


def paged_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of every token over its row's pages; with a window, over the last `window` positions."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert q.is_contiguous() and k_pages.stride() == v_pages.stride()
    singles = batch.num_single_rows
    if singles:
        decode(
            q[:singles],
            k_pages,
            v_pages,
            batch.context_lens,
            batch.block_tables,
            batch.max_single_context,
            scale,
            window,
            out,
        )
    if batch.query_lens:
        _prefill_rows(q, k_pages, v_pages, batch, scale, window, out)
    return out


def decode(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    max_context: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One token per row: q and out [R, Hq, D]. `max_context` decides only how the work is cut."""
    rows, num_heads, dim = q.shape
    kv_heads = k_pages.shape[2] // dim
    group = num_heads // kv_heads
    seen = max_context if window is None else min(max_context, window)
    splits = choose_splits(rows * kv_heads, seen)
    tile = decode_tile(group, dim, q.element_size(), splits > 1)
    parts, sums = out, out
    if splits > 1:
        parts, sums = make_parts(q, splits, dim)
    _decode[(rows, kv_heads, splits)](
        q,
        k_pages,
        v_pages,
        block_tables,
        context_lens,
        out,
        parts,
        sums,
        k_pages.stride(0),
        k_pages.stride(1),
        block_tables.stride(0),
        scale * LOG2_E,
        window or 0,
        num_heads,
        GROUP=group,
        DIM=dim,
        BLOCK_DIM=max(16, power_of_2(dim)),
        PAGE=k_pages.shape[1],
        SPLITS=splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HAS_WINDOW=window is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launching(),
    )
    if splits > 1:
        combine(parts, sums, context_lens, out, window, tile.columns)


def make_parts(q: torch.Tensor, splits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what each split of a row's context comes to: its mean of the values, and log2 of its weight."""
    rows, num_heads, _ = q.shape
    parts = torch.empty((rows, num_heads, splits, dim), dtype=torch.float32, device=q.device)
    return parts, torch.empty((rows, num_heads, splits), dtype=torch.float32, device=q.device)


def combine(
    parts: torch.Tensor,
    sums: torch.Tensor,
    context_lens: torch.Tensor,
    out: torch.Tensor,
    window: int | None,
    columns: int,
) -> None:
    rows, num_heads, splits, dim = parts.shape
    _combine[(rows, num_heads)](
        parts,
        sums,
        context_lens,
        out,
        num_heads,
        window or 0,
        SPLITS=splits,
        DIM=dim,
        BLOCK_DIM=power_of_2(dim),
        COLUMNS=columns,
        HAS_WINDOW=window is not None,
        num_warps=2 if dim <= 256 else 4,
        **launching(),
    )


def _prefill_rows(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    tokens, num_heads, dim = q.shape
    kv_heads = k_pages.shape[2] // dim
    group = num_heads // kv_heads
    singles, rows = batch.num_single_rows, len(batch.query_lens)
    tile = prefill_tile(dim, q.element_size())
    # Every row may leave one tile unfilled.
    num_tiles = (tokens - singles) * group // tile.rows + rows
    _prefill[(num_tiles, kv_heads)](
        q,
        k_pages,
        v_pages,
        batch.block_tables,
        batch.query_starts,
        batch.context_lens,
        out,
        k_pages.stride(0),
        k_pages.stride(1),
        batch.block_tables.stride(0),
        scale * LOG2_E,
        window or 0,
        num_heads,
        singles,
        rows,
        GROUP=group,
        DIM=dim,
        BLOCK_DIM=max(16, power_of_2(dim)),
        PAGE=k_pages.shape[1],
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        HAS_WINDOW=window is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit
def split_range(context, split, window, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Positions low … high - 1 of a row's split; none if low >= high."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(0, context - window)
    length = tl.cdiv(tl.cdiv(context - first, COLUMNS), SPLITS) * COLUMNS
    low = first + split * length
    return low, tl.minimum(context, low + length)


@triton.jit
def find_row(tile, starts_ptr, first, num_rows, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr):
    """The row that a tile belongs to, among `num_rows` from `first` on. The first tile of the r-th of them is (their
    tokens before) * PER_TOKEN // ROWS + r: the last row whose first tile is not beyond this one has it."""
    low = 0
    high = num_rows
    starts_ptr += first
    begin = tl.load(starts_ptr)
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts_ptr + middle) - begin
        if before * PER_TOKEN // ROWS + middle <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(starts_ptr + low) - begin
    return first + low, tile - (before * PER_TOKEN // ROWS + low)


@triton.jit
def page_rows(table_ptr, position, inside, page_stride, slot_stride, PAGE: tl.constexpr):
    """Where each position's vector begins in the pages, in elements: 64 bits, a cache may be longer than 2 ** 31."""
    page = tl.load(table_ptr + position // PAGE, mask=inside, other=0).to(tl.int64)
    return page * page_stride + position % PAGE * slot_stride


@triton.jit
def weigh(scores, values, best, total, acc):
    """One step of the online softmax: scores [M, N] in log2, values [N, D]."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    fade = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return new_best, total, acc


# The tables' stride changes with the batch; a kernel compiled for each kind of it would stop a server in its work.
@triton.jit(do_not_specialize=["window", "table_stride"])
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    contexts_ptr,
    out_ptr,
    parts_ptr,
    sums_ptr,
    page_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    num_heads,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    low, high = split_range(tl.load(contexts_ptr + row), split, window, SPLITS, COLUMNS, HAS_WINDOW)
    if SPLITS > 1:
        if low >= high:
            return
    member = tl.arange(0, ROWS)
    head = row * num_heads + kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_DIM)
    is_head = member < GROUP
    is_dim = dim < DIM
    q = tl.load(q_ptr + head[:, None] * DIM + dim[None, :], mask=is_head[:, None] & is_dim[None, :], other=0.0)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    for start in range(low, high, COLUMNS):
        position = start + tl.arange(0, COLUMNS)
        inside = position < high
        cells = page_rows(tables_ptr + row * table_stride, position, inside, page_stride, slot_stride, PAGE)
        # What lies past the context may be anything, even NaN: it is not read.
        k = tl.load(k_ptr + cells[None, :] + dim[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(v_ptr + cells[:, None] + dim[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        best, total, acc = weigh(scores, v.to(q.dtype), best, total, acc)
    mask = is_head[:, None] & is_dim[None, :]
    if SPLITS > 1:
        part = head * SPLITS + split
        tl.store(parts_ptr + part[:, None] * DIM + dim[None, :], acc / total[:, None], mask=mask)
        tl.store(sums_ptr + part, best + tl.log2(total), mask=is_head)
    else:
        out = acc / tl.maximum(total, 1.0)[:, None]  # 1 and more if anything was seen, or else 0
        tl.store(out_ptr + head[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["window"])
def _combine(
    parts_ptr,
    sums_ptr,
    contexts_ptr,
    out_ptr,
    num_heads,
    window,
    SPLITS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program per row and head: the parts' means, each by its weight. Parts that nobody wrote are not read."""
    take_turn(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    head = row * num_heads + tl.program_id(1)
    context = tl.load(contexts_ptr + row)
    split = tl.arange(0, SPLITS)
    low, high = split_range(context, split, window, SPLITS, COLUMNS, HAS_WINDOW)
    written = low < high
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < DIM
    sums = tl.load(sums_ptr + head * SPLITS + split, mask=written, other=LOWEST)
    weights = tl.where(written, tl.exp2(sums - tl.max(sums, 0)), 0.0)
    cells = (head * SPLITS + split)[:, None] * DIM + dim[None, :]
    parts = tl.load(parts_ptr + cells, mask=written[:, None] & is_dim[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.maximum(tl.sum(weights, 0), 1.0)  # 1 and more if anything is there
    tl.store(out_ptr + head * DIM + dim, out.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit(do_not_specialize=["window", "singles", "num_rows", "table_stride"])
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    out_ptr,
    page_stride,
    slot_stride,
    table_stride,
    scale,
    window,
    num_heads,
    singles,
    num_rows,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """One program per key-value head and tile of ROWS (token, head of the group) pairs of one row."""
    row, tile = find_row(tl.program_id(0), starts_ptr, singles, num_rows, GROUP, ROWS)
    kv_head = tl.program_id(1)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    if tile * ROWS >= count * GROUP:
        return
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // GROUP
    before = tl.load(contexts_ptr + row) - count  # of the row's positions, computed in earlier steps
    position = before + token
    is_pair = token < count
    head = (begin + token).to(tl.int64) * num_heads + kv_head * GROUP + pair % GROUP
    dim = tl.arange(0, BLOCK_DIM)
    is_dim = dim < DIM
    mask = is_pair[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + head[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    best = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DIM], tl.float32)
    k_ptr += kv_head * DIM
    v_ptr += kv_head * DIM
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first = before + tile * ROWS // GROUP  # the tile's first token's position, then its last one's
    last = before + tl.minimum(count - 1, (tile * ROWS + ROWS - 1) // GROUP)
    low = 0
    whole = (first + 1) // COLUMNS * COLUMNS  # every token of the tile sees all positions before this: no mask
    if HAS_WINDOW:
        low = tl.maximum(0, first + 1 - window) // COLUMNS * COLUMNS
        whole = low
    for start in range(low, whole, COLUMNS):
        seen = start + tl.arange(0, COLUMNS)
        cells = page_rows(table_ptr, seen, seen >= 0, page_stride, slot_stride, PAGE)
        if BLOCK_DIM == DIM:
            k = tl.load(k_ptr + cells[None, :] + dim[:, None])
            v = tl.load(v_ptr + cells[:, None] + dim[None, :])
        else:
            k = tl.load(k_ptr + cells[None, :] + dim[:, None], mask=is_dim[:, None], other=0.0)
            v = tl.load(v_ptr + cells[:, None] + dim[None, :], mask=is_dim[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        best, total, acc = weigh(scores, v.to(q.dtype), best, total, acc)
    for start in range(whole, last + 1, COLUMNS):
        seen = start + tl.arange(0, COLUMNS)
        inside = seen <= last
        cells = page_rows(table_ptr, seen, inside, page_stride, slot_stride, PAGE)
        k = tl.load(k_ptr + cells[None, :] + dim[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(v_ptr + cells[:, None] + dim[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
        visible = seen[None, :] <= position[:, None]
        if HAS_WINDOW:
            visible &= seen[None, :] > position[:, None] - window
        scores = tl.where(visible, scores, -float("inf"))
        best, total, acc = weigh(scores, v.to(q.dtype), best, total, acc)
    out = acc / total[:, None]
    tl.store(out_ptr + head[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)

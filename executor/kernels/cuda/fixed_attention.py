"""Attention with a fixed order of every sum, independent of batch and chunk, for `batch_invariant`.

A token's positions are divided into splits of `SPLIT`, counted from position 0. Each split is summed from zero, block
by block, and the splits are merged in order (split-KV). A prefill program does that for its tile alone. For
single-token rows every split is a unit of work, and the last program to finish a split of a row merges them. Masked
positions softmax_step 0, which changes no sum, so the other tokens in a tile do not matter.

Head dimensions above 128 use a single split: two accumulators would not fit into registers.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_EXTRAS, Pages, ScoreExtras
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.paged_attention import prepare
from penstock.executor.kernels.cuda.pages import block_of, page_rows
from penstock.executor.kernels.cuda.softmax import LOWEST, add_sinks, empty_softmax, soft_cap, softmax_step
from penstock.executor.kernels.cuda.tiles import fixed_attention_tile
from penstock.executor.kernels.cuda.work import is_last, order_tiles, share_singles, span, take_share, take_tile

SPLIT, LONGEST = 512, 1 << 30
PARTS_AT_ONCE = tl.constexpr(4)  # splits whose loads are in flight together


def paged_attention(
    q: Tensor, pages: Pages, batch: ForwardBatch, scale: float, extras: ScoreExtras = NO_EXTRAS
) -> Tensor:
    sizes, read, out, numbers, constants = prepare(q, pages, batch, scale, extras)
    kv_heads, split = sizes.kv_heads, SPLIT if sizes.dim <= 128 else LONGEST
    constants["SPLIT"] = split
    if rows := batch.num_single_rows:
        tile = fixed_attention_tile(sizes.dim, sizes.group, q.element_size(), is_single=True)
        shares = share_singles(batch, kv_heads, extras.window, tile._replace(columns=split), 0, 0, is_aligned=True)
        most = triton.cdiv(batch.block_tables.shape[1] * pages[0].shape[1], split)
        parts = torch.empty(
            (rows * kv_heads * most, sizes.group * (sizes.dim + 2)), dtype=torch.float32, device=q.device
        )
        key = "arrivals", rows * kv_heads
        if key not in batch.memo:
            batch.memo[key] = torch.zeros(rows * kv_heads, dtype=torch.int32, device=q.device)
        _fixed_decode[(len(shares.plan),)](
            *(*read, batch.context_lens, out, shares.plan, parts, batch.memo[key]),
            *(*numbers, most),
            **constants,
            **tile.constants(),
        )
    if batch.query_lens:
        tile = fixed_attention_tile(sizes.dim, sizes.group, q.element_size(), is_single=False)
        order = order_tiles(batch, batch.num_single_rows, len(batch.context_lens), sizes.group, tile)
        _fixed_prefill[(kv_heads, len(order))](
            *read, batch.query_starts, batch.context_lens, order, out, *numbers, **constants, **tile.constants()
        )
    return out


@kernel
def _fixed_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    tables_ptr,
    contexts_ptr,
    out_ptr,
    plan_ptr,
    parts_ptr,
    arrivals_ptr,
    table_stride,
    scale,
    cap,
    window,
    most,
    SIZES: tl.constexpr,
    PAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process a share of splits, which may span several (row, key-value head) pairs."""
    wait_and_allow_next()
    row, kv_head, split, left, context = take_share(plan_ptr)
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, block_of(SIZES.dim))
    is_member = member < SIZES.group
    mask = is_member[:, None] & (dim < SIZES.dim)[None, :]
    while left > 0:
        first, splits = span(context, window, SPLIT, SIZES.has_window, True)
        item = row.to(tl.int64) * SIZES.kv_heads + kv_head
        places = item * (SIZES.group * SIZES.dim) + member[:, None] * SIZES.dim + dim[None, :]
        q = tl.load(q_ptr + places, mask=mask, other=0.0)
        low = first + split * SPLIT
        high = tl.minimum(context, low + SPLIT)
        if SIZES.has_window:
            low = tl.maximum(low, (context - window) // COLUMNS * COLUMNS)
        positions = tl.full([ROWS], -1, tl.int32) + context
        pages = k_ptr + kv_head * SIZES.dim, v_ptr + kv_head * SIZES.dim, tables_ptr + row.to(tl.int64) * table_stride
        part = _see_split(q, positions, pages, low, high, (scale, cap, window), SIZES, PAGES, COLUMNS)
        head = kv_head * SIZES.group + member
        if splits == 1:
            merged = _merge(_nothing(sinks_ptr, head, is_member, ROWS, SIZES), part)
            _store(out_ptr + places, merged, mask)
        else:
            size: tl.constexpr = SIZES.group * (SIZES.dim + 2)
            best, total, acc = part
            goal_ptr = parts_ptr + (item * most + split) * size
            tl.store(goal_ptr + member[:, None] * SIZES.dim + dim[None, :], acc, mask=mask)
            tl.store(goal_ptr + SIZES.group * SIZES.dim + member, best, mask=is_member)
            tl.store(goal_ptr + SIZES.group * (SIZES.dim + 1) + member, total, mask=is_member)
            if is_last(arrivals_ptr + item, splits):
                _join_splits(sinks_ptr, parts_ptr, out_ptr, item, kv_head, splits, most, SIZES)
        left -= 1
        split += 1
        if split == splits:
            split = 0
            kv_head += 1
            if kv_head == SIZES.kv_heads:
                kv_head = 0
                row += 1
                context = tl.load(contexts_ptr + row, mask=left > 0, other=0)


@kernel
def _fixed_prefill(
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
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Attend for one key-value head and a tile of ROWS (token, head of the group) pairs of one row."""
    kv_head = tl.program_id(0)
    row, tile, begin, count = take_tile(order_ptr, tl.program_id(1), starts_ptr)
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // SIZES.group
    before = tl.load(contexts_ptr + row) - count
    is_pair = token < count
    own = kv_head * SIZES.group + pair % SIZES.group
    head = (begin + token).to(tl.int64) * (SIZES.kv_heads * SIZES.group) + own
    dim = tl.arange(0, block_of(SIZES.dim))
    mask = is_pair[:, None] & (dim < SIZES.dim)[None, :]
    places = head[:, None] * SIZES.dim + dim[None, :]
    q = tl.load(q_ptr + places, mask=mask, other=0.0)
    pages = k_ptr + kv_head * SIZES.dim, v_ptr + kv_head * SIZES.dim, tables_ptr + row.to(tl.int64) * table_stride
    low = 0
    if SIZES.has_window:
        low = tl.maximum(0, before + tile * ROWS // SIZES.group + 1 - window) // COLUMNS * COLUMNS
    end = before + tl.minimum(count, (tile * ROWS + ROWS - 1) // SIZES.group + 1)
    merged = _nothing(sinks_ptr, own, is_pair, ROWS, SIZES)
    for split in range(low // SPLIT, tl.cdiv(end, SPLIT)):
        first = tl.maximum(low, split * SPLIT)
        last = tl.minimum(end - split * SPLIT, SPLIT) + split * SPLIT
        numbers = scale, cap, window
        part = _see_split(q, before + token, pages, first, last, numbers, SIZES, PAGES, COLUMNS)
        merged = _merge(merged, part)
    _store(out_ptr + places, merged, mask)


@triton.jit
def _see_split(q, position, pages, low, high, numbers, SIZES: tl.constexpr, PAGES: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the softmax state of q's rows over positions low … high - 1. Every block is masked: without a mask the
    compiler would fuse the scaling and the subtraction of the maximum, and round once instead of twice."""
    k_ptr, v_ptr, table_ptr = pages
    scale, cap, window = numbers
    dim = tl.arange(0, block_of(SIZES.dim))
    is_dim = dim < SIZES.dim
    best, total, acc = empty_softmax(q.shape[0], block_of(SIZES.dim))
    for start in range(low, high, COLUMNS):
        seen = start + tl.arange(0, COLUMNS)
        inside = seen < high
        if SIZES.has_window:  # blocks before the window may belong to another request by now
            inside &= seen > tl.min(position, 0) - window
        cells = page_rows(table_ptr, seen, inside, PAGES)
        k = tl.load(k_ptr + cells[None, :] + dim[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(v_ptr + cells[:, None] + dim[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        scores = soft_cap(tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale, cap, SIZES.has_cap)
        visible = inside[None, :] & (seen[None, :] <= position[:, None])
        if SIZES.has_window:
            visible &= seen[None, :] > position[:, None] - window
        best, total, acc = softmax_step(tl.where(visible, scores, -float("inf")), v.to(q.dtype), best, total, acc)
    return best, total, acc


@triton.jit
def _nothing(sinks_ptr, head, is_head, ROWS: tl.constexpr, SIZES: tl.constexpr):
    best, total, acc = empty_softmax(ROWS, block_of(SIZES.dim))
    best, total = add_sinks(best, total, sinks_ptr, head, is_head, SIZES.has_sinks)
    return best, total, acc


@triton.jit
def _merge(merged, part):
    """Merge the next split into the previous ones. Explicit fma fixes which product is rounded; the compiler might
    choose differently in two kernels."""
    best, total, acc = merged
    part_best, part_total, part_acc = part
    new_best = tl.maximum(best, part_best)
    fade = tl.exp2(best - new_best)
    gain = tl.exp2(part_best - new_best)
    total = tl.fma(total, fade, part_total * gain)
    return new_best, total, tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), part_acc * gain[:, None])


@triton.jit
def _join_splits(sinks_ptr, parts_ptr, out_ptr, item, kv_head, splits, most, SIZES: tl.constexpr):
    """Merge all splits of an item, 16 heads at a time."""
    dim = tl.arange(0, block_of(SIZES.dim))
    for begin in range(0, SIZES.group, 16):
        head = begin + tl.arange(0, 16)
        is_head = head < SIZES.group
        mask = is_head[:, None] & (dim < SIZES.dim)[None, :]
        inner = head[:, None] * SIZES.dim + dim[None, :]
        merged = _nothing(sinks_ptr, kv_head * SIZES.group + head, is_head, 16, SIZES)
        for start in range(0, splits, PARTS_AT_ONCE):
            for index in tl.static_range(PARTS_AT_ONCE):
                part_ptr = parts_ptr + (item * most + start + index) * (SIZES.group * (SIZES.dim + 2))
                sums_ptr = part_ptr + SIZES.group * SIZES.dim + head
                is_part = start + index < splits
                # Bypass the L1 cache, which does not see the stores of other multiprocessors.
                acc = tl.load(part_ptr + inner, mask=mask & is_part, other=0.0, cache_modifier=".cg")
                best = tl.load(sums_ptr, mask=is_head & is_part, other=LOWEST, cache_modifier=".cg")
                total = tl.load(sums_ptr + SIZES.group, mask=is_head & is_part, other=0.0, cache_modifier=".cg")
                merged = _merge(merged, (best, total, acc))
        _store(out_ptr + item * (SIZES.group * SIZES.dim) + inner, merged, mask)


@triton.jit
def _store(out_ptrs, merged, mask):
    _, total, acc = merged
    out = acc / tl.maximum(total, 1.0)[:, None]  # the total is at least 1 if anything was seen, else 0
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask)

"""The two attention kernels: decode for rows of a single token, prefill for rows of several.

Keys and values are addressed by constants. In `paged` attention every key-value head has its own keys and values in the
pages. In `latent` attention (MLA) all heads share one latent per position: it is the value and, together with a rotated
part, the key. In `expanded` attention keys and values lie in one row per position, and the rotated part in the pages.

Decode is bound by reading, so the positions of a row are divided among several programs (split-KV); the last program to
finish a part of a row merges all parts. Prefill is bound by computing and works in tiles of (token, head) pairs.

With a constant `SPLIT`, both kernels sum each `SPLIT` positions from zero, counted from position 0, and merge these
parts in order. A token's sums then depend neither on the batch nor on how its prompt was divided into chunks.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.pages import block_of, load_inside, page_numbers, page_offsets
from penstock.executor.kernels.cuda.softmax import (
    LOWEST,
    empty_softmax,
    merge_softmax,
    sink_softmax,
    soft_cap,
    softmax_step,
)
from penstock.executor.kernels.cuda.tile_order import take_tile

MIN_SPLIT = tl.constexpr(128)  # positions: below this, merging parts costs more than sharing gains
MAX_SPLIT = tl.constexpr(2048)  # positions: a longer context is read by more programs than other rows get
PARTS_AT_ONCE = tl.constexpr(8)  # parts whose loads are in flight together


class AttentionShape(NamedTuple):
    kind: str  # "paged", "latent" or "expanded"
    kv_heads: int
    group: int  # query heads per key-value head
    dim: int  # of the part of a key that is not shared by all heads; of latents: their rank
    rope: int  # of the rotated part of a key that all heads share; 0: keys have no such part
    value_dim: int
    has_window: bool = False
    has_sinks: bool = False
    has_cap: bool = False


@kernel
def _decode(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    tables_ptr,
    contexts_ptr,
    out_ptr,
    parts_ptr,
    arrivals_ptr,
    table_stride,
    scale,
    cap,
    window,
    even_splits,
    max_parts,
    SHAPE: tl.constexpr,
    PAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Attend for one row and a tile of ROWS query heads of one key-value head over every num_programs(1)-th part of the
    row's positions; without SPLIT this is at most one part. Rows without a context get zeros."""
    wait_and_allow_next()
    row = tl.program_id(2).to(tl.int64)
    context = tl.load(contexts_ptr + row)
    low, begin, length, parts = _divide(context, window, even_splits, SHAPE, SPLIT, COLUMNS)
    TILES: tl.constexpr = (SHAPE.group + ROWS - 1) // ROWS  # per key-value head
    WIDTH: tl.constexpr = SHAPE.group if SHAPE.group < ROWS else ROWS
    kv_head = tl.program_id(0) // TILES
    first = kv_head * SHAPE.group + tl.program_id(0) % TILES * ROWS  # the tile's first query head
    heads = tl.minimum(ROWS, (kv_head + 1) * SHAPE.group - first)
    member = tl.arange(0, ROWS)
    is_member = member < heads
    q_ptr += (row * (SHAPE.kv_heads * SHAPE.group) + first) * (SHAPE.rope + SHAPE.dim)
    out_ptr += (row * (SHAPE.kv_heads * SHAPE.group) + first) * SHAPE.value_dim
    queries = _load_queries(q_ptr, member, is_member, SHAPE)
    keys = _keys_of_head(k_ptr, v_ptr, k_ptr, kv_head, SHAPE), tables_ptr + row * table_stride
    value = tl.arange(0, block_of(SHAPE.value_dim))
    mask = is_member[:, None] & (value < SHAPE.value_dim)[None, :]
    inner = member[:, None] * SHAPE.value_dim + value[None, :]
    item = row * tl.num_programs(0) + tl.program_id(0)
    parts_ptr += item * max_parts * (WIDTH * (SHAPE.value_dim + 2))
    for part in range(tl.program_id(1), parts, tl.num_programs(1)):
        span = tl.maximum(low, begin + part * length), tl.minimum(context, begin + (part + 1) * length), context - 1
        nothing = empty_softmax(ROWS, block_of(SHAPE.value_dim))
        state = _attend(
            nothing, queries, context, keys, span, (scale, cap, window), SHAPE, PAGES, COLUMNS, AHEAD, "decode"
        )
        if parts == 1:
            _store(out_ptr + inner, _with_sinks(state, sinks_ptr, first + member, is_member, SHAPE), mask)
        else:
            best, total, acc = state
            part_ptr = parts_ptr + part * (WIDTH * (SHAPE.value_dim + 2))
            tl.store(part_ptr + inner, acc, mask=mask)
            tl.store(part_ptr + WIDTH * SHAPE.value_dim + member, best, mask=is_member)
            tl.store(part_ptr + WIDTH * (SHAPE.value_dim + 1) + member, total, mask=is_member)
            if _is_last(arrivals_ptr + item, parts):
                _join(sinks_ptr + first, parts_ptr, out_ptr, parts, heads, SHAPE, WIDTH)


@kernel
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    rope_ptr,
    sinks_ptr,
    tables_ptr,
    starts_ptr,
    contexts_ptr,
    key_starts_ptr,
    counts_ptr,
    out_ptr,
    table_stride,
    scale,
    cap,
    window,
    first_row,
    key_row,
    num_rows,
    first_head,
    SHAPE: tl.constexpr,
    PAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Attend for one key-value head and a tile of ROWS (token, head of the group) pairs of one row.

    q and out begin with the tokens of row `first_row`. Tiles are those of `num_rows` rows from `key_row` on, with whose
    positions expanded keys begin; these have the heads from `first_head` on. If `num_rows` is negative, the device knows it
    and the first row.
    """
    wait_and_allow_next()
    if num_rows < 0:
        key_row = tl.load(counts_ptr + 1)
        num_rows = tl.load(counts_ptr + 2)
    tiles = tl.num_programs(1)  # the maximum number
    row, tile, begin, count = take_tile(tl.program_id(1), tiles, starts_ptr, key_row, num_rows, SHAPE.group, ROWS)
    if count == 0:
        return
    kv_head = first_head + tl.program_id(0)
    pair = tile * ROWS + tl.arange(0, ROWS)
    token = pair // SHAPE.group
    is_pair = token < count
    own = kv_head * SHAPE.group + pair % SHAPE.group
    begin -= tl.load(starts_ptr + first_row)
    head = (begin + token).to(tl.int64) * (SHAPE.kv_heads * SHAPE.group) + own
    queries = _load_queries(q_ptr, head, is_pair, SHAPE)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    if SHAPE.kind == "expanded":
        width = tl.num_programs(0).to(tl.int64) * (SHAPE.dim + SHAPE.value_dim)
        k_ptr += tl.load(key_starts_ptr + row - key_row) * width + tl.program_id(0) * (SHAPE.dim + SHAPE.value_dim)
        keys = (k_ptr, k_ptr + SHAPE.dim, rope_ptr, width), table_ptr
    else:
        keys = _keys_of_head(k_ptr, v_ptr, rope_ptr, kv_head, SHAPE), table_ptr
    before = tl.load(contexts_ptr + row) - count  # positions computed in earlier steps
    position = before + token
    first = before + tile * ROWS // SHAPE.group  # position of the tile's first token
    end = before + tl.minimum(count, (tile * ROWS + ROWS - 1) // SHAPE.group + 1)
    low = 0
    if SHAPE.has_window:
        low = tl.maximum(0, first + 1 - window) // COLUMNS * COLUMNS
    state = empty_softmax(ROWS, block_of(SHAPE.value_dim))
    scaling = scale, cap, window
    if SPLIT:
        state = _with_sinks(state, sinks_ptr, own, is_pair, SHAPE)
        for part in range(low // SPLIT, tl.cdiv(end, SPLIT)):
            span = tl.maximum(low, part * SPLIT), tl.minimum(end - part * SPLIT, SPLIT) + part * SPLIT, first
            part_sums = empty_softmax(ROWS, block_of(SHAPE.value_dim))
            part_sums = _attend(part_sums, queries, position, keys, span, scaling, SHAPE, PAGES, COLUMNS, AHEAD, "edge")
            state = merge_softmax(state, part_sums)
    else:
        whole = low
        # Every token of the tile sees all positions before `whole`: no mask. Latents leave no registers for two loops.
        if not SHAPE.has_window and SHAPE.kind != "latent":
            whole = (first + 1) // COLUMNS * COLUMNS
            span = low, whole, first
            state = _attend(state, queries, position, keys, span, scaling, SHAPE, PAGES, COLUMNS, AHEAD, "whole")
        state = _attend(
            state, queries, position, keys, (whole, end, first), scaling, SHAPE, PAGES, COLUMNS, AHEAD, "edge"
        )
        state = _with_sinks(state, sinks_ptr, own, is_pair, SHAPE)
    value = tl.arange(0, block_of(SHAPE.value_dim))
    mask = is_pair[:, None] & (value < SHAPE.value_dim)[None, :]
    _store(out_ptr + head[:, None] * SHAPE.value_dim + value[None, :], state, mask)


@triton.jit
def _divide(context, window, even_splits, SHAPE: tl.constexpr, SPLIT: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the first position that a single-token row sees, where its parts begin, their length and their number.

    `even_splits` parts for each row would occupy the GPU if all contexts were equally long. The grid has more programs
    per row, for contexts that are much longer than the others.
    """
    low = 0
    if SHAPE.has_window:
        low = tl.maximum(0, context - window) // COLUMNS * COLUMNS
    if SPLIT:
        begin = low // SPLIT * SPLIT
        length = tl.full([], SPLIT, tl.int32)
    else:
        begin = low
        length = tl.minimum(tl.cdiv(context - low, even_splits), MAX_SPLIT)
        length = tl.maximum(tl.maximum(length, MIN_SPLIT), tl.cdiv(context - low, tl.num_programs(1)))
        length = tl.cdiv(length, COLUMNS) * COLUMNS
    return low, begin, length, tl.maximum(1, tl.cdiv(context - begin, length))


@triton.jit
def _keys_of_head(k_ptr, v_ptr, rope_ptr, kv_head, SHAPE: tl.constexpr):
    """Return pointers to a head's keys, values and rotated parts within a position of the pages, and a stride that only
    expanded keys use."""
    if SHAPE.kind == "latent":
        pointers = k_ptr + SHAPE.rope, k_ptr + SHAPE.rope, k_ptr, 0
    else:
        pointers = k_ptr + kv_head * SHAPE.dim, v_ptr + kv_head * SHAPE.value_dim, rope_ptr, 0
    return pointers


@triton.jit
def _load_queries(q_ptr, head, mask, SHAPE: tl.constexpr):
    """Load query vectors [rotated part | main part] and return the main and the rotated part. Without a rotated part,
    the second result is not used."""
    dim = tl.arange(0, block_of(SHAPE.dim))
    q_ptr += head[:, None] * (SHAPE.rope + SHAPE.dim)
    is_dim = mask[:, None] & (dim < SHAPE.dim)[None, :]
    q = tl.load(q_ptr + SHAPE.rope + dim[None, :], mask=is_dim, other=0.0)
    q_rope = q
    if SHAPE.rope:
        rope = tl.arange(0, block_of(SHAPE.rope))
        is_rope = mask[:, None] & (rope < SHAPE.rope)[None, :]
        q_rope = tl.load(q_ptr + rope[None, :], mask=is_rope, other=0.0)
    return q, q_rope


@triton.jit
def _attend(
    state,
    queries,
    position,
    keys,
    span,
    scaling,
    SHAPE: tl.constexpr,
    PAGES: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    MASK: tl.constexpr,
):
    """Update the softmax state of queries with the positions from `start` to `end` - 1.

    AHEAD: load the numbers of the next block's pages one iteration ahead, so that the copies of its keys and values,
    which tiles of three stages start early, need not wait for them; other tiles save the registers.

    MASK: "whole": all rows see all positions; "edge": a row sees the positions up to its own; "decode": all rows see
    the positions up to `end`. With SPLIT all blocks need a mask: without one the compiler would fuse the scaling and
    the subtraction of the maximum, and round once instead of twice.
    """
    start, end, first = span  # `first`: the smallest position of a query
    scale, cap, window = scaling
    q, q_rope = queries
    pointers, table_ptr = keys
    best, total, acc = state
    column = tl.arange(0, COLUMNS)
    if AHEAD:
        page = page_numbers(table_ptr, start + column, start + column < end, PAGES)
    for block in range(start, end, COLUMNS):
        seen = block + column
        inside = seen < end
        if SHAPE.has_window:  # blocks before the window may belong to another request by now
            inside &= seen > first - window
        if not AHEAD:
            page = page_numbers(table_ptr, seen, inside, PAGES)
        cells = page_offsets(page, seen, PAGES)
        if AHEAD:
            page = page_numbers(table_ptr, seen + COLUMNS, seen + COLUMNS < end, PAGES)
        k, rotated, v = _load_keys(pointers, cells, seen, inside, SHAPE, MASK == "whole")
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        if SHAPE.rope:
            scores = tl.dot(q_rope, rotated.to(q.dtype), scores, input_precision="ieee")
        scores = soft_cap(scores * scale, cap, SHAPE.has_cap)
        if MASK != "whole":
            visible = inside[None, :]
            if MASK == "edge":
                visible &= seen[None, :] <= position[:, None]
                if SHAPE.has_window:
                    visible &= seen[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, -float("inf"))
        best, total, acc = softmax_step(scores, v.to(q.dtype), best, total, acc)
    return best, total, acc


@triton.jit
def _load_keys(pointers, cells, seen, inside, SHAPE: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Load the keys [dim, columns], their rotated parts [rope, columns] and the values [columns, value] of positions.
    Without a rotated part, the second result is not used."""
    k_ptr, v_ptr, rope_ptr, stride = pointers
    dim = tl.arange(0, block_of(SHAPE.dim))
    value = tl.arange(0, block_of(SHAPE.value_dim))
    is_full: tl.constexpr = (
        SHAPE.dim == block_of(SHAPE.dim) and SHAPE.value_dim == block_of(SHAPE.value_dim) and IS_WHOLE
    )
    rows = cells
    if SHAPE.kind == "expanded":
        rows = seen * stride
    # Positions past the context may hold anything, even NaN, so they are not read.
    v = load_inside(
        v_ptr + rows[:, None] + value[None, :], inside[:, None] & (value < SHAPE.value_dim)[None, :], is_full
    )
    if SHAPE.kind == "latent":
        k = tl.trans(v)
    else:
        k = load_inside(k_ptr + rows[None, :] + dim[:, None], inside[None, :] & (dim < SHAPE.dim)[:, None], is_full)
    rotated = k
    if SHAPE.rope:
        rope = tl.arange(0, block_of(SHAPE.rope))
        is_full_rope: tl.constexpr = SHAPE.rope == block_of(SHAPE.rope) and IS_WHOLE
        mask = inside[None, :] & (rope < SHAPE.rope)[:, None]
        rotated = load_inside(rope_ptr + cells[None, :] + rope[:, None], mask, is_full_rope)
        if SHAPE.kind == "expanded":  # through float32: Triton cannot compile FP8 to bfloat16 for 8.9
            rotated = rotated.to(tl.float32)
    return k, rotated, v


@triton.jit
def _with_sinks(state, sinks_ptr, head, is_head, SHAPE: tl.constexpr):
    """Add the attention sinks to the softmax state of a whole row."""
    if SHAPE.has_sinks:
        state = merge_softmax(sink_softmax(sinks_ptr, head, is_head, block_of(SHAPE.value_dim)), state)
    return state


@triton.jit
def _store(out_ptrs, state, mask):
    _, total, acc = state
    out = acc / tl.maximum(total, 1.0)[:, None]  # the total is at least 1 if anything was seen, else 0
    tl.store(out_ptrs, out.to(out_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _is_last(arrivals_ptr, count):
    """Tell whether this program is the last of `count` to store its part of an item; called after the store.

    The last program sees all other parts: in each program a barrier orders the stores of all threads before the atomic
    add by one thread, which releases them to the GPU. All additions to a counter form one release sequence; the last
    one acquires what the others released, and a barrier extends that to all threads. Then no other program accesses
    the counter, so a plain store resets it for the next launch, which begins after this one has ended.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if arrived == count - 1:
        tl.store(arrivals_ptr, 0)
    return arrived == count - 1


@triton.jit
def _join(sinks_ptr, parts_ptr, out_ptr, parts, heads, SHAPE: tl.constexpr, WIDTH: tl.constexpr):
    """Merge the parts of an item in the order of their positions, whichever program does it. A few heads at a time
    leave registers for the loads of several parts."""
    BLOCK: tl.constexpr = block_of(SHAPE.value_dim)
    HEADS: tl.constexpr = 256 // BLOCK if BLOCK < 256 else 1
    value = tl.arange(0, BLOCK)
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        is_head = head < heads
        mask = is_head[:, None] & (value < SHAPE.value_dim)[None, :]
        inner = head[:, None] * SHAPE.value_dim + value[None, :]
        state = _with_sinks(empty_softmax(HEADS, BLOCK), sinks_ptr, head, is_head, SHAPE)
        for start in range(0, parts, PARTS_AT_ONCE):
            for index in tl.static_range(PARTS_AT_ONCE):
                is_part = start + index < parts
                part_ptr = parts_ptr + (start + index) * (WIDTH * (SHAPE.value_dim + 2))
                sums_ptr = part_ptr + WIDTH * SHAPE.value_dim + head
                # Bypass the L1 cache, which does not see the stores of other multiprocessors.
                acc = tl.load(part_ptr + inner, mask=mask & is_part, other=0.0, cache_modifier=".cg")
                best = tl.load(sums_ptr, mask=is_head & is_part, other=LOWEST, cache_modifier=".cg")
                total = tl.load(sums_ptr + WIDTH, mask=is_head & is_part, other=0.0, cache_modifier=".cg")
                state = merge_softmax(state, (best, total, acc))
        _store(out_ptr + inner, state, mask)

"""Distribution of attention work over a GPU: the positions that each program reads, and the order of tiles.

It is computed on the GPU once per step: the first layer launches a small kernel, and the batch keeps the result for the
other layers. Context lengths are neither host values nor constants, so one compiled variant, and one captured graph,
serve all of them.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.dependent import wait_and_allow_next
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.softmax import LOWEST, empty_softmax
from penstock.executor.kernels.cuda.tiles import Tile
from penstock.executor.kernels.state import MAX_SEVERAL

LEAST_SHARE = 128  # positions of one head: below this, merging parts costs more than sharing gains
SHARE = tl.constexpr(8)  # numbers per program, of which six are used
CHUNK = tl.constexpr(128)  # rows per step of the kernels that share or sort
PARTS_AT_ONCE = tl.constexpr(16)  # parts that a merging program holds in registers


Made = TypeVar("Made")


class Shares(NamedTuple):
    """The split-KV plan for single-token rows: P programs share the blocks of all (row, head) items evenly.

    The blocks of an item are consecutive in the sequence that is cut into shares. Of a program's items, only the first
    can have begun in earlier programs, and only the last can continue in later ones: two part buffers per program.
    """

    plan: Tensor  # [P, SHARE] int32: row, head, its first block, number of blocks, share, the row's context
    parts: Tensor  # [2 P, width] float32: attention outputs of partial items
    sums: Tensor  # [2 P, heads of an item] float32: log2 of the parts' sums of weights
    arrivals: Tensor  # [P] int32, 0 between launches: stored parts of the item whose first part is this program's


def share_singles(
    batch: ForwardBatch,
    heads: int,
    window: int | None,
    tile: Tile,
    item_heads: int,
    dim: int,
    is_aligned: bool = False,
) -> Shares:
    """Plan `heads` items per row, each of which yields `item_heads` vectors of `dim`. is_aligned: blocks begin at
    multiples of their length, even in a window."""

    def make() -> Shares:
        device = batch.context_lens.device
        programs = num_processors(device) * tile.programs
        plan = torch.empty((programs, SHARE.value), dtype=torch.int32, device=device)
        arrivals = torch.empty(programs, dtype=torch.int32, device=device)
        _share[(programs,)](
            batch.context_lens,
            plan,
            arrivals,
            batch.num_single_rows,
            window or 0,
            HEADS=heads,
            LEAST=max(1, LEAST_SHARE // tile.columns),
            COLUMNS=tile.columns,
            HAS_WINDOW=window is not None,
            ALIGNED=is_aligned,
            num_warps=4,
        )
        parts = torch.empty((2 * programs, item_heads * dim), dtype=torch.float32, device=device)
        sums = torch.empty((2 * programs, item_heads), dtype=torch.float32, device=device)
        return Shares(plan, parts, sums, arrivals)

    return _once(batch, ("shares", heads, window, tile, item_heads, dim, is_aligned), make)


def order_tiles(batch: ForwardBatch, first_row: int, end_row: int, per_token: int, tile: Tile) -> Tensor:
    """Return [tiles, 2] int32: row and tile number of every tile of multi-token rows, tiles with most positions first,
    because a long tile that starts last would run alone. Each token has `per_token` rows of a tile."""

    def make() -> Tensor:
        passed = first_row - batch.num_single_rows
        lens = batch.query_lens[passed : end_row - batch.num_single_rows]
        device = batch.query_starts.device
        tiles, is_padded = sum(-(-count * per_token // tile.rows) for count in lens), batch.single_contexts is not None
        if is_padded:  # every row may end with a partially filled tile
            tiles += MAX_SEVERAL
        order = torch.full((tiles, 2), -1, dtype=torch.int32, device=device)
        # Every row may end with a partially filled tile.
        _order[(sum(lens) * per_token // tile.rows + len(lens),)](
            batch.query_starts,
            batch.context_lens,
            order,
            first_row,
            len(lens),
            PER_TOKEN=per_token,
            ROWS=tile.rows,
            IS_PADDED=is_padded,
            num_warps=4,
        )
        return order

    return _once(batch, ("order", first_row, end_row, per_token, tile.rows), make)


def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 in the interpreter, which runs programs one after another."""
    return current_card().num_processors if device.type == "cuda" else 2


def _check(batch: ForwardBatch) -> None:
    """Assert the properties of a batch that the kernels rely on."""
    tables, starts, contexts = batch.block_tables, batch.query_starts, batch.context_lens
    assert tables.dtype is starts.dtype is contexts.dtype is torch.int32
    assert tables.stride(1) == 1 and starts.is_contiguous() and contexts.is_contiguous()
    assert len(tables) == len(contexts) == len(starts) - 1 == batch.num_single_rows + len(batch.query_lens)


def _once(batch: ForwardBatch, key: Hashable, make: Callable[[], Made]) -> Made:
    if key not in batch.memo:
        _check(batch)
        batch.memo[key] = make()
    made: Made = batch.memo[key]
    return made


@triton.jit
def span(context, window, COLUMNS: tl.constexpr, HAS_WINDOW: tl.constexpr, ALIGNED: tl.constexpr = False):
    """Return the first visible position of a single-token row and its number of blocks. Rows without a context have one
    block, so that a program writes their zeros."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(first, context - window)
        if ALIGNED:
            first = first // COLUMNS * COLUMNS
    return first, tl.maximum(1, tl.cdiv(context - first, COLUMNS))


@kernel
def _share(
    contexts_ptr,
    plan_ptr,
    arrivals_ptr,
    num_rows,
    window,
    HEADS: tl.constexpr,
    LEAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Compute the plan of one program; one program is launched for each."""
    wait_and_allow_next()
    program = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    total = 0  # blocks of one head
    for start in range(0, num_rows, CHUNK):
        context = tl.load(contexts_ptr + start + chunk, mask=start + chunk < num_rows, other=0)
        _, blocks = span(context, window, COLUMNS, HAS_WINDOW, ALIGNED)
        total += tl.sum(tl.where(start + chunk < num_rows, blocks, 0), 0)
    share = tl.maximum(tl.cdiv(total * HEADS, tl.num_programs(0)), LEAST)
    at = program * share
    row = 0  # the number of rows, and of their blocks of one head, that end before this share begins
    passed = 0
    before = 0
    for start in range(0, num_rows, CHUNK):
        context = tl.load(contexts_ptr + start + chunk, mask=start + chunk < num_rows, other=0)
        _, blocks = span(context, window, COLUMNS, HAS_WINDOW, ALIGNED)
        blocks = tl.where(start + chunk < num_rows, blocks, 0)
        is_passed = (start + chunk < num_rows) & ((before + tl.cumsum(blocks, 0)) * HEADS <= at)
        row += tl.sum(is_passed.to(tl.int32), 0)
        passed += tl.sum(tl.where(is_passed, blocks, 0), 0)
        before += tl.sum(blocks, 0)
    context = tl.load(contexts_ptr + row, mask=row < num_rows, other=0)
    _, blocks = span(context, window, COLUMNS, HAS_WINDOW, ALIGNED)
    inside = at - passed * HEADS
    plan_ptr += program * SHARE
    tl.store(plan_ptr, row)
    tl.store(plan_ptr + 1, inside // blocks)
    tl.store(plan_ptr + 2, inside % blocks)
    tl.store(plan_ptr + 3, tl.maximum(0, tl.minimum(share, total * HEADS - at)))
    tl.store(plan_ptr + 4, share)
    tl.store(plan_ptr + 5, context)
    tl.store(arrivals_ptr + program, 0)


@triton.jit
def take_tile(order_ptr, number, starts_ptr):
    """Return a tile in the order of `_order`: its row, its number, the row's first token and number of tokens."""
    order_ptr += 2 * number
    row, tile = tl.load(order_ptr), tl.load(order_ptr + 1)
    begin = tl.load(starts_ptr + row)
    return row, tile, begin, tl.load(starts_ptr + row + 1) - begin


@triton.jit
def take_share(plan_ptr):
    """Return this program's share: row, head, first block, number of blocks, and the row's context."""
    plan_ptr += tl.program_id(0) * SHARE
    row, head, block = tl.load(plan_ptr), tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    return row, head, block, tl.load(plan_ptr + 3), tl.load(plan_ptr + 5)


@triton.jit
def store_item(shares, out_ptr, softmax_state, places, item, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Store the softmax state of `count` blocks of an item. If these are all of its `blocks`, write the output [heads,
    DIM] from head `begin` of out_ptr on. Otherwise store a part, which starts at `block` of the item, after `taken`
    blocks of this program's share; the last program to store a part of the item merges all of them.

    `places`: indices and masks of elements and of heads within an item.
    """
    _, parts_ptr, sums_ptr, _ = shares
    best, total, acc = softmax_state
    inner, mask, head, is_head = places
    begin, taken, block, count, blocks = item
    out = acc / tl.maximum(total, 1.0)[:, None]  # the total is at least 1 if anything was seen, else 0
    if count == blocks:
        tl.store(out_ptr + begin * DIM + inner, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:  # the first part of its last item, or a later part of its first item
        place = tl.program_id(0) + tl.where(block == 0, tl.num_programs(0), 0)
        tl.store(parts_ptr + place * (ITEM_HEADS * DIM) + inner, out, mask=mask)
        tl.store(sums_ptr + place * ITEM_HEADS + head, best + tl.log2(total), mask=is_head)
        _join_if_last(shares, out_ptr + begin * DIM, taken, block, blocks, heads, ITEM_HEADS, DIM)


@triton.jit
def _join_if_last(shares, out_ptr, taken, block, blocks, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Merge the item if all its parts are stored; called after this program has stored its part.

    No program waits for another, so they may run in any order and number. The parts are merged in the order of their
    positions, whichever program does it, so the result is always bit-identical.
    """
    plan_ptr, parts_ptr, sums_ptr, arrivals_ptr = shares
    share = tl.load(plan_ptr + 4)
    begin = tl.program_id(0) * share + taken - block  # of the item, in the sequence that is cut into shares
    first = begin // share
    count = (begin + blocks - 1) // share - first + 1
    if is_last(arrivals_ptr + first, count):
        _join(parts_ptr, sums_ptr, out_ptr, first, count, heads, ITEM_HEADS, DIM)


@triton.jit
def is_last(arrivals_ptr, count):
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
def _join(parts_ptr, sums_ptr, out_ptr, first, count, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Merge the parts of several heads at a time, so that many loads are in flight."""
    BLOCK_DIM: tl.constexpr = triton.next_power_of_2(DIM)
    HEADS: tl.constexpr = 256 // BLOCK_DIM if BLOCK_DIM < 256 else 1
    dim = tl.arange(0, BLOCK_DIM)
    for low in range(0, heads, HEADS):
        head = low + tl.arange(0, HEADS)
        is_head = head < heads
        best, total, acc = empty_softmax(HEADS, BLOCK_DIM)
        for start in range(0, count, PARTS_AT_ONCE):
            part = start + tl.arange(0, PARTS_AT_ONCE)
            place = first + part + tl.where(part == 0, tl.num_programs(0), 0)
            vector = place[:, None] * ITEM_HEADS + head[None, :]  # [parts, heads]
            mask = (part < count)[:, None] & is_head[None, :]
            # Bypass the L1 cache, which does not see the stores of other multiprocessors.
            sums = tl.load(sums_ptr + vector, mask=mask, other=LOWEST, cache_modifier=".cg")
            values = tl.load(
                parts_ptr + vector[:, :, None] * DIM + dim[None, None, :],
                mask=mask[:, :, None] & (dim < DIM)[None, None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            new_best = tl.maximum(best, tl.max(sums, 0))
            fade = tl.exp2(best - new_best)
            weights = tl.exp2(sums - new_best[None, :])
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * values, 0)
            best = new_best
        tl.store(
            out_ptr + head[:, None] * DIM + dim[None, :],
            (acc / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=is_head[:, None] & (dim < DIM)[None, :],
        )


@triton.jit
def find_row(tile, starts_ptr, first, num_rows, PER_TOKEN: tl.constexpr, ROWS: tl.constexpr):
    """Return the row of a tile, among `num_rows` from `first` on, and the tile's number in it. The first tile of the
    r-th row is (tokens before it) * PER_TOKEN // ROWS + r; the tile's row is the last whose first tile is not beyond
    it."""
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


@kernel
def _order(
    starts_ptr,
    contexts_ptr,
    order_ptr,
    first_row,
    num_rows,
    PER_TOKEN: tl.constexpr,
    ROWS: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """Rank one tile by counting the tiles that come before it. The cost of a tile is the context of its last pair as if
    it were full: within a row each tile costs ROWS more than the previous one, so whole rows are compared at once. In a
    padded batch, single-token rows and rows without a context have no tiles."""
    row, tile = find_row(tl.program_id(0), starts_ptr, first_row, num_rows, PER_TOKEN, ROWS)
    count = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
    context = tl.load(contexts_ptr + row)
    if tile * ROWS >= count * PER_TOKEN:
        return
    if IS_PADDED:
        if (count == 1) | (context == 0):
            return
    cost = (context - count) * PER_TOKEN + (tile + 1) * ROWS
    rank = 0
    for start in range(0, num_rows, CHUNK):
        other = first_row + start + tl.arange(0, CHUNK)
        inside = other < first_row + num_rows
        begins = tl.load(starts_ptr + other, mask=inside, other=0)
        counts = tl.load(starts_ptr + other + 1, mask=inside, other=0) - begins
        contexts = tl.load(contexts_ptr + other, mask=inside, other=0)
        if IS_PADDED:
            inside &= (counts > 1) & (contexts > 0)
        least = (contexts - counts) * PER_TOKEN
        tiles = tl.cdiv(counts * PER_TOKEN, ROWS)
        # Tiles of cost `least + ROWS`, … up to and including `cost` do not come before this one.
        cheaper = tl.maximum(0, cost - least)
        longer = tiles - tl.minimum(tiles, cheaper // ROWS)
        is_tie = (cheaper % ROWS == 0) & (cheaper > 0) & (cheaper // ROWS <= tiles) & (other < row)
        rank += tl.sum(tl.where(inside, longer + is_tie.to(tl.int32), 0), 0)
    tl.store(order_ptr + 2 * rank, row)
    tl.store(order_ptr + 2 * rank + 1, tile)

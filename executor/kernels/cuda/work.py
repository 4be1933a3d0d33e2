"""How attention is shared out over a GPU: which programs take which rows' positions, and in which order tiles begin.

Found on the GPU from what the rows are like, once per step: the first layer that asks launches a small kernel, and the
batch keeps what it made for the layers after it. Neither the host nor a constant knows a context's length, so one
compiled variant, and a captured graph, serve whatever comes.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.dependent import take_turn
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.softmax import LOWEST, unseen
from penstock.executor.kernels.cuda.tiles import Tile
from penstock.executor.kernels.state import MAX_SEVERAL

LEAST_SHARE = 128  # positions of one head: below this, joining parts costs more than sharing gains
SHARE = tl.constexpr(8)  # numbers per program, of which six are used
CHUNK = tl.constexpr(128)  # rows that a program which shares or sorts looks at
PARTS_AT_ONCE = tl.constexpr(16)  # that a program which joins has in registers


Made = TypeVar("Made")


class Shares(NamedTuple):
    """For kernels of rows with one token: P programs share the blocks of positions of all (row, head) items evenly.

    An item's blocks are neighbours in the order that is cut into shares, so of a program's items only the first can
    have begun in programs before it, and only the last can go on in later ones: two places for parts each.
    """

    plan: Tensor  # [P, SHARE] int32: row, head, its first block, number of blocks, share, the row's context
    parts: Tensor  # [2 P, width] float32: means of the values that parts of items saw
    sums: Tensor  # [2 P, heads of an item] float32: log2 of the parts' weights
    arrivals: Tensor  # [P] int32, 0 between launches: parts there are of the item whose first part is this one's


def share_singles(
    batch: ForwardBatch,
    heads: int,
    window: int | None,
    tile: Tile,
    item_heads: int,
    dim: int,
    is_aligned: bool = False,
) -> Shares:
    """`heads` items per row, each of which gives `item_heads` vectors of `dim`. Aligned: blocks begin at multiples of their
    length, in a window too."""

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
    """[tiles, 2] int32: row and number of every tile of rows of several tokens, those that see most positions first:
    a long one that began last would be computed alone. Each token is `per_token` of a tile's rows."""

    def make() -> Tensor:
        passed = first_row - batch.num_single_rows
        lens = batch.query_lens[passed : end_row - batch.num_single_rows]
        device = batch.query_starts.device
        tiles, is_padded = sum(-(-count * per_token // tile.rows) for count in lens), batch.single_contexts is not None
        if is_padded:  # each of its rows may leave one unfilled
            tiles += MAX_SEVERAL
        order = torch.full((tiles, 2), -1, dtype=torch.int32, device=device)
        # Every row may leave one tile unfilled.
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
    """An interpreter runs programs one after another, and few show as much as many."""
    return current_card().num_processors if device.type == "cuda" else 2


def _check(batch: ForwardBatch) -> None:
    """What the kernels take for granted of a batch."""
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
    """The first position that a row of one token sees, and how many blocks there are from it on. Rows without a context
    have a block too: the program that takes it writes their zeros."""
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
    """One program for each of those that it plans for."""
    take_turn()
    program = tl.program_id(0)
    chunk = tl.arange(0, CHUNK)
    total = 0  # blocks of one head
    for start in range(0, num_rows, CHUNK):
        context = tl.load(contexts_ptr + start + chunk, mask=start + chunk < num_rows, other=0)
        _, blocks = span(context, window, COLUMNS, HAS_WINDOW, ALIGNED)
        total += tl.sum(tl.where(start + chunk < num_rows, blocks, 0), 0)
    share = tl.maximum(tl.cdiv(total * HEADS, tl.num_programs(0)), LEAST)
    at = program * share
    row = 0  # the rows, and their blocks of one head, that end before this share begins
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
    """A tile in the order that `_order` made: its row, its number in it, the row's first token and how many it has."""
    order_ptr += 2 * number
    row, tile = tl.load(order_ptr), tl.load(order_ptr + 1)
    begin = tl.load(starts_ptr + row)
    return row, tile, begin, tl.load(starts_ptr + row + 1) - begin


@triton.jit
def take_share(plan_ptr):
    """This program's share: row, head, first block, number of blocks, and the row's context."""
    plan_ptr += tl.program_id(0) * SHARE
    row, head, block = tl.load(plan_ptr), tl.load(plan_ptr + 1), tl.load(plan_ptr + 2)
    return row, head, block, tl.load(plan_ptr + 3), tl.load(plan_ptr + 5)


@triton.jit
def store_item(shares, out_ptr, weighed, places, item, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """What `count` blocks of an item gave, as `weigh` leaves it: the item's [heads, DIM], if it has no others, to those
    of out_ptr from head `begin` on. Else it is a part; `taken` blocks of this program's share went before it, and it begins with `block`
    of the item's `blocks`. The last program to store one joins all parts.

    places: of numbers and of heads within an item, and which of them there are.
    """
    _, parts_ptr, sums_ptr, _ = shares
    best, total, acc = weighed
    inner, mask, head, is_head = places
    begin, taken, block, count, blocks = item
    out = acc / tl.maximum(total, 1.0)[:, None]  # 1 and more if anything was seen, or else 0
    if count == blocks:
        tl.store(out_ptr + begin * DIM + inner, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:  # its last item's first part, or its first item's later one
        place = tl.program_id(0) + tl.where(block == 0, tl.num_programs(0), 0)
        tl.store(parts_ptr + place * (ITEM_HEADS * DIM) + inner, out, mask=mask)
        tl.store(sums_ptr + place * ITEM_HEADS + head, best + tl.log2(total), mask=is_head)
        _join_if_last(shares, out_ptr + begin * DIM, taken, block, blocks, heads, ITEM_HEADS, DIM)


@triton.jit
def _join_if_last(shares, out_ptr, taken, block, blocks, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """To be called when this program's part of an item is stored.

    No program waits for another, so they may run in any order and number. The parts are added in the order of their
    positions by whichever program does it: the same bits every time.
    """
    plan_ptr, parts_ptr, sums_ptr, arrivals_ptr = shares
    share = tl.load(plan_ptr + 4)
    begin = tl.program_id(0) * share + taken - block  # of the item, in the order that was cut into shares
    first = begin // share
    count = (begin + blocks - 1) // share - first + 1
    if is_last(arrivals_ptr + first, count):
        _join(parts_ptr, sums_ptr, out_ptr, first, count, heads, ITEM_HEADS, DIM)


@triton.jit
def is_last(arrivals_ptr, count):
    """Whether this program is the last of `count` to store its part of an item; to be called when it has, with the item's
    counter.

    What the others stored is seen: in each of them a barrier brings the stores of all threads before the one thread
    that adds to the counter, and adding releases them to the GPU. All additions to one counter are a single release
    sequence; the last acquires what each of them released, and a barrier hands that on to its threads. Then no other program
    will touch the counter, and a plain store makes it 0 for the next launch, which begins after this one has ended.
    """
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if arrived == count - 1:
        tl.store(arrivals_ptr, 0)
    return arrived == count - 1


@triton.jit
def _join(parts_ptr, sums_ptr, out_ptr, first, count, heads, ITEM_HEADS: tl.constexpr, DIM: tl.constexpr):
    """Several parts of several heads at a time, so that many loads are in flight."""
    BLOCK_DIM: tl.constexpr = triton.next_power_of_2(DIM)
    HEADS: tl.constexpr = 256 // BLOCK_DIM if BLOCK_DIM < 256 else 1
    dim = tl.arange(0, BLOCK_DIM)
    for low in range(0, heads, HEADS):
        head = low + tl.arange(0, HEADS)
        is_head = head < heads
        best, total, acc = unseen(HEADS, BLOCK_DIM)
        for start in range(0, count, PARTS_AT_ONCE):
            part = start + tl.arange(0, PARTS_AT_ONCE)
            place = first + part + tl.where(part == 0, tl.num_programs(0), 0)
            vector = place[:, None] * ITEM_HEADS + head[None, :]  # [parts, heads]
            mask = (part < count)[:, None] & is_head[None, :]
            # Past the first level of cache, which other processors' stores do not reach.
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
    """One program per tile, which counts those that come before it. A tile costs what its last pair sees, in pairs, as
    if it were full: within a row each costs ROWS more than the one before it, so none needs to be looked at. Of a padded
    batch, rows of one token and those without a context have none."""
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
        # Those of cost `least + ROWS`, … up to and with `cost` do not come before.
        cheaper = tl.maximum(0, cost - least)
        longer = tiles - tl.minimum(tiles, cheaper // ROWS)
        is_tie = (cheaper % ROWS == 0) & (cheaper > 0) & (cheaper // ROWS <= tiles) & (other < row)
        rank += tl.sum(tl.where(inside, longer + is_tie.to(tl.int32), 0), 0)
    tl.store(order_ptr + 2 * rank, row)
    tl.store(order_ptr + 2 * rank + 1, tile)

"""The experts of a layer in four kernels, whatever their number: align, place, up with activation, down with shares.

A token's choice of an expert is an *entry*; entries are sorted by expert and padded to whole tiles, so that a tile's
rows all read one expert's weights. No entry is copied there: the sorted list of their numbers is, and the products
gather their rows by it. Nothing comes back to the host, so the layer can be part of a graph.
"""

import torch
import triton
import triton.language as tl

from penstock.executor.kernels.cuda.dependent import launching, take_turn
from penstock.executor.kernels.cuda.rows import GELU_TANH, SILU, activate
from penstock.executor.kernels.cuda.tiles import Tile, expert_tile, power_of_2
from penstock.executor.kernels.torch_fp8 import BLOCK

ACTIVATIONS = {"silu": SILU, "gelu_tanh": GELU_TANH}
Weight = tuple[torch.Tensor, torch.Tensor | None]  # [S, N, K], and where it has eight bits a scale per block
GROUP = tl.constexpr(BLOCK)
ALIGN_CHUNK, PLACE_BLOCK, TILE_BLOCK = 1024, 256, 64


def fused_experts(
    hidden: torch.Tensor,
    slots: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    first: int,
    activation: str,
) -> torch.Tensor:
    """As the twin in `torch_ops`. An entry of another rank's slot adds nothing."""
    return _experts(hidden, slots, shares, (gate_up, None), (down, None), first, activation)


def fused_block_experts(
    hidden: torch.Tensor,
    slots: torch.Tensor,
    shares: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scales: torch.Tensor,
    down: torch.Tensor,
    down_scales: torch.Tensor,
    first: int,
    activation: str,
) -> torch.Tensor:
    """As the twin in `torch_fp8`. Weights widen as they arrive: half the bytes are read, and tokens stay exact."""
    return _experts(hidden, slots, shares, (gate_up, gate_up_scales), (down, down_scales), first, activation)


def _experts(
    hidden: torch.Tensor,
    slots: torch.Tensor,
    shares: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    first: int,
    activation: str,
) -> torch.Tensor:
    tokens, top_k = slots.shape
    num_slots, width, inner = down[0].shape
    entries = tokens * top_k
    tile = expert_tile(entries, num_slots, hidden.element_size(), gate_up[0].element_size())
    # Every slot may leave a tile unfilled, and no slot has a tile without an entry.
    num_tiles = entries // tile.rows + min(entries, num_slots)
    ids, tile_slots = _sort(slots, num_slots, first, num_tiles, tile.rows)
    inside = torch.empty((entries, inner), dtype=hidden.dtype, device=hidden.device)
    out = torch.zeros((entries, width), dtype=hidden.dtype, device=hidden.device)
    shares = shares.float().contiguous()
    given = {"ACTIVATION": ACTIVATIONS[activation]}
    _launch(num_tiles, tile, hidden, gate_up, inside, ids, tile_slots, shares, entries, top_k, GATED=True, **given)
    _launch(num_tiles, tile, inside, down, out, ids, tile_slots, shares, entries, 1, GATED=False, **given)
    return out.view(tokens, top_k, width).sum(1)


def _sort(
    slots: torch.Tensor, num_slots: int, first: int, num_tiles: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries [num_tiles * rows] by slot, what pads them being no entry's number; each tile's slot, -1 for none."""
    entries = slots.numel()
    slots = slots.contiguous()
    ids = torch.full((num_tiles * rows,), entries, dtype=torch.int32, device=slots.device)
    tile_slots = torch.empty(num_tiles, dtype=torch.int32, device=slots.device)
    bins = max(16, power_of_2(num_slots))
    cursors = torch.empty(bins, dtype=torch.int32, device=slots.device)
    _align[(1,)](
        slots,
        cursors,
        tile_slots,
        entries,
        num_slots,
        first,
        num_tiles,
        BINS=bins,
        ROWS=rows,
        CHUNK=ALIGN_CHUNK,
        TILES=TILE_BLOCK,
        num_warps=8,
        **launching(),
    )
    grid = (triton.cdiv(entries, PLACE_BLOCK),)
    _place[grid](slots, cursors, ids, entries, num_slots, first, BLOCK=PLACE_BLOCK, **launching())
    return ids, tile_slots


def _launch(
    num_tiles: int,
    tile: Tile,
    x: torch.Tensor,
    scaled_weight: Weight,
    y: torch.Tensor,
    ids: torch.Tensor,
    tile_slots: torch.Tensor,
    shares: torch.Tensor,
    entries: int,
    top_k: int,
    **given: int,
) -> None:
    """`top_k`: how many entries share a row of x."""
    depth, columns = x.shape[1], y.shape[1]
    weight, scales = scaled_weight
    assert x.stride(1) == 1 and weight.is_contiguous()
    block_depth = 32 if x.element_size() == 4 else 64
    _multiply[(triton.cdiv(columns, tile.columns), num_tiles)](
        x,
        weight,
        weight if scales is None else scales,
        y,
        ids,
        tile_slots,
        shares,
        entries,
        x.stride(0),
        weight.stride(0),
        0 if scales is None else scales.stride(0),
        0 if scales is None else scales.stride(1),
        columns,
        depth,
        TOP_K=top_k,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=block_depth,
        EVEN=depth % block_depth == 0 and columns % tile.columns == 0,
        SCALED=scales is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **given,
        **launching(),
    )


@triton.jit(do_not_specialize=["entries", "first", "num_tiles"])
def _align(
    slots_ptr,
    cursors_ptr,
    tile_slots_ptr,
    entries,
    num_slots,
    first,
    num_tiles,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program: where each slot's entries begin, in whole tiles, and which slot each tile has."""
    take_turn(DEPENDENT)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, entries, CHUNK):
        entry = start + tl.arange(0, CHUNK)
        slot = tl.load(slots_ptr + entry, mask=entry < entries, other=-1).to(tl.int32) - first
        ours = (entry < entries) & (slot >= 0) & (slot < num_slots)
        counts += tl.histogram(tl.where(ours, slot, 0), BINS, mask=ours)
    bins = tl.arange(0, BINS)
    tiles = (counts + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    tl.store(cursors_ptr + bins, (ends - tiles) * ROWS)
    total = tl.sum(tiles, 0)
    for start in range(0, num_tiles, TILES):
        tile = start + tl.arange(0, TILES)
        slot = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        tl.store(tile_slots_ptr + tile, tl.where(tile < total, slot, -1), mask=tile < num_tiles)


@triton.jit(do_not_specialize=["entries", "first"])
def _place(slots_ptr, cursors_ptr, ids_ptr, entries, num_slots, first, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Each entry takes the next place of its slot. Which one does not matter: a row's products know no other row."""
    take_turn(DEPENDENT)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + entry, mask=entry < entries, other=-1).to(tl.int32) - first
    ours = (entry < entries) & (slot >= 0) & (slot < num_slots)
    place = tl.atomic_add(cursors_ptr + tl.where(ours, slot, 0), 1, mask=ours)
    tl.store(ids_ptr + place, entry, mask=ours)


@triton.jit(do_not_specialize=["entries"])
def _multiply(
    x_ptr,
    weight_ptr,
    scales_ptr,
    y_ptr,
    ids_ptr,
    tile_slots_ptr,
    shares_ptr,
    entries,
    x_stride,
    slot_stride,
    scales_slot_stride,
    scales_stride,
    columns,
    depth,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Rows of x times their expert's weight [columns, depth]; gated: a gate's columns, then as many of up."""
    take_turn(DEPENDENT)
    slot = tl.load(tile_slots_ptr + tl.program_id(1))
    if slot < 0:
        return
    entry = tl.load(ids_ptr + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    is_entry = entry < entries
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_ptrs = x_ptr + (entry // TOP_K).to(tl.int64)[:, None] * x_stride + k[None, :]
    weight_ptrs = weight_ptr + slot.to(tl.int64) * slot_stride + column[None, :] * depth + k[:, None]
    scales_ptr += slot.to(tl.int64) * scales_slot_stride
    gate_scales = scales_ptr + tl.program_id(0) * COLUMNS // GROUP * scales_stride
    up_scales = scales_ptr + (columns + tl.program_id(0) * COLUMNS) // GROUP * scales_stride
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, depth, DEPTH):
        group = start // GROUP
        if EVEN:
            x = tl.load(x_ptrs, mask=is_entry[:, None], other=0.0)
            acc = _add_product(acc, x, tl.load(weight_ptrs), gate_scales + group, SCALED)
            if GATED:
                up = _add_product(up, x, tl.load(weight_ptrs + columns * depth), up_scales + group, SCALED)
        else:
            is_deep = start + k < depth
            is_weight = is_deep[:, None] & (column < columns)[None, :]
            x = tl.load(x_ptrs, mask=is_entry[:, None] & is_deep[None, :], other=0.0)
            w = tl.load(weight_ptrs, mask=is_weight, other=0.0)
            acc = _add_product(acc, x, w, gate_scales + group, SCALED)
            if GATED:
                w = tl.load(weight_ptrs + columns * depth, mask=is_weight, other=0.0)
                up = _add_product(up, x, w, up_scales + group, SCALED)
        x_ptrs += DEPTH
        weight_ptrs += DEPTH
    if GATED:
        acc = activate(acc, ACTIVATION) * up
    else:
        acc *= tl.load(shares_ptr + entry, mask=is_entry, other=0.0)[:, None]
    y_ptrs = y_ptr + entry.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=is_entry[:, None] & (column < columns)[None, :])


@triton.jit
def _add_product(acc, x, weight, scale_ptr, SCALED: tl.constexpr):
    """A step of the depth lies within one block of scales, as do a tile's columns."""
    if SCALED:
        return acc + tl.dot(x, weight.to(x.dtype), input_precision="ieee") * tl.load(scale_ptr)
    else:
        return tl.dot(x, weight, acc, input_precision="ieee")

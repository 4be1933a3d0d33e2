"""Recurrent state addresses on a GPU, and the causal convolution, whose last inputs are part of the state."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.batch import ForwardBatch, StatePages
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.rows import activate
from penstock.executor.kernels.cuda.tile_order import find_row

TILES = {True: (1, 512, 2), False: (32, 128, 4)}  # is single-token row → tokens, channels, warps


class Units(NamedTuple):
    """The layout of state units in the pages, in elements."""

    page: int
    unit: int
    per_page: int
    width: int  # pages per row of the tables


def state_pages(
    states: StatePages, batch: ForwardBatch, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Units]:
    """Return the pages viewed as `dtype`, the (read table, write table, is-new flags), and the layout."""
    assert batch.states is not None
    read, write, is_new = batch.states
    assert read.is_contiguous() and write.is_contiguous()
    pages = states.base.view(dtype)
    units = Units(pages.stride(0), states.unit_bytes // dtype.itemsize, states.units_per_page, read.shape[1])
    return pages, (read, write, is_new), units


@triton.jit
def unit_offset(table_ptr, row, unit, UNITS: tl.constexpr):
    """Return the offset of a row's state unit; `unit` includes the layer's first unit."""
    page = tl.load(table_ptr + row.to(tl.int64) * UNITS.width + unit // UNITS.per_page).to(tl.int64)
    return page * UNITS.page + unit % UNITS.per_page * UNITS.unit


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, states: StatePages, batch: ForwardBatch, has_silu: bool
) -> Tensor:
    taps, channels = weight.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    y = torch.empty((len(x), channels), dtype=x.dtype, device=x.device)
    pages, table, units = state_pages(states, batch, x.dtype)
    singles, several = batch.num_single_rows, len(batch.query_lens)
    pointers = x, weight, weight if bias is None else bias, y, pages, *table, batch.query_starts
    for first, rows in ((0, singles), (singles, several)):
        if rows:
            tokens, wide, warps = TILES[first == 0 and singles > 0]
            tiles = rows if tokens == 1 else sum(batch.query_lens) // tokens + rows
            _convolve[(tiles, triton.cdiv(channels, wide))](
                *pointers,
                states.first_unit,
                first,
                rows,
                X_STRIDE=x.stride(0),
                WIDTH=channels,
                TAPS=taps,
                UNITS=units,
                HAS_BIAS=bias is not None,
                HAS_SILU=has_silu,
                TOKENS=tokens,
                CHANNELS=wide,
                num_warps=warps,
            )
    return y


@kernel
def _convolve(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    pages_ptr,
    read_ptr,
    write_ptr,
    is_new_ptr,
    starts_ptr,
    first_unit,
    first_row,
    num_rows,
    X_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    UNITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute a tile of tokens and channels. Only a row's first tile reads the old tail, so it writes the new one."""
    if TOKENS == 1:
        row = first_row + tl.program_id(0)
        tile = 0
    else:
        row, tile = find_row(tl.program_id(0), starts_ptr, first_row, num_rows, 1, TOKENS)
    begin = tl.load(starts_ptr + row)
    count = tl.load(starts_ptr + row + 1) - begin
    if tile * TOKENS >= count:
        return
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_channel = channel < WIDTH
    token = tile * TOKENS + tl.arange(0, TOKENS)[:, None]
    x_ptr += begin.to(tl.int64) * X_STRIDE
    tail_ptr = pages_ptr + unit_offset(read_ptr, row, first_unit, UNITS)
    has_tail = tl.load(is_new_ptr + row) == 0
    acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        at = token - (TAPS - 1) + tap
        is_mine = is_channel & (token < count)
        x = tl.load(x_ptr + at.to(tl.int64) * X_STRIDE + channel, mask=is_mine & (at >= 0), other=0.0).to(tl.float32)
        if TAPS > 1:
            tail = tail_ptr + (at + TAPS - 1) * WIDTH + channel
            x += tl.load(tail, mask=is_mine & (at < 0) & has_tail, other=0.0).to(tl.float32)
        acc += x * tl.load(weight_ptr + tap * WIDTH + channel, mask=is_channel, other=0.0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + channel, mask=is_channel, other=0.0)
    if HAS_SILU:
        acc = activate(acc, "silu")
    place = (begin + token).to(tl.int64) * WIDTH + channel
    tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), mask=is_channel & (token < count))
    if TAPS > 1:
        if tile == 0:
            kept = tl.arange(0, triton.next_power_of_2(TAPS - 1))[:, None]
            is_kept = is_channel & (kept < TAPS - 1)
            source = count - (TAPS - 1) + kept
            ours = tl.load(x_ptr + source.to(tl.int64) * X_STRIDE + channel, mask=is_kept & (source >= 0), other=0.0)
            older = tail_ptr + (source + TAPS - 1) * WIDTH + channel
            ours += tl.load(older, mask=is_kept & (source < 0) & has_tail, other=0.0)  # one of the two is zero
            tl.debug_barrier()  # the state may be updated in place: all loads come before the stores
            kept_ptr = pages_ptr + unit_offset(write_ptr, row, first_unit, UNITS)
            tl.store(kept_ptr + kept * WIDTH + channel, ours, mask=is_kept)

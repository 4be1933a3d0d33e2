"""The inputs of a step on the GPU: one kernel applies changes to the state, one gathers each row's model inputs, and one
copies blocks between the KV cache and pinned memory, whose addresses it uses as if it were the GPU's own."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import RowTensors
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.state import HEADER, OPTIONS, PackedStep, StateLayout

PER_PROGRAM = tl.constexpr(256)  # tokens of a row, or numbers of a run, per program
PIECE = 1 << 15  # bytes of a block that a program copies at a time
COPYING_PROGRAMS = 32  # enough loads in flight for the bus, while most processors are left to the rows of the step
ROWS_AT, PER_SLOT = tl.constexpr(HEADER), tl.constexpr(OPTIONS)


def apply_runs(packed: Tensor, state: Tensor, first: int, num_runs: int, longest: int) -> None:
    _assert_numbers(packed, state)
    assert num_runs > 0 and longest > 0 and 0 <= first <= len(packed) - 3 * num_runs
    _apply_runs[num_runs, triton.cdiv(longest, PER_PROGRAM.value)](packed, state, first)


def prepare(
    packed: Tensor, state: Tensor, layout: StateLayout, rows: int, tokens: int, longest: int, table_width: int
) -> RowTensors:
    _assert_numbers(packed, state)
    assert rows > 0 and PackedStep.size(rows) <= len(packed)
    assert 0 < longest <= tokens and 0 < table_width <= layout.max_blocks
    assert max(layout.blocks_at, layout.options_at, layout.spare) < len(state)

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=packed.device)

    int32, int64, float32 = torch.int32, torch.int64, torch.float32
    made = RowTensors(
        tokens=empty(int32, tokens),
        positions=empty(int32, tokens),
        kv_cells=empty(int64, tokens),
        context_lens=empty(int32, rows),
        block_tables=empty(int32, rows, table_width),
        targets=empty(int64, rows),
        temperature=empty(float32, rows),
        min_p=empty(float32, rows),
        top_p=empty(float32, rows),
        top_k=empty(int32, rows),
        seeds=empty(int64, rows),
    )
    _prepare[rows, triton.cdiv(max(longest, table_width), PER_PROGRAM.value)](
        *(packed, state, *made),
        *(rows, table_width, layout.width, layout.blocks_at, layout.max_blocks, layout.options_at, layout.spare),
        layout.ahead,
        PAGE=layout.block_size,
        num_warps=4,
    )
    return made


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    assert source.shape[1] == target.shape[1] and source.stride(1) == target.stride(1) == 1
    constants = {"BYTES": source.shape[1], "STRIDES": (source.stride(0), target.stride(0)), "PIECE": PIECE}
    _copy_blocks[(COPYING_PROGRAMS,)](pairs, source, target, len(pairs), **constants, num_warps=8)


def _assert_numbers(packed: Tensor, state: Tensor) -> None:
    """Assert that both are flat int32 tensors whose length fits into 32 bits."""
    for numbers in (packed, state):
        assert numbers.dtype == torch.int32 and numbers.dim() == 1 and numbers.is_contiguous() and len(numbers) < 2**31


@kernel
def _apply_runs(packed_ptr, state_ptr, first):
    run_ptr = packed_ptr + first + 3 * tl.program_id(0)
    to = tl.load(run_ptr)
    source = tl.load(run_ptr + 1)
    length = tl.load(run_ptr + 2)
    place = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    numbers = tl.load(packed_ptr + source + place, mask=place < length, other=0)
    tl.store(state_ptr + to + place, numbers, mask=place < length)


@kernel
def _copy_blocks(
    pairs_ptr, source_ptr, target_ptr, num_pairs, BYTES: tl.constexpr, STRIDES: tl.constexpr, PIECE: tl.constexpr
):
    PIECES: tl.constexpr = (BYTES + PIECE - 1) // PIECE  # of a block
    for item in range(tl.program_id(0), num_pairs * PIECES, tl.num_programs(0)):
        pair_ptr = pairs_ptr + item // PIECES * 2
        place = item % PIECES * PIECE + tl.arange(0, PIECE)
        source = source_ptr + tl.load(pair_ptr).to(tl.int64) * STRIDES[0]
        target = target_ptr + tl.load(pair_ptr + 1).to(tl.int64) * STRIDES[1]
        tl.store(target + place, tl.load(source + place, mask=place < BYTES), mask=place < BYTES)


@kernel
def _prepare(
    packed_ptr,
    state_ptr,
    tokens_ptr,
    positions_ptr,
    kv_cells_ptr,
    contexts_ptr,
    tables_ptr,
    targets_ptr,
    temperature_ptr,
    min_p_ptr,
    top_p_ptr,
    top_k_ptr,
    seeds_ptr,
    rows,
    table_width,
    width,
    blocks_at,
    max_blocks,
    options_at,
    spare,
    ahead,
    PAGE: tl.constexpr,
):
    """Gather the inputs of one row: a chunk of its tokens and of its block table per program."""
    row = tl.program_id(0)
    place = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
    is_real = row < tl.load(packed_ptr)
    begin = tl.load(packed_ptr + ROWS_AT + row)
    count = tl.load(packed_ptr + ROWS_AT + row + 1) - begin
    columns_ptr = packed_ptr + ROWS_AT + rows + 1 + row
    slot = tl.load(columns_ptr, mask=is_real, other=0)
    start = tl.load(columns_ptr + rows, mask=is_real, other=0)
    write_from = tl.load(columns_ptr + 2 * rows, mask=is_real, other=0)
    context = tl.where(is_real, start + count, 0)

    position = tl.where(is_real, start + place, 0)
    inside = place < count
    read = inside & is_real
    token = tl.load(state_ptr + slot * width + position, mask=read, other=0)
    table_ptr = state_ptr + blocks_at + slot * max_blocks
    block = tl.load(table_ptr + position // PAGE, mask=read & (position >= write_from), other=0)
    tl.store(tokens_ptr + begin + place, token, mask=inside)
    tl.store(positions_ptr + begin + place, position, mask=inside)
    tl.store(kv_cells_ptr + begin + place, block.to(tl.int64) * PAGE + position % PAGE, mask=inside)

    num_blocks = tl.where(is_real, tl.cdiv(context + ahead, PAGE), 0)
    used = tl.load(table_ptr + place, mask=place < tl.minimum(num_blocks, table_width), other=0)
    tl.store(tables_ptr + row.to(tl.int64) * table_width + place, used, mask=place < table_width)

    if tl.program_id(1) == 0:
        tl.store(contexts_ptr + row, context)
        tl.store(targets_ptr + row, tl.where(is_real, slot * width + context, spare).to(tl.int64))
        options_ptr = state_ptr + options_at + slot * PER_SLOT
        _options(options_ptr, is_real, row, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, seeds_ptr)


@triton.jit
def _options(options_ptr, is_real, row, temperature_ptr, min_p_ptr, top_p_ptr, top_k_ptr, seeds_ptr):
    """Load the row's sampling options, which `DeviceState.write_options` stored as int32."""
    temperature = tl.load(options_ptr, mask=is_real, other=0)
    tl.store(temperature_ptr + row, temperature.to(tl.float32, bitcast=True))
    min_p = tl.load(options_ptr + 1, mask=is_real, other=0)
    tl.store(min_p_ptr + row, min_p.to(tl.float32, bitcast=True))
    top_p = tl.load(options_ptr + 2, mask=is_real, other=0)
    tl.store(top_p_ptr + row, top_p.to(tl.float32, bitcast=True))
    tl.store(top_k_ptr + row, tl.load(options_ptr + 3, mask=is_real, other=0))
    low = tl.load(options_ptr + 4, mask=is_real, other=0).to(tl.uint32, bitcast=True).to(tl.int64)
    high = tl.load(options_ptr + 5, mask=is_real, other=0).to(tl.int64)
    tl.store(seeds_ptr + row, (high << 32) | low)

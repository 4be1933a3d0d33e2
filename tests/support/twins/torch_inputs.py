"""`InputOps` in plain torch (this module is one): the reference that the Triton kernels are compared with."""

import torch
from torch import Tensor

from penstock.executor.kernels import RowTensors
from penstock.executor.kernels.state import OPTIONS, PackedStep, StateLayout


def apply_runs(packed: Tensor, state: Tensor, first: int, num_runs: int, longest: int) -> None:
    for to, source, length in packed[first : first + 3 * num_runs].view(-1, 3).tolist():
        state[to : to + length] = packed[source : source + length]


def prepare(
    packed: Tensor, state: Tensor, layout: StateLayout, rows: int, tokens: int, longest: int, table_width: int
) -> RowTensors:
    width, blocks_at, max_blocks, options_at, spare, block_size, ahead = layout
    step = PackedStep(packed, rows)
    starts = step.query_starts
    row = torch.arange(rows, device=packed.device)
    is_real = row < step.row_counts[0]
    slot, first, write_from = step.columns.long()
    slot, counts = torch.where(is_real, slot, 0), starts.diff().long()
    contexts = torch.where(is_real, first + counts, 0)
    row_of = row.repeat_interleave(counts, output_size=tokens)
    positions = first[row_of] + torch.arange(tokens, device=packed.device) - starts[row_of]
    real_token = is_real[row_of]
    positions = torch.where(real_token, positions, 0)
    ids = torch.where(real_token, state[slot[row_of] * width + positions], 0)
    blocks = state[blocks_at + slot[row_of] * max_blocks + positions // block_size].long()
    is_written = real_token & (positions >= write_from[row_of])
    kv_cells = torch.where(is_written, blocks, 0) * block_size + positions % block_size
    index = torch.arange(table_width, device=packed.device)
    tables = state[blocks_at + slot[:, None] * max_blocks + index.clamp(max=max_blocks - 1)]
    tables = torch.where(index < -(-(contexts + ahead) // block_size)[:, None], tables, 0)
    options = state[options_at + slot[:, None] * OPTIONS + torch.arange(OPTIONS, device=packed.device)]
    options = torch.where(is_real[:, None], options, 0)
    floats = [options[:, place].clone().view(torch.float32) for place in range(3)]  # aligned, as the kernel's are
    return RowTensors(
        tokens=ids,
        positions=positions.int(),
        kv_cells=kv_cells,
        context_lens=contexts.int(),
        block_tables=tables,
        targets=torch.where(is_real, slot * width + contexts, spare),
        temperature=floats[0],
        min_p=floats[1],
        top_p=floats[2],
        top_k=options[:, 3].clone(),
        seeds=options[:, 4:6].clone(memory_format=torch.contiguous_format).view(torch.int64)[:, 0],
    )


def copy_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    for one, other in pairs.tolist():
        target[other].copy_(source[one], non_blocking=True)

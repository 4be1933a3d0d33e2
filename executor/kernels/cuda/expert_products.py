"""The experts of a layer in four kernels, whatever their number: sort, gate and up with activation, down, weighted sum.

Rows are gathered by the sorted entries of `routing`. Nothing returns to the host, so the layer can be part of a CUDA
graph. The result of an entry does not depend on its tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import Activation
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.product import Scaled, multiply
from penstock.executor.kernels.cuda.routing import load_slots, sort_entries
from penstock.executor.kernels.cuda.rows import quantize
from penstock.executor.kernels.cuda.tiles import expert_splits, expert_tile
from penstock.executor.kernels.eight_bits import are_quantized, make_quantized
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight

SUM_BLOCK = tl.constexpr(512)  # columns per program of the weighted sum


def fused_experts(
    hidden: Tensor,
    expert_slots: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    first: int,
    activation: Activation,
    added: Tensor | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
    is_fixed: bool = False,
) -> Tensor:
    """Compute the experts of a layer. FP8 weights with few entries are dequantized in registers, and activations stay
    unquantized; with many entries, or with is_fixed, the products are FP8. Other codes are always dequantized."""
    (num_slots, width, inner), entries = down.shape, expert_slots.numel()
    x: Scaled = hidden, None
    if gate_up.format is down.format is BLOCKS and (is_fixed or are_quantized(entries, num_slots)):
        x = quantize(hidden)
        inside: Scaled = make_quantized(entries, inner, hidden.device)
    else:
        inside = torch.empty((entries, inner), dtype=hidden.dtype, device=hidden.device), None
    is_coded = gate_up.format.is_packed or down.format.is_packed
    tile = expert_tile(entries, num_slots, x[0].element_size(), is_coded, is_fixed)
    order = sort_entries(expert_slots, num_slots, first, tile.rows)
    splits = expert_splits(entries, width, inner) if is_coded and not is_fixed and hidden.itemsize < 4 else 1
    dtype = hidden.dtype if splits == 1 else torch.float32
    parts = torch.empty((splits, entries, width), dtype=dtype, device=hidden.device)
    multiply(
        *(x, gate_up, inside, tile),
        bias=biases[0],
        activation=activation,
        order=order,
        entries_per_row=expert_slots.shape[1],
        like=hidden,
    )
    multiply(inside, down, (parts, None), tile, order=order, bias=biases[1], splits=splits)
    tokens, top_k = expert_slots.shape
    assert shares.shape == expert_slots.shape and shares.is_contiguous() and shares.dtype is torch.float32
    assert added is None or (added.is_contiguous() and added.shape == (tokens, width))
    out = torch.empty((tokens, width), dtype=hidden.dtype, device=hidden.device)
    _add_shares[(tokens, triton.cdiv(width, SUM_BLOCK.value))](
        *(parts, expert_slots, shares, parts if added is None else added, out),
        *(entries, first),
        WIDTH=width,
        TOP_K=top_k,
        NUM_SLOTS=num_slots,
        SPLITS=splits,
        ADDS=added is not None,
        num_warps=4,
    )
    return out


@kernel
def _add_shares(
    parts_ptr,
    expert_slots_ptr,
    shares_ptr,
    added_ptr,
    out_ptr,
    entries,
    first,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Add up the weighted outputs of a token's entries on this rank, in the order of its top-k choice."""
    wait_and_allow_next()
    token = tl.program_id(0)
    column = tl.program_id(1) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    inside = column < WIDTH
    total = tl.zeros([SUM_BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        entry = token * TOP_K + choice
        _, ours = load_slots(expert_slots_ptr, entry, entries, first, NUM_SLOTS)
        part = tl.zeros([SUM_BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            part_ptrs = parts_ptr + (split * entries + entry).to(tl.int64) * WIDTH + column
            part += tl.load(part_ptrs, mask=inside & ours, other=0.0).to(tl.float32)
        total += part * tl.load(shares_ptr + entry)
    row = token.to(tl.int64) * WIDTH + column
    if ADDS:
        total += tl.load(added_ptr + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=inside)

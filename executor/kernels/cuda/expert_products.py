"""The experts of a layer in four kernels, whatever their number: sort, gate and up with activation, down, weighted sum.

Rows are gathered by the sorted entries of `routing`. Nothing returns to the host, so the layer can be part of a CUDA
graph. The result of an entry does not depend on its tile. Many rows may take torch's grouped products instead.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import UNGATED, Activation
from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.product import Scaled, multiply
from penstock.executor.kernels.cuda.routing import load_slots, sort_entries
from penstock.executor.kernels.cuda.rows import gate, quantize
from penstock.executor.kernels.cuda.tiles import expert_splits, expert_tile
from penstock.executor.kernels.eight_bits import are_quantized, make_quantized
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight

Biases = tuple[Tensor | None, Tensor | None]  # of gate and up, and of down
SUM_BLOCK = tl.constexpr(512)  # columns per program of the weighted sum
# Where our tiles have 128 rows, experts in bfloat16 would be multiplied by torch's grouped product. For that the rows of all
# entries are copied, and the activation is a launch of its own. It is off because no GPU has compared both.
USES_GROUPED_MM = False


def fused_experts(
    hidden: Tensor,
    expert_slots: Tensor,
    shares: Tensor,
    gate_up: Weight,
    down: Weight,
    first: int,
    activation: Activation,
    added: Tensor | None = None,
    biases: Biases = (None, None),
    is_fixed: bool = False,
) -> Tensor:
    """Compute the experts of a layer. FP8 weights with few entries are dequantized in registers, and activations stay
    unquantized; with many entries, or with is_fixed, the products are FP8. Other codes are always dequantized."""
    (num_slots, width, inner), entries, (tokens, top_k) = down.shape, expert_slots.numel(), expert_slots.shape
    splits, may_group = 1, USES_GROUPED_MM and not is_fixed
    is_grouped = may_group and _takes_grouped(hidden, entries, gate_up, down, activation, biases)
    if is_grouped:
        order = sort_entries(expert_slots, num_slots, first, 1)
        rows = hidden.index_select(0, order.ids // top_k)
        rows = gate(F.grouped_mm(rows, gate_up.codes.mT, offs=order.ends), activation)
        parts = F.grouped_mm(rows, down.codes.mT, offs=order.ends)
    else:
        x: Scaled = hidden, None
        if gate_up.format is down.format is BLOCKS and (is_fixed or are_quantized(entries, num_slots)):
            x = quantize(hidden)
            inside: Scaled = make_quantized(entries, inner, hidden.device)
        else:
            inside = torch.empty((entries, inner), dtype=hidden.dtype, device=hidden.device), None
        is_coded = gate_up.format.is_packed or down.format.is_packed
        tile = expert_tile(entries, num_slots, x[0].element_size(), is_coded, is_fixed)
        order = sort_entries(expert_slots, num_slots, first, tile.rows)
        if is_coded and not is_fixed and hidden.itemsize < 4:
            splits = expert_splits(entries, width, inner)
        dtype = hidden.dtype if splits == 1 else torch.float32
        parts = torch.empty((splits, entries, width), dtype=dtype, device=hidden.device)
        multiply(
            *(x, gate_up, inside, tile),
            bias=biases[0],
            activation=activation,
            order=order,
            entries_per_row=top_k,
            like=hidden,
        )
        multiply(inside, down, (parts, None), tile, order=order, bias=biases[1], splits=splits)
    assert shares.shape == expert_slots.shape and shares.is_contiguous() and shares.dtype is torch.float32
    assert added is None or (added.is_contiguous() and added.shape == (tokens, width))
    out = torch.empty((tokens, width), dtype=hidden.dtype, device=hidden.device)
    _add_shares[(tokens, triton.cdiv(width, SUM_BLOCK.value))](
        *(parts, expert_slots, order.places, shares, parts if added is None else added, out),
        *(entries, first),
        WIDTH=width,
        TOP_K=top_k,
        NUM_SLOTS=num_slots,
        SPLITS=splits,
        IS_SORTED=is_grouped,
        ADDS=added is not None,
        num_warps=4,
    )
    return out


def _takes_grouped(
    hidden: Tensor, entries: int, gate_up: Weight, down: Weight, activation: Activation, biases: Biases
) -> bool:
    """Tell whether torch's grouped product multiplies. It takes no biases, and rows that begin at 16 bytes."""
    are_narrow = hidden.dtype is gate_up.codes.dtype is down.codes.dtype is torch.bfloat16
    fits = activation not in UNGATED and biases == (None, None) and not any(size % 8 for size in down.shape[1:])
    is_large = expert_tile(entries, len(down.codes), hidden.element_size()).rows == 128
    return are_narrow and fits and is_large and current_card().has_grouped_mm


@kernel
def _add_shares(
    parts_ptr,
    expert_slots_ptr,
    places_ptr,
    shares_ptr,
    added_ptr,
    out_ptr,
    entries,
    first,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_SORTED: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Add up the weighted outputs of a token's entries on this rank, in the order of its top-k choice. The outputs are in
    the order of the entries or, if IS_SORTED, at their places."""
    wait_and_allow_next()
    token = tl.program_id(0)
    column = tl.program_id(1) * SUM_BLOCK + tl.arange(0, SUM_BLOCK)
    inside = column < WIDTH
    total = tl.zeros([SUM_BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        entry = token * TOP_K + choice
        _, ours = load_slots(expert_slots_ptr, entry, entries, first, NUM_SLOTS)
        place = tl.load(places_ptr + entry) if IS_SORTED else entry
        part = tl.zeros([SUM_BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            part_ptrs = parts_ptr + (split * entries + place).to(tl.int64) * WIDTH + column
            part += tl.load(part_ptrs, mask=inside & ours, other=0.0).to(tl.float32)
        total += part * tl.load(shares_ptr + entry)
    row = token.to(tl.int64) * WIDTH + column
    if ADDS:
        total += tl.load(added_ptr + row, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, total.to(out_ptr.dtype.element_ty), mask=inside)

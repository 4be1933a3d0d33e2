"""MoE routing: the choice of each token's experts from router logits, and sorting of the choices by expert.

A token's choice of a slot is an *entry*. Entries are sorted by slot and padded to whole tiles, so that all rows of a
tile read one expert's weights. Rows are not copied: the products gather them by the sorted list of entries. The
position of an entry depends only on the choices, not on the order in which programs run.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels.card import current_card
from penstock.executor.kernels.cuda.launch import kernel, wait_and_allow_next
from penstock.executor.kernels.cuda.tiles import power_of_2
from penstock.executor.moe_spec import MoeSpec

TOKENS = tl.constexpr(4)  # tokens per program of `_choose`: one for each warp
CHUNK_ENTRIES = 512  # entries per program
CHUNKS_AT_ONCE = 8
PAIRS = 8192  # (entry, slot) pairs that a program compares at once


class SortedEntries(NamedTuple):
    ids: Tensor  # [tiles * rows] int32: entries by slot; padding is undefined, or 0 with tiles of one row
    tiles: Tensor  # [tiles, 2] int32: slot and number of entries of each tile; 0 entries at the end
    # Only with tiles of one row, which need no padding between slots; then `tiles` is undefined:
    places: Tensor  # [T * k] int32: the position of each entry in `ids`; undefined for entries of other slots
    ends: Tensor  # [slots] int32: the position behind the last entry of each slot


def choose_experts(logits: Tensor, bias: Tensor | None, moe: MoeSpec, num_shared: int = 0) -> tuple[Tensor, Tensor]:
    """Choose the top-k experts of each token; ties prefer the lower expert id."""
    tokens, choices = len(logits), moe.top_k + num_shared
    assert logits.dtype is torch.float32 and logits.stride(1) == 1
    assert logits.shape[1] == moe.num_experts + moe.has_shared_gate
    assert bias is None or (bias.dtype is torch.float32 and bias.is_contiguous())
    ids = torch.empty((tokens, choices), dtype=torch.int32, device=logits.device)
    shares = torch.empty((tokens, choices), dtype=torch.float32, device=logits.device)
    _choose[(triton.cdiv(tokens, TOKENS.value),)](
        *(logits, logits if bias is None else bias, ids, shares),
        *(tokens, moe.renormalize_eps, float(moe.scale)),
        STRIDE=logits.stride(0),
        MOE=moe,
        NUM_SHARED=num_shared,
        BIASED=bias is not None,
        num_warps=4,
    )
    return ids, shares


def sort_entries(slots: Tensor, num_slots: int, first: int, rows: int) -> SortedEntries:
    """Sort the entries of slots first … first + num_slots - 1, from slots [T, k], into tiles of `rows`."""
    assert slots.is_contiguous()
    entries = slots.numel()
    # Every slot may end with a partially filled tile, and no slot has a tile without an entry.
    num_tiles = entries // rows + min(entries, num_slots)
    ids = (torch.zeros if rows == 1 else torch.empty)(num_tiles * rows, dtype=torch.int32, device=slots.device)
    tiles = torch.empty((num_tiles, 2), dtype=torch.int32, device=slots.device)
    bins = max(16, power_of_2(num_slots))
    pairs = PAIRS if current_card().capability < (12, 0) else PAIRS // 2  # which spills there
    chunks = max(1, triton.cdiv(entries, CHUNK_ENTRIES))
    counts = places = ends = tiles  # placeholders that are neither read nor written
    if rows == 1:
        places, ends = (torch.empty(size, dtype=torch.int32, device=slots.device) for size in (entries, num_slots))
    given = {"NUM_SLOTS": num_slots, "BINS": bins, "CHUNK_ENTRIES": CHUNK_ENTRIES}
    if chunks > 1:
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=slots.device)
        _count[(chunks,)](slots, counts, entries, first, num_warps=4, **given)
    _scatter_entries[(chunks,)](
        *(slots, counts, ids, tiles, places, ends),
        *(entries, first, num_tiles if rows > 1 else 0, chunks),
        ROWS=rows,
        AT_ONCE=CHUNKS_AT_ONCE,
        PART=max(16, pairs // bins),
        IS_ALONE=chunks == 1,
        num_warps=8,
        **given,
    )
    return SortedEntries(ids, tiles, places, ends)


@kernel
def _choose(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    shares_ptr,
    tokens,
    eps,
    scale,
    STRIDE: tl.constexpr,
    MOE: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """Compute the scores of some tokens, each group padded to a power of two, and take the best one top-k times."""
    wait_and_allow_next()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    token = tl.minimum(token, tokens - 1).to(tl.int64)
    EXPERTS: tl.constexpr = MOE.num_experts
    TOP_K: tl.constexpr = MOE.top_k
    GROUPS: tl.constexpr = MOE.num_groups
    each: tl.constexpr = EXPERTS // GROUPS
    EXPERT_BINS: tl.constexpr = triton.next_power_of_2(each)
    GROUP_BINS: tl.constexpr = triton.next_power_of_2(GROUPS)
    CHOICES: tl.constexpr = triton.next_power_of_2(TOP_K + NUM_SHARED)
    position = tl.arange(0, GROUP_BINS * EXPERT_BINS)
    expert = position // EXPERT_BINS * each + position % EXPERT_BINS
    is_expert = (position % EXPERT_BINS < each) & (position // EXPERT_BINS < GROUPS)
    logits_ptrs = logits_ptr + token[:, None] * STRIDE
    scores = tl.load(logits_ptrs + expert[None, :], mask=is_expert[None, :], other=-float("inf"))
    if MOE.scoring == "sigmoid":
        scores = 1.0 / (1.0 + tl.exp(-scores))
    else:
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores /= tl.sum(scores, 1)[:, None]
    wanted = tl.where(is_expert[None, :], scores, -float("inf"))
    if BIASED:  # the bias affects the choice, never the share
        wanted += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    if GROUPS > 1:
        wanted = _best_groups(wanted, BIASED, MOE.top_groups, GROUP_BINS, EXPERT_BINS)
    choice = tl.arange(0, CHOICES)
    ids = tl.zeros([TOKENS, CHOICES], tl.int32)
    shares = tl.zeros([TOKENS, CHOICES], tl.float32)
    for index in range(TOP_K):
        best = tl.argmax(wanted, 1)
        is_best = position[None, :] == best[:, None]
        is_choice = (choice == index)[None, :]
        shares = tl.where(is_choice, tl.sum(tl.where(is_best, scores, 0.0), 1)[:, None], shares)
        best = best // EXPERT_BINS * each + best % EXPERT_BINS
        ids = tl.where(is_choice, tl.minimum(best, EXPERTS - 1)[:, None], ids)  # a valid id even if logits are NaN
        wanted = tl.where(is_best, -float("inf"), wanted)
    if MOE.renormalize:
        shares /= tl.sum(shares, 1)[:, None] + eps
    shares *= scale
    if NUM_SHARED > 0:
        is_shared = (choice >= TOP_K)[None, :]
        share = tl.full([TOKENS], 1.0, tl.float32)
        if MOE.has_shared_gate:
            share /= 1.0 + tl.exp(-tl.load(logits_ptr + token * STRIDE + EXPERTS))
        shares = tl.where(is_shared, share[:, None], shares)
        ids = tl.where(is_shared, EXPERTS - TOP_K + choice[None, :], ids)
    out = token[:, None] * (TOP_K + NUM_SHARED) + choice[None, :]
    inside = is_token[:, None] & (choice < TOP_K + NUM_SHARED)[None, :]
    tl.store(ids_ptr + out, ids, mask=inside)
    tl.store(shares_ptr + out, shares, mask=inside)


@triton.jit
def _best_groups(
    scores, BIASED: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BINS: tl.constexpr, EXPERT_BINS: tl.constexpr
):
    """Keep only the best groups. A group's score is its best expert's or, with a bias, the sum of its best two."""
    grouped = tl.reshape(scores, [TOKENS, GROUP_BINS, EXPERT_BINS])
    best = tl.max(grouped, 2)
    if BIASED:
        is_first = tl.arange(0, EXPERT_BINS)[None, None, :] == tl.argmax(grouped, 2)[:, :, None]
        best += tl.max(tl.where(is_first, -float("inf"), grouped), 2)
    group = tl.arange(0, GROUP_BINS)
    chosen = tl.zeros([TOKENS, GROUP_BINS], tl.int1)
    for _ in range(TOP_GROUPS):
        is_best = group[None, :] == tl.argmax(best, 1)[:, None]
        chosen = chosen | is_best
        best = tl.where(is_best, -float("inf"), best)
    grouped = tl.where(chosen[:, :, None], grouped, -float("inf"))
    return tl.reshape(grouped, [TOKENS, GROUP_BINS * EXPERT_BINS])


@triton.jit
def load_slots(slots_ptr, entry, entries, first, NUM_SLOTS: tl.constexpr):
    """Return the entry's slot relative to this rank's first one, or -1, and whether this rank has the slot."""
    slot = tl.load(slots_ptr + entry, mask=entry < entries, other=-1).to(tl.int32) - first
    ours = (entry < entries) & (slot >= 0) & (slot < NUM_SLOTS)
    return tl.where(ours, slot, -1), ours


@kernel
def _count(
    slots_ptr,
    counts_ptr,
    entries,
    first,
    NUM_SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK_ENTRIES: tl.constexpr,
):
    """Count the entries of each slot in a chunk."""
    wait_and_allow_next()
    entry = tl.program_id(0) * CHUNK_ENTRIES + tl.arange(0, CHUNK_ENTRIES)
    slot, ours = load_slots(slots_ptr, entry, entries, first, NUM_SLOTS)
    counts = tl.histogram(tl.maximum(slot, 0), BINS, mask=ours)
    tl.store(counts_ptr + tl.program_id(0) * BINS + tl.arange(0, BINS), counts)


@kernel
def _scatter_entries(
    slots_ptr,
    counts_ptr,
    ids_ptr,
    tiles_ptr,
    places_ptr,
    ends_ptr,
    entries,
    first,
    num_tiles,
    num_chunks,
    NUM_SLOTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK_ENTRIES: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PART: tl.constexpr,
    IS_ALONE: tl.constexpr,
):
    """Store the entries of a chunk at their sorted positions, and some of the tiles. Every program computes the start
    of each slot from the counts of all chunks."""
    wait_and_allow_next()
    chunk = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    if IS_ALONE:
        slots, are_ours = load_slots(slots_ptr, tl.arange(0, CHUNK_ENTRIES), entries, first, NUM_SLOTS)
        total += tl.histogram(tl.maximum(slots, 0), BINS, mask=are_ours)
    else:
        for start in range(0, num_chunks, AT_ONCE):
            index = start + tl.arange(0, AT_ONCE)
            counts_ptrs = counts_ptr + index[:, None] * BINS + bins[None, :]
            counts = tl.load(counts_ptrs, mask=(index < num_chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((index < chunk)[:, None], counts, 0), 0)
    tiles = (total + ROWS - 1) // ROWS
    ends = tl.cumsum(tiles, 0)
    if ROWS == 1:
        tl.store(ends_ptr + bins, ends, mask=(bins < NUM_SLOTS) & (chunk == 0))
    place = (ends - tiles) * ROWS + before  # position of each slot's next entry
    for start in range(0, tl.minimum(CHUNK_ENTRIES, entries - chunk * CHUNK_ENTRIES), PART):
        entry = chunk * CHUNK_ENTRIES + start + tl.arange(0, PART)
        slot, ours = load_slots(slots_ptr, entry, entries, first, NUM_SLOTS)
        is_slot = (slot[:, None] == bins[None, :]).to(tl.int32)
        places = tl.sum(is_slot * (place[None, :] + tl.cumsum(is_slot, 0) - 1), 1)
        tl.store(ids_ptr + places, entry, mask=ours)
        if ROWS == 1:
            tl.store(places_ptr + entry, places, mask=ours)
        place += tl.sum(is_slot, 0)
    for start in range(chunk * PART, num_tiles, num_chunks * PART):
        tile = start + tl.arange(0, PART)
        slot = tl.sum((ends[None, :] <= tile[:, None]).to(tl.int32), 1)
        is_slot = (slot[:, None] == bins[None, :]).to(tl.int32)
        passed = (tile - tl.sum(is_slot * (ends - tiles)[None, :], 1)) * ROWS
        left = tl.sum(is_slot * total[None, :], 1) - passed
        tl.store(tiles_ptr + 2 * tile, slot, mask=tile < num_tiles)
        tl.store(tiles_ptr + 2 * tile + 1, tl.minimum(tl.maximum(left, 0), ROWS), mask=tile < num_tiles)

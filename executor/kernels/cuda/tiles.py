"""Tile sizes, warps and pipeline stages of the kernels, as plain functions of shapes and of the current card.

Nothing is tuned while requests wait. A choice that depends on the rows, tokens or positions of a step changes only
where that number crosses a power of two, so `sizes` covers all choices, and all of them run at startup.

The numbers come from compiling for compute capability 9.0 (no spills, within 227 KiB of shared memory, warpgroup tensor
core instructions); those for prompts, decoding and products of few rows are the fastest of several on an H100. Cards
whose products read registers, or with 99 KiB of shared memory, use smaller tiles. tests/executor/kernels compiles all of
them.
"""

from typing import NamedTuple

from penstock.executor.kernels.card import current_card

# Programs that a product of few rows is split for where the order of the sum is fixed; products of more tiles are not.
FIXED_PROGRAMS = 128
MIN_DEPTH = 512  # of a split of a product's depth: below this, adding up splits costs more than it gains
FIXED_DEPTH = 1024  # the same where the order of the sum is fixed
# Average entries per expert for which codes get a tile of 32 rows, whose products pass through registers, without a
# barrier in each step; (1, 0) is none. Compiled only: no GPU has compared it with the tiles of 16 and 64 rows.
MIDDLE_ENTRIES = 8, 32
MAX_EXPERT_SPLITS = 4  # of the depth of the experts' down product; compiled only


class Tile(NamedTuple):
    rows: int  # M of the tile's matrix product
    columns: int  # N of the tile's matrix product
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, int]:
        """Return the launch options and constants of a kernel with such tiles."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.num_warps, "num_stages": self.num_stages}


def decode_tile(group: int, head_dim: int, itemsize: int, page_itemsize: int) -> Tile:
    """rows: query heads that share a key-value head; columns: positions per step."""
    rows = max(16, power_of_2(group))
    if head_dim > 256:
        return Tile(rows, 16, 4, 1) if itemsize == 4 else Tile(rows, 16, 8, 3)
    if itemsize == 4:
        return Tile(rows, 16 if head_dim > 128 else 32, 4, 2)
    if not current_card().has_wide_products:
        # Cards after 8.0 have little shared memory.
        stages = 3 if current_card().capability == (8, 0) or page_itemsize == 1 else 2
        return Tile(rows, 32, 4, stages) if head_dim <= 128 else Tile(rows, 16, 8, 2)
    return Tile(rows, 32 if head_dim > 128 else 64 if head_dim > 64 else 128, 4, 3)


def prefill_tile(head_dim: int, itemsize: int, page_itemsize: int) -> Tile:
    """rows: (token, head) pairs; 64 or more of them make a warpgroup product (wgmma)."""
    if head_dim > 256 and itemsize == 4:
        return Tile(16, 16, 8, 1)
    if itemsize == 4:
        return Tile(32, 16 if head_dim > 128 else 32, 4, 1)
    is_wide = current_card().has_wide_products
    if head_dim > 256:
        return Tile(32, 32, 8, 2)  # the accumulator of a warpgroup product would not fit into registers
    if head_dim > 128:
        return Tile(128 if is_wide else 64, 32, 8, 2)
    if head_dim == 128 and page_itemsize > 1 and current_card().capability[0] == 9:
        return Tile(128, 128, 8, 3)
    return Tile(128, 64 if is_wide else 32, 8, 3)


def latent_tile(num_heads: int, is_single: bool, itemsize: int, page_itemsize: int) -> Tile:
    """rows: (token, head) pairs, of one token if is_single; columns: positions per step."""
    if itemsize == 4:
        return Tile(16, 16, 8, 1)
    is_wide, has_fp8_pages = current_card().has_wide_products, page_itemsize == 1
    # FP8 values pass through registers on their way to a product, and many rows leave none for them.
    # Two stages leave no copy in flight while a block is computed.
    stages = 3 if current_card().shared_bytes > 100 << 10 else 2
    if not is_single:
        if has_fp8_pages or current_card().capability[0] != 9:  # spills, or takes too much shared memory
            stages = 2
        return Tile(64 if is_wide and not has_fp8_pages else 32, 32 if is_wide or not has_fp8_pages else 16, 8, stages)
    if has_fp8_pages:
        return Tile(16, 32, 8, stages)
    if num_heads > 16:
        return Tile(32, 32, 8, stages)
    return Tile(16, 32, 4 if is_wide else 8, stages)


def expanded_tile(itemsize: int) -> Tile:
    """rows: tokens; columns: positions. All popular models with latents have key heads of 192."""
    if itemsize == 4:
        return Tile(32, 16, 8, 1)
    return Tile(128, 64, 8, 3) if current_card().has_wide_products else Tile(64, 64, 8, 2)


def expert_tile(entries: int, num_slots: int, itemsize: int, is_coded: bool = False, is_fixed: bool = False) -> Tile:
    """Choose by the average number of entries per expert. With few entries, reading weights is the bottleneck, so all
    multiprocessors should read. is_coded: the weights are codes that are dequantized in registers; on cards whose
    products also read registers, tiles of many rows are smaller then. is_fixed: small batches get no tile of their own
    (see `fixed_tile`)."""
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    if itemsize == 1:  # 128 columns: the quantization group of the up projection's output
        return Tile(64, 128, 8, 3 if current_card().has_wide_products else 2)
    low, high = MIDDLE_ENTRIES
    if is_coded and not is_fixed and low * num_slots <= entries <= high * num_slots:
        return Tile(32, 64, 8, 3)
    if entries < (32 if is_coded else 16) * num_slots and not is_fixed:
        # From 10.0 on, the compiler spills with four warps.
        warps = 8 if current_card().capability >= (10, 0) else 4
        return Tile(16, 32, warps, 4) if is_coded else Tile(16, 32, 2, 6)
    if is_coded and not current_card().has_wide_products:
        return Tile(64, 32, 4, 3)  # with eight warps MXFP4 codes spill
    return Tile(64, 64, 4, 3) if entries <= 64 * num_slots else Tile(128, 64, 8, 3)


def depth_step(itemsize: int) -> int:
    """Return the depth per step; with FP8 on both sides, a block of scales."""
    return 128 if itemsize == 1 else 32 if itemsize == 4 else 64


def coded_tile(rows: int, itemsize: int, is_fixed: bool = False) -> Tile:
    """Choose for a linear layer with a weight of codes. FP8 inputs are multiplied as they are, all others by numbers that
    pass through registers: on cards whose products also read registers, tiles of many rows are smaller then."""
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    if rows <= 32 and not is_fixed:
        return Tile(16 if rows <= 16 else 32, 64, 4, 3)
    if itemsize > 1 and not current_card().has_wide_products:
        return Tile(64, 64, 8, 3)
    return Tile(64, 64, 4, 3) if rows <= 64 else Tile(128, 64 if is_fixed else 128, 8, 3)


def depth_splits(programs: int, depth: int, rows: int) -> int:
    """Return the number of splits of a product's depth for tiles of so many rows: all programs must run at once, of small
    tiles several on each multiprocessor, and be deep enough to pay off."""
    at_once = min(4, max(1, 128 // rows)) * current_card().num_processors
    splits = 1
    while 2 * splits * programs <= at_once and 2 * splits * MIN_DEPTH <= depth:
        splits *= 2
    return splits


def expert_splits(entries: int, width: int, depth: int) -> int:
    """Return the number of splits of the depth of an experts' down product by codes. Where every expert has few entries,
    an entry has a tile of its own, half as wide as a linear layer's."""
    return min(MAX_EXPERT_SPLITS, depth_splits(entries * -(-width // 64), depth, 16))


def fixed_tile(rows: int, width: int, depth: int, itemsize: int) -> tuple[Tile, int]:
    """Return the tile and the number of depth splits, by the weight's shape alone. Tiles for few and many rows differ
    in their number of warpgroups, which affects no sum (tests/executor/kernels/test_triton_compiled.py)."""
    if itemsize == 4:
        tile = Tile(32, 32, 4, 2)
    else:
        columns, stages = 64 if width <= 4096 else 128, 4 if current_card().has_wide_products else 3
        tile = Tile(64, columns, 4, stages) if rows <= 64 else Tile(128, columns, 8, 3)
    splits = 1
    while splits * -(-width // tile.columns) < FIXED_PROGRAMS and 2 * splits * FIXED_DEPTH <= depth:
        splits *= 2
    return tile, splits


def fixed_attention_tile(head_dim: int, group: int, itemsize: int, is_single: bool) -> Tile:
    """rows: (token, head) pairs. Tiles for `is_single` and others differ only in their number of warpgroups."""
    tile = prefill_tile(head_dim, itemsize, 1)
    if itemsize < 4 and head_dim <= 128:
        tile = Tile(64, 64, 4, 3) if is_single else Tile(128, 64, 8, 3)
        if not current_card().has_wide_products:
            tile = Tile(64, 16, 8, 2)  # with 32 columns it spills on 8.9
    elif itemsize < 4 and head_dim > 256:
        tile = Tile(32, 16, 8, 2)
    return tile._replace(rows=max(tile.rows, power_of_2(group)))


def rope_tile(kv_heads: int, width: int) -> Tile:
    """rows: tokens; columns: heads, at most the number of key-value heads; queries and keys have separate programs."""
    heads = min(power_of_2(kv_heads), max(1, 1024 // width))
    return Tile(max(1, 1024 // (heads * width)), heads, 4, 1)


def gate_tile(width: int) -> Tile:
    """Return a tile of 1,024 elements: as many columns as divide the row, and the rows that then fit."""
    columns = min(1024, max(64, width & -width))
    return Tile(1024 // columns, columns, 4, 1)


def row_warps(width: int) -> int:
    """Return the number of warps for a kernel that keeps a row of `width` in registers."""
    return 1 if width <= 256 else 4 if width <= 4096 else 8 if width <= 8192 else 16


def sizes(limit: int) -> list[int]:
    """Return sizes of 1 … limit, largest first, that together trigger every choice made by a number up to `limit`."""
    return sorted({limit, *(1 << power for power in range(limit.bit_length()))}, reverse=True)


def power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()

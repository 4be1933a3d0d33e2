"""Which tile sizes, warps and pipeline stages a kernel is launched with: plain functions of shapes and of the card that it
is launched on, decided at launch.

Nothing is decided while requests wait: a choice that depends on how many rows, tokens or positions a step has lasts
until that number has doubled at least, so that `sizes` names all there can be, and the start runs them.

The numbers come from compiling for compute capability 9.0 (no spills, within 227 KiB of shared memory, tensor-core
instructions of the wide kind) and from published measurements; those of `decode_tile` and `few_rows_tile` from an H100. Cards whose products
read registers, or with 99 KiB of shared memory, take smaller tiles. tests/executor/kernels compiles every one of them.
"""

from typing import NamedTuple

from penstock.executor.kernels.card import current_card

FIXED_PROGRAMS = (
    128  # that a product of few rows is cut for, whatever the card, and beyond which one of many is not cut
)
MIN_DEPTH = 1024  # of a product whose depth is cut: below this, putting parts together costs more than it gains


class Tile(NamedTuple):
    rows: int  # M of the tile's matrix product
    columns: int  # N of it
    num_warps: int
    num_stages: int
    programs: int = 1  # that a processor holds at once, where as many are launched as the GPU holds

    def constants(self) -> dict[str, int]:
        """What the launch of a kernel of such tiles is given by name."""
        return {"ROWS": self.rows, "COLUMNS": self.columns, "num_warps": self.num_warps, "num_stages": self.num_stages}


def decode_tile(num_rows: int, group: int, head_dim: int, itemsize: int, page_itemsize: int) -> Tile:
    """rows: the query heads that share a key-value head; columns: positions at a time. `num_rows`: of the batch."""
    rows = max(16, power_of_2(group))
    if head_dim > 256:
        return Tile(rows, 16, 4, 1, 1) if itemsize == 4 else Tile(rows, 16, 8, 2, 1)
    if itemsize == 4:
        return Tile(rows, 16 if head_dim > 128 else 32, 4, 2, 2)
    if not current_card().has_wide_products:
        return Tile(rows, 32, 4, 2, 3) if head_dim <= 128 else Tile(rows, 16, 8, 2, 2)
    if head_dim > 128:
        return Tile(rows, 32, 4, 3, 2)
    # On an H100, at 1,024 positions of 8 heads, beside the last of these: 8.2 µs rather than 9.7 for one row, 18.3 rather
    # than 21.4 for 8, 52.5 rather than 56.5 for 32; it is the fastest for 256.
    if num_rows <= 2 and page_itemsize > 1:
        return Tile(rows, 128, 4, 3, 1)
    if num_rows <= 64 and page_itemsize > 1:
        return Tile(rows, 32, 2, 3, 4)
    return Tile(rows, 64, 4, 3, 2 if page_itemsize == 1 else 3)


def prefill_tile(head_dim: int, itemsize: int) -> Tile:
    """rows: pairs of a token and one of its heads; 64 or more of them make a warpgroup's product (wgmma)."""
    if head_dim > 256 and itemsize == 4:
        return Tile(16, 16, 8, 1)
    if itemsize == 4:
        return Tile(32, 16 if head_dim > 128 else 32, 4, 1)
    is_wide = current_card().has_wide_products
    if head_dim > 256:
        return Tile(32, 32, 8, 2)  # sums of a warpgroup's product do not fit into its registers
    if head_dim > 128:
        return Tile(128 if is_wide else 64, 32, 8, 2)
    return Tile(128, 64 if is_wide else 32, 8, 3)


def latent_tile(num_heads: int, is_single: bool, itemsize: int, page_itemsize: int) -> Tile:
    """rows: pairs of a token and a head, of the one token where it stands alone; columns: positions at a time."""
    if itemsize == 4:
        return Tile(16, 16, 8, 1, 2)
    is_wide, is_narrow = current_card().has_wide_products, page_itemsize == 1
    # Eight bits pass through registers on their way to a product, and many rows leave none for them.
    if not is_single:
        return Tile(64 if is_wide and not is_narrow else 32, 32 if is_wide or not is_narrow else 16, 8, 2)
    if is_narrow:
        return Tile(16, 32, 8, 2)
    return Tile(16, 32, 4, 2, 2 if is_wide else 1) if num_heads <= 16 else Tile(32, 32, 8, 2)


def expanded_tile(itemsize: int) -> Tile:
    """rows: tokens; columns: positions. Keys of 192, as in all models with latents that people serve."""
    if itemsize == 4:
        return Tile(32, 16, 8, 1)
    return Tile(128 if current_card().has_wide_products else 64, 64, 8, 2)


def expert_tile(
    entries: int, num_slots: int, columns: int, itemsize: int, weight_itemsize: int, is_fixed: bool = False
) -> Tile:
    """By the entries that an expert has on average: few of them are bound by reading weights, whatever the tile, and all
    processors are to read. Its rows do not depend on `columns`, how many the product has. Fixed (`fixed_tile`): few
    have no instruction of their own."""
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    if itemsize == 1:  # 128 columns: a block of the scales that up writes
        return Tile(64, 128, 8, 3 if current_card().has_wide_products else 2)
    if entries <= 16 * num_slots and not is_fixed:
        width, programs = 128 if weight_itemsize == 1 else 64, min(entries, num_slots) * columns
        while width > 32 and programs < width * current_card().num_processors:
            width //= 2
        return Tile(16, width, 4, 3 if width == 128 else 4 if width == 64 else 6)
    return Tile(64, 64, 4, 3) if entries <= 64 * num_slots else Tile(128, 64, 8, 3)


def expert_step(itemsize: int) -> int:
    """Of an expert's depth. Eight bits on both sides: a block of scales."""
    return 128 if itemsize == 1 else 32 if itemsize == 4 else 64


def block_linear_tile(rows: int, width: int, is_fixed: bool = False) -> Tile:
    """columns: at most the 128 that share a scale. For few rows all processors are to read weights."""
    if rows <= 16 and not is_fixed:
        return Tile(16, 64, 4, 4) if width >= 64 * current_card().num_processors else Tile(16, 32, 4, 6)
    return Tile(64, 64, 4, 4) if rows <= 64 else Tile(128, 64 if is_fixed else 128, 8, 3)


def packed_tile(rows: int, width: int, itemsize: int, is_fixed: bool = False) -> Tile:
    """With codes, which pass through registers: where a product's factors do, too, tiles of many rows are smaller."""
    if itemsize == 4:
        return Tile(16, 32, 4, 2)
    if rows <= 16 and not is_fixed:
        return Tile(16, 64 if width >= 64 * current_card().num_processors else 32, 4, 4)
    if not current_card().has_wide_products:
        return Tile(64, 64, 8, 3)
    return Tile(64, 64, 4, 3) if rows <= 64 else Tile(128, 64 if is_fixed else 128, 8, 3)


def packed_expert_tile(entries: int, num_slots: int, columns: int, itemsize: int, is_fixed: bool = False) -> Tile:
    """As `expert_tile`; its rows do not depend on `columns`."""
    if (is_fixed or entries > 16 * num_slots) and itemsize < 4:
        if not current_card().has_wide_products:
            return Tile(64, 32, 8, 3)
        return Tile(64, 64, 4, 3) if entries <= 64 * num_slots else Tile(128, 64, 8, 3)
    tile = expert_tile(entries, num_slots, columns, itemsize, 2)
    # From 10.0 on the compiler spills with four warps.
    return tile._replace(num_warps=8) if current_card().capability >= (10, 0) else tile


def depth_splits(programs: int, depth: int) -> int:
    """Into how many parts a product's depth is cut: as long as all of them run at once, and have a part worth joining."""
    splits = 1
    while 2 * splits * programs <= current_card().num_processors and 2 * splits * MIN_DEPTH <= depth:
        splits *= 2
    return splits


def fixed_tile(rows: int, width: int, depth: int, itemsize: int) -> tuple[Tile, int]:
    """And into how many parts the depth is cut, by the weight's shape alone. Tiles of few rows and of many differ in how
    many warpgroups they have, and in nothing that reaches a sum (tests/executor/kernels/test_triton_compiled.py)."""
    if itemsize == 4:
        tile = Tile(32, 32, 4, 2)
    else:
        columns, stages = 64 if width <= 4096 else 128, 4 if current_card().has_wide_products else 3
        tile = Tile(64, columns, 4, stages) if rows <= 64 else Tile(128, columns, 8, 3)
    splits = 1
    while splits * -(-width // tile.columns) < FIXED_PROGRAMS and 2 * splits * MIN_DEPTH <= depth:
        splits *= 2
    return tile, splits


def fixed_attention_tile(head_dim: int, group: int, itemsize: int, is_single: bool) -> Tile:
    """rows: pairs of a token and one of its heads. Of `is_single` as above: fewer warpgroups, and no other difference."""
    tile = prefill_tile(head_dim, itemsize)
    if itemsize < 4 and head_dim <= 128:
        tile = Tile(64, 64, 4, 3, 2) if is_single else Tile(128, 64, 8, 3)
        if not current_card().has_wide_products:
            tile = Tile(64, 32, 8, 2)
    elif itemsize < 4 and head_dim > 256:
        tile = Tile(32, 16, 8, 2)
    return tile._replace(rows=max(tile.rows, power_of_2(group)))


def rope_tile(kv_heads: int, width: int) -> Tile:
    """rows: tokens; columns: heads, as many as there are key-value heads, since these and queries have programs apart."""
    heads = min(power_of_2(kv_heads), max(1, 1024 // width))
    return Tile(max(1, 1024 // (heads * width)), heads, 4, 1)


def gate_tile(width: int) -> Tile:
    """1,024 numbers: as many columns as divide the row, and so many rows as that leaves room for."""
    columns = min(1024, max(64, width & -width))
    return Tile(1024 // columns, columns, 4, 1)


class FewRowsTile(NamedTuple):
    columns: int  # rows of the weight that a program has
    depth: int  # of each, at a time
    unroll: int  # such pieces whose loads are in flight together
    num_warps: int


def few_rows_tile(width: int) -> FewRowsTile:
    """The fastest of eleven that were measured on an H100 at the shapes of Qwen3-0.6B."""
    return FewRowsTile(4 if width >= 2048 else 2, 1024, 4, 4)


def row_warps(width: int) -> int:
    """For a kernel that keeps a row of `width` in registers."""
    return 1 if width <= 256 else 4 if width <= 4096 else 8 if width <= 8192 else 16


def sizes(limit: int) -> list[int]:
    """Those of 1 … limit, largest first, that between them meet every choice made by a number up to `limit`."""
    return sorted({limit, *(1 << power for power in range(limit.bit_length()))}, reverse=True)


def power_of_2(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, n - 1).bit_length()

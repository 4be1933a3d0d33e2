"""Addresses of positions' vectors in the pages of a KV cache."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class PageLayout(NamedTuple):
    """The layout of pages [pages, cells, width]; a kernel constant, because constant strides allow wide loads."""

    cells: int
    page_stride: int
    cell_stride: int


def layout_of(pages: Tensor) -> PageLayout:
    page_stride, cell_stride, element = pages.stride()
    assert element == 1
    return PageLayout(pages.shape[1], page_stride, cell_stride)


@triton.jit
def page_numbers(table_ptr, position, inside, PAGES: tl.constexpr):
    """Return the number of each position's page; 0 outside."""
    return tl.load(table_ptr + position // PAGES.cells, mask=inside, other=0)


@triton.jit
def page_offsets(page, position, PAGES: tl.constexpr):
    """Return the offset of each position's vector in the pages, in elements. A cache may exceed 2 ** 31: 64 bits."""
    return page.to(tl.int64) * PAGES.page_stride + position % PAGES.cells * PAGES.cell_stride


@triton.constexpr_function
def block_of(size):
    """Return the block size for `size` elements in a product: a power of two of at least 16."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def load_inside(ptrs, mask, IS_WHOLE: tl.constexpr):
    """Load with zeros outside the mask; IS_WHOLE: the caller knows that nothing is outside, so no mask is needed."""
    if IS_WHOLE:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def cell_offset(kv_cell, PAGES: tl.constexpr):
    """Return the offset of a KV cell, whose number is page · cells per page + cell in the page."""
    return kv_cell // PAGES.cells * PAGES.page_stride + kv_cell % PAGES.cells * PAGES.cell_stride

"""Where the vectors of positions lie in the pages of a cache."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class PageLayout(NamedTuple):
    """Of pages [pages, slots, width]; a constant of kernels, which makes wide loads possible."""

    slots: int
    page_stride: int
    slot_stride: int


def layout_of(pages: Tensor) -> PageLayout:
    page_stride, slot_stride, element = pages.stride()
    assert element == 1
    return PageLayout(pages.shape[1], page_stride, slot_stride)


@triton.jit
def page_rows(table_ptr, position, inside, PAGES: tl.constexpr):
    """Where each position's vector begins in the pages, in elements: 64 bits, a cache may be longer than 2 ** 31."""
    page = tl.load(table_ptr + position // PAGES.slots, mask=inside, other=0).to(tl.int64)
    return page * PAGES.page_stride + position % PAGES.slots * PAGES.slot_stride


@triton.constexpr_function
def block_of(size):
    """How long a side of a product is that has `size` numbers: a power of two, of which there are no small products."""
    return max(16, triton.next_power_of_2(size))


@triton.jit
def load_inside(ptrs, mask, IS_WHOLE: tl.constexpr):
    """Zero outside the mask; without one where the caller knows that nothing is outside."""
    if IS_WHOLE:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=mask, other=0.0)


@triton.jit
def slot_place(slot, PAGES: tl.constexpr):
    """Likewise of a slot: its page's number times the slots of a page, and its own within."""
    return slot // PAGES.slots * PAGES.page_stride + slot % PAGES.slots * PAGES.slot_stride

"""In-place penalties and grammar masks of logits on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels import IN_PROMPT
from penstock.executor.kernels.cuda.launch import kernel

BLOCK = tl.constexpr(2048)  # logits per program
PROMPT_FLAG = tl.constexpr(IN_PROMPT)


def penalize(logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, coefficients: Tensor) -> None:
    num, vocab_size = len(rows), counts.shape[1]
    assert logits.stride(1) == 1 and logits.shape[1] >= vocab_size
    assert counts.is_contiguous() and counts.dtype == torch.int32
    assert all(index.shape == (num,) and index.is_contiguous() for index in (rows, slots))
    assert all(index.dtype == torch.int64 for index in (rows, slots))
    assert coefficients.shape == (num, 3) and coefficients.is_contiguous() and coefficients.dtype == torch.float32
    _penalize[num, triton.cdiv(vocab_size, BLOCK.value)](
        logits, rows, slots, counts, coefficients, STRIDE=logits.stride(0), VOCAB=vocab_size
    )


def mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    num, vocab_size = len(rows), logits.shape[1]
    assert logits.stride(1) == 1
    assert rows.shape == (num,) and rows.is_contiguous() and rows.dtype == torch.int64
    assert masks.is_contiguous() and masks.dtype == torch.int32
    assert len(masks) == num and 32 * masks.shape[1] >= vocab_size
    _mask[num, triton.cdiv(vocab_size, BLOCK.value)](
        logits, rows, masks, STRIDE=logits.stride(0), WORDS=masks.shape[1], VOCAB=vocab_size
    )


@kernel
def _penalize(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    coefficients_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += tl.load(rows_ptr + index) * STRIDE + token
    count = tl.load(counts_ptr + tl.load(slots_ptr + index) * VOCAB + token, mask=token < VOCAB, other=0)
    is_seen = count != 0
    x = tl.load(logits_ptr, mask=is_seen, other=0.0).to(tl.float32)
    sampled = (count & (PROMPT_FLAG - 1)).to(tl.float32)
    coefficients_ptr += 3 * index
    repetition = tl.load(coefficients_ptr)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= tl.load(coefficients_ptr + 1) * sampled
    x -= tl.load(coefficients_ptr + 2) * tl.minimum(sampled, 1.0)
    tl.store(logits_ptr, x.to(logits_ptr.dtype.element_ty), mask=is_seen)


@kernel
def _mask(logits_ptr, rows_ptr, masks_ptr, STRIDE: tl.constexpr, WORDS: tl.constexpr, VOCAB: tl.constexpr):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(masks_ptr + index.to(tl.int64) * WORDS + token // 32, mask=inside, other=-1)
    is_banned = inside & (((word >> (token % 32)) & 1) == 0)
    logits_ptr += tl.load(rows_ptr + index) * STRIDE + token
    tl.store(logits_ptr, tl.full([BLOCK], -float("inf"), tl.float32), mask=is_banned)

"""From logits to tokens on a GPU: one kernel for every row, whatever its options, and two that edit logits in place.

No row is sorted. A filter's threshold is found by halving the interval between two logits that enclose it, each pass
snapping both ends to logits that exist, so that it ends on the very one: about ten to fifteen passes over a row, which
lies in the cache by then. A row without filters takes two passes, a greedy one a single pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.torch_sampling import LANES, OUTPUTS

CHUNK = LANES * OUTPUTS
EDIT_BLOCK = 2048


def choose(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """As the twin in `torch_sampling`, where the options are described."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _choose[(rows,)](
            logits,
            temperature,
            min_p,
            top_k,
            top_p,
            seeds,
            positions,
            tokens,
            largest,
            logits.stride(0),
            vocab_size,
            LANES=LANES,
            CHUNK=CHUNK,
            num_warps=16,
        )
    return tokens, largest


def penalize(logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, in_prompt: int, coefficients: Tensor) -> None:
    num, vocab_size = len(rows), counts.shape[1]
    assert logits.stride(1) == 1 and logits.shape[1] >= vocab_size
    assert counts.is_contiguous() and counts.dtype == torch.int32
    assert all(index.shape == (num,) and index.is_contiguous() for index in (rows, slots))
    assert all(index.dtype == torch.int64 for index in (rows, slots))
    assert coefficients.shape == (num, 3) and coefficients.is_contiguous() and coefficients.dtype == torch.float32
    _penalize[num, triton.cdiv(vocab_size, EDIT_BLOCK)](
        logits,
        rows,
        slots,
        counts,
        coefficients,
        STRIDE=logits.stride(0),
        VOCAB=vocab_size,
        IN_PROMPT=in_prompt,
        BLOCK=EDIT_BLOCK,
    )


def mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    num, vocab_size = len(rows), logits.shape[1]
    assert logits.stride(1) == 1
    assert rows.shape == (num,) and rows.is_contiguous() and rows.dtype == torch.int64
    assert masks.is_contiguous() and masks.dtype == torch.int32
    assert len(masks) == num and 32 * masks.shape[1] >= vocab_size
    _mask[num, triton.cdiv(vocab_size, EDIT_BLOCK)](
        logits, rows, masks, STRIDE=logits.stride(0), WORDS=masks.shape[1], VOCAB=vocab_size, BLOCK=EDIT_BLOCK
    )


@triton.jit
def _choose(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    tokens_ptr,
    largest_ptr,
    stride,
    vocab_size,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    lane = tl.arange(0, CHUNK)
    best = tl.full([CHUNK], -float("inf"), tl.float32)
    best_token = tl.zeros([CHUNK], tl.int32)
    least = tl.full([CHUNK], float("inf"), tl.float32)  # of those that may be sampled at all
    broken = tl.zeros([CHUNK], tl.int32)
    for start in range(0, vocab_size, CHUNK):
        token = start + lane
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
        is_larger = x > best
        best = tl.where(is_larger, x, best)
        best_token = tl.where(is_larger, token, best_token)
        least = tl.minimum(least, tl.where(x > -float("inf"), x, float("inf")))
        broken |= (x != x).to(tl.int32)
    top = tl.max(best, 0)
    token = first_of(best, best_token, top)
    if tl.max(broken, 0) > 0:
        top = float("nan")
    temperature = tl.load(temperature_ptr + row)
    is_finite = tl.abs(top) < float("inf")
    if is_finite & (temperature > 0):
        bound = (tl.min(least, 0) - top) / temperature
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            bound = tl.maximum(bound, tl.log(min_p))
        top_k = tl.load(top_k_ptr + row)
        if (top_k > 0) & (top_k < vocab_size):
            bound = _search(logits_ptr, vocab_size, top, temperature, bound, top_k.to(tl.float32), True, CHUNK)
        top_p = tl.load(top_p_ptr + row)
        if top_p < 1:
            wanted = top_p * _sum(logits_ptr, vocab_size, top, temperature, bound, CHUNK)
            bound = _search(logits_ptr, vocab_size, top, temperature, bound, wanted, False, CHUNK)
        seed = tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + row).to(tl.int32)
        token = _draw(logits_ptr, vocab_size, top, temperature, bound, seed, position, LANES, CHUNK)
    tl.store(tokens_ptr + row, tl.where(is_finite, token, 0).to(tl.int64))
    tl.store(largest_ptr + row, top)


@triton.jit
def first_of(values, tokens, best):
    """The least of the tokens whose value is the best."""
    return tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)


@triton.jit
def _scores(logits_ptr, token, vocab_size, top, temperature):
    x = tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    return (x - top) / temperature


@triton.jit
def _sum(logits_ptr, vocab_size, top, temperature, bound, CHUNK: tl.constexpr):
    """Of the weights whose score reaches the bound. Chunk by chunk, so that no other row changes a bit of it."""
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, vocab_size, CHUNK):
        score = _scores(logits_ptr, start + tl.arange(0, CHUNK), vocab_size, top, temperature)
        sums += tl.where(score >= bound, tl.exp(score), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def _search(logits_ptr, vocab_size, top, temperature, low, wanted, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """The largest score at which the tokens from there on reach `wanted`, in number or in weight; at least `low`."""
    high = top - top  # the largest score. Always: at `low` enough is reached, and nothing above `high` reaches it
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        sums = tl.zeros([CHUNK], tl.float32)
        above = tl.full([CHUNK], float("inf"), tl.float32)
        below = tl.full([CHUNK], -float("inf"), tl.float32)
        for start in range(0, vocab_size, CHUNK):
            score = _scores(logits_ptr, start + tl.arange(0, CHUNK), vocab_size, top, temperature)
            is_above = score >= middle
            if COUNTS:
                sums += tl.where(is_above, 1.0, 0.0)
            else:
                sums += tl.where(is_above, tl.exp(score), 0.0)
            above = tl.minimum(above, tl.where(is_above, score, float("inf")))
            below = tl.maximum(below, tl.where(is_above, -float("inf"), score))
        reached = tl.sum(sums, 0) >= wanted
        low = tl.where(reached, tl.min(above, 0), low)
        high = tl.where(reached, high, tl.max(below, 0))
    return low


@triton.jit
def _draw(logits_ptr, vocab_size, top, temperature, bound, seed, position, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """The token with the largest sum of score and noise among those that reach the bound."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], -float("inf"), tl.float32)
    best_token = tl.zeros([LANES], tl.int32)
    zero = tl.zeros([LANES], tl.int32)
    for start in range(0, vocab_size, CHUNK):
        counter = start // CHUNK * LANES + lane
        r0, r1, r2, r3 = tl.philox(seed, counter, zero + position, zero, zero)
        for output in tl.static_range(4):
            if output == 0:
                bits = r0
            elif output == 1:
                bits = r1
            elif output == 2:
                bits = r2
            else:
                bits = r3
            token = start + output * LANES + lane
            score = _scores(logits_ptr, token, vocab_size, top, temperature)
            uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
            small = uniform * (1.0 + uniform * (0.5 + uniform / 3.0))
            waiting = tl.where(uniform < 1e-3, small, -tl.log(1.0 - uniform))
            noisy = tl.where(score >= bound, score - tl.log(waiting), -float("inf"))
            is_larger = noisy > best
            best = tl.where(is_larger, noisy, best)
            best_token = tl.where(is_larger, token, best_token)
    return first_of(best, best_token, tl.max(best, 0))


@kernel
def _penalize(
    logits_ptr,
    rows_ptr,
    slots_ptr,
    counts_ptr,
    coefficients_ptr,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits_ptr += tl.load(rows_ptr + index) * STRIDE + token
    count = tl.load(counts_ptr + tl.load(slots_ptr + index) * VOCAB + token, mask=token < VOCAB, other=0)
    is_seen = count != 0
    x = tl.load(logits_ptr, mask=is_seen, other=0.0).to(tl.float32)
    sampled = (count & (IN_PROMPT - 1)).to(tl.float32)
    coefficients_ptr += 3 * index
    repetition = tl.load(coefficients_ptr)
    x = tl.where(x > 0, x / repetition, x * repetition)
    x -= tl.load(coefficients_ptr + 1) * sampled
    x -= tl.load(coefficients_ptr + 2) * tl.minimum(sampled, 1.0)
    tl.store(logits_ptr, x.to(logits_ptr.dtype.element_ty), mask=is_seen)


@kernel
def _mask(
    logits_ptr, rows_ptr, masks_ptr, STRIDE: tl.constexpr, WORDS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    word = tl.load(masks_ptr + index.to(tl.int64) * WORDS + token // 32, mask=inside, other=-1)
    is_banned = inside & (((word >> (token % 32)) & 1) == 0)
    logits_ptr += tl.load(rows_ptr + index) * STRIDE + token
    tl.store(logits_ptr, tl.full([BLOCK], -float("inf"), tl.float32), mask=is_banned)

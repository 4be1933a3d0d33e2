"""Sampling on a GPU: chooses the token of every row from its logits, whatever its options, in two launches.

The first kernel divides rows into parts of 4,096 tokens, one program each, and reads each part once. It finds the
largest logit and, without filters, draws a token; with filters, it lists the part's largest few hundred logits. The
second kernel joins the parts of a row in one program. It finds the threshold of a filter in the lists by bisection
between two logits, snapping both ends to existing logits, so that it ends exactly on one. If a row is so flat that its
threshold lies below the listed logits of some part, the program searches the row itself, in ten to fifteen passes.

The parts depend only on the vocabulary size, and every sum has a fixed order: no row influences another row.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.tiles import power_of_2

# The noise of token 4096 b + 1024 j + i is output j of the generator's call number 1024 b + i.
LANES = tl.constexpr(1024)
PART = tl.constexpr(4 * LANES.value)
LISTED = tl.constexpr(256)  # maximum listed logits of a part; at least half as many are listed unless they tie
TILE = tl.constexpr(2048)  # logits that the second kernel reads at once
# The options are temperature, min_p, top_k, top_p, seeds and positions.
OPTION_DTYPES = (torch.float32, torch.float32, torch.int32, torch.float32, torch.int64, torch.int64)


class RowSizes(NamedTuple):
    stride: int
    vocab: int
    parts: int


def choose(logits: Tensor, /, *options: Tensor) -> tuple[Tensor, Tensor]:
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    for option, dtype in zip(options, OPTION_DTYPES, strict=True):
        assert option.shape == (rows,) and option.is_contiguous() and option.dtype == dtype

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tokens, largest = empty(torch.int64, rows), empty(torch.float32, rows)
    if not rows:
        return tokens, largest
    parts = triton.cdiv(vocab_size, PART.value)
    of_parts = (
        *(empty(torch.float32, rows, parts) for _ in range(3)),
        empty(torch.int32, rows, parts),
        empty(logits.dtype, rows, parts, LISTED.value),
        empty(torch.int32, rows, parts, LISTED.value),
    )
    sizes = RowSizes(logits.stride(0), vocab_size, parts)
    _scan[rows, parts](logits, *options, *of_parts, SIZES=sizes, num_warps=8)
    block = max(16, power_of_2(parts))
    # Without a register limit the assembler spills, to use a few registers less than it needs.
    _choose[(rows,)](logits, *options, *of_parts, tokens, largest, SIZES=sizes, BLOCK=block, num_warps=8, maxnreg=96)
    return tokens, largest


@kernel
def _scan(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    part_largest_ptr,
    part_values_ptr,
    part_cuts_ptr,
    part_tokens_ptr,
    listed_ptr,
    listed_tokens_ptr,
    SIZES: tl.constexpr,
):
    """Find a part's largest logit and choose a token. Greedy: the token of the largest logit. Without filters: the
    drawn token; the value is how far its score plus noise exceeds the largest score. With filters: the value is the sum
    of the weights relative to the largest, and the list receives every logit above the cut."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    logits_ptr += row * SIZES.stride
    token = part * PART + tl.arange(0, PART)
    x = tl.load(logits_ptr + token, mask=token < SIZES.vocab, other=-float("inf")).to(tl.float32)
    is_nan = x != x
    x = tl.where(is_nan, -float("inf"), x)
    largest = tl.max(x, 0)
    chosen = first_of(x, token, largest)
    value = 0.0
    cut = -float("inf")
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        inverse = _inverse(temperature)
        if _is_filtered(min_p_ptr + row, top_k_ptr + row, top_p_ptr + row, SIZES.vocab):
            value = tl.sum(tl.where(x > -float("inf"), tl.exp((x - largest) * inverse), 0.0), 0)
            place = (row * SIZES.parts + part) * LISTED
            cut = _cut(x, largest)
            _list(logits_ptr, part, cut, listed_ptr + place, listed_tokens_ptr + place, SIZES.vocab)
        else:
            seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int32)
            chosen, value = _draw_part(logits_ptr, part, largest, inverse, seed, position, SIZES.vocab)
    place = row * SIZES.parts + part
    tl.store(part_largest_ptr + place, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), largest))
    tl.store(part_values_ptr + place, value)
    tl.store(part_cuts_ptr + place, cut)
    tl.store(part_tokens_ptr + place, chosen)


@kernel
def _choose(
    logits_ptr,
    temperature_ptr,
    min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    seeds_ptr,
    positions_ptr,
    part_largest_ptr,
    part_values_ptr,
    part_cuts_ptr,
    part_tokens_ptr,
    listed_ptr,
    listed_tokens_ptr,
    tokens_ptr,
    largest_ptr,
    SIZES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Choose a row's token from the results of its parts, which are loaded together (BLOCK of them)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    place = row * SIZES.parts + part
    largest = tl.load(part_largest_ptr + place, mask=part < SIZES.parts, other=-float("inf"))
    token = tl.load(part_tokens_ptr + place, mask=part < SIZES.parts, other=0)
    is_nan = largest != largest
    top = tl.max(tl.where(is_nan, -float("inf"), largest), 0)
    if tl.max(is_nan.to(tl.int32), 0) > 0:
        top = float("nan")
    chosen = first_of(largest, token, top)
    temperature = tl.load(temperature_ptr + row)
    is_finite = tl.abs(top) < float("inf")
    if is_finite & (temperature > 0):
        inverse = _inverse(temperature)
        score = (largest - top) * inverse
        value = tl.load(part_values_ptr + place, mask=part < SIZES.parts, other=0.0)
        if _is_filtered(min_p_ptr + row, top_k_ptr + row, top_p_ptr + row, SIZES.vocab):
            whole = tl.sum(value * tl.exp(score), 0)
            cut = tl.max(tl.load(part_cuts_ptr + place, mask=part < SIZES.parts, other=-float("inf")), 0)
            row_ptr = logits_ptr + row * SIZES.stride
            lists = listed_ptr + row * SIZES.parts * LISTED, listed_tokens_ptr + row * SIZES.parts * LISTED
            cut = (cut - top) * inverse
            filters = tl.load(min_p_ptr + row), tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
            noise = tl.load(seeds_ptr + row), tl.load(positions_ptr + row).to(tl.int32)
            chosen = _draw_filtered(row_ptr, lists, top, inverse, whole, cut, filters, noise, SIZES)
        else:
            value = tl.where(score > -float("inf"), score + value, -float("inf"))
            chosen = first_of(value, token, tl.max(value, 0))
    tl.store(tokens_ptr + row, tl.where(is_finite, chosen, 0).to(tl.int64))
    tl.store(largest_ptr + row, top)


@triton.jit
def first_of(values, tokens, best):
    """Return the smallest token whose value is the best."""
    return tl.min(tl.where(values == best, tokens, 0x7FFFFFFF), 0)


@triton.jit
def _is_filtered(min_p_ptr, top_k_ptr, top_p_ptr, VOCAB: tl.constexpr):
    top_k = tl.load(top_k_ptr)
    return (tl.load(min_p_ptr) > 0) | ((top_k > 0) & (top_k < VOCAB)) | (tl.load(top_p_ptr) < 1)


@triton.jit
def _inverse(temperature):
    """Return 1 / temperature, limited to a finite value so that the largest logit's score is always 0."""
    return tl.minimum(1.0 / temperature, 3.0e38)


@triton.jit
def _cut(x, largest):
    """Return a cut above which a part has at most LISTED logits, and more than half as many unless they tie."""
    is_there = x > -float("inf")
    cut = -float("inf")
    if tl.sum(is_there.to(tl.int32), 0) > LISTED:
        low = tl.min(tl.where(is_there, x, float("inf")), 0)
        cut = largest
        number = 0
        steps = 0
        while (2 * number <= LISTED) & (steps < 16):
            middle = low + (cut - low) * 0.5
            above = tl.sum((x > middle).to(tl.int32), 0)
            is_few = above <= LISTED
            low = tl.where(is_few, low, middle)
            cut = tl.where(is_few, middle, cut)
            number = tl.where(is_few, above, number)
            steps += 1
    return cut


@triton.jit
def _list(logits_ptr, part, cut, listed_ptr, listed_tokens_ptr, VOCAB: tl.constexpr):
    """List a part's logits above the cut in order, padded with minus infinity."""
    number = 0
    for chunk in range(4):  # the whole part would not fit into registers
        token = (4 * part + chunk) * LANES + tl.arange(0, LANES)
        x = tl.load(logits_ptr + token, mask=token < VOCAB, other=-float("inf"))
        is_listed = x.to(tl.float32) > cut
        place = number + tl.cumsum(is_listed.to(tl.int32), 0) - 1
        tl.store(listed_ptr + place, x, mask=is_listed)
        tl.store(listed_tokens_ptr + place, token, mask=is_listed)
        number += tl.sum(is_listed.to(tl.int32), 0)
    rest = tl.arange(0, LISTED)
    nothing = tl.full([LISTED], -float("inf"), tl.float32).to(listed_ptr.dtype.element_ty)
    tl.store(listed_ptr + rest, nothing, mask=rest >= number)


@triton.jit
def _draw_part(logits_ptr, part, largest, inverse, seed, position, VOCAB: tl.constexpr):
    """Return the token with the largest score plus noise, and that sum; scores are relative to the part's largest."""
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], -float("inf"), tl.float32)
    best_token = tl.zeros([LANES], tl.int32)
    zero = tl.zeros([LANES], tl.int32)
    bits = tl.philox(seed, part * LANES + lane, zero + position, zero, zero)
    for output in tl.static_range(4):
        token = (4 * part + output) * LANES + lane
        x = tl.load(logits_ptr + token, mask=token < VOCAB, other=-float("inf")).to(tl.float32)
        noisy = tl.where(x > -float("inf"), (x - largest) * inverse + _noise(bits[output]), -float("inf"))
        is_larger = noisy > best
        best = tl.where(is_larger, noisy, best)
        best_token = tl.where(is_larger, token, best_token)
    value = tl.max(best, 0)
    return first_of(best, best_token, value), value


@triton.jit
def _noise(bits):
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    small = uniform * (1.0 + uniform * (0.5 + uniform / 3.0))
    return -tl.log(tl.where(uniform < 1e-3, small, -tl.log(1.0 - uniform)))


@triton.jit
def _draw_filtered(logits_ptr, lists, top, inverse, whole, cut, filters, noise, SIZES: tl.constexpr):
    """Draw a token after min_p, top_k and top_p. `whole` is the sum of all weights. The lists hold every score above
    `cut`; it is minus infinity if they hold all scores."""
    VOCAB: tl.constexpr = SIZES.vocab
    ALL_LISTED: tl.constexpr = SIZES.parts * LISTED
    listed_ptr, listed_tokens_ptr = lists
    min_p, top_k, top_p = filters
    bound = -float("inf")
    if min_p > 0:
        bound = tl.minimum(tl.log(min_p), 0.0)  # keeps the largest logit however the logarithm is rounded
    has_top_k = (top_k > 0) & (top_k < VOCAB)
    source_ptr = listed_ptr
    size = ALL_LISTED
    number, weight, low = _survey(source_ptr, size, top, inverse, bound, cut)
    # The lists contain the threshold if they hold all remaining scores, or enough of them above the cut.
    is_complete = (cut < bound) | (cut == -float("inf"))
    is_listed = is_complete
    if has_top_k:
        is_listed = is_complete | (number >= top_k)
    elif min_p <= 0:
        is_listed = is_complete | ((number > 0) & (weight >= top_p * whole))
    if is_listed == 0:
        source_ptr = logits_ptr
        size = VOCAB
        number, weight, low = _survey(source_ptr, size, top, inverse, bound, -float("inf"))
    elif (is_complete | has_top_k) == 0:
        weight = whole
    if has_top_k & (number > top_k):
        low = _search(source_ptr, size, top, inverse, low, top_k.to(tl.float32), True)
        number, weight, low = _survey(source_ptr, size, top, inverse, low, -float("inf"))
    if top_p < 1:
        low = _search(source_ptr, size, top, inverse, low, top_p * weight, False)

    return _draw_from(source_ptr, listed_tokens_ptr, is_listed, size, top, inverse, low, noise, ALL_LISTED)


@triton.jit
def _draw_from(source_ptr, listed_tokens_ptr, is_listed, size, top, inverse, bound, noise, ALL_LISTED: tl.constexpr):
    """Draw the token with the largest score plus noise among the scores of at least `bound`."""
    AT_ONCE: tl.constexpr = TILE // 2
    seed, position = noise
    lane = tl.arange(0, AT_ONCE)
    best = tl.full([AT_ONCE], -float("inf"), tl.float32)
    best_token = tl.zeros([AT_ONCE], tl.int32)
    zero = tl.zeros([AT_ONCE], tl.int32)
    for start in range(0, size, AT_ONCE):
        place = start + lane
        score = _scores(source_ptr, place, size, top, inverse)
        token = tl.where(is_listed, tl.load(listed_tokens_ptr + place, mask=place < ALL_LISTED, other=0), place)
        counter = token // (4 * LANES) * LANES + token % LANES
        r0, r1, r2, r3 = tl.philox(seed, counter, zero + position, zero, zero)
        output = token // LANES % 4
        bits = tl.where(output < 2, tl.where(output == 0, r0, r1), tl.where(output == 2, r2, r3))
        noisy = tl.where(score >= bound, score + _noise(bits), -float("inf"))
        is_larger = noisy > best
        best = tl.where(is_larger, noisy, best)
        best_token = tl.where(is_larger, token, best_token)
    return first_of(best, best_token, tl.max(best, 0))


@triton.jit
def _scores(source_ptr, index, size, top, inverse):
    x = tl.load(source_ptr + index, mask=index < size, other=-float("inf")).to(tl.float32)
    return (x - top) * inverse


@triton.jit
def _survey(source_ptr, size, top, inverse, bound, cut):
    """Return the number, the weight sum and the minimum of the scores that are at least `bound` and above `cut`."""
    numbers = tl.zeros([TILE], tl.int32)
    weights = tl.zeros([TILE], tl.float32)
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, size, TILE):
        score = _scores(source_ptr, start + tl.arange(0, TILE), size, top, inverse)
        is_kept = (score >= bound) & (score > cut)
        numbers += is_kept.to(tl.int32)
        weights += tl.where(is_kept, tl.exp(score), 0.0)
        least = tl.minimum(least, tl.where(is_kept, score, float("inf")))
    return tl.sum(numbers, 0), tl.sum(weights, 0), tl.min(least, 0)


@triton.jit
def _search(source_ptr, size, top, inverse, low, target, COUNTS: tl.constexpr):
    """Return the largest score, at least `low`, at which the tokens from there on reach `target` (count or weight)."""
    high = top - top  # 0, the largest score. Invariant: scores >= low reach `target`, scores > high do not
    while low < high:
        middle = low + (high - low) * 0.5
        middle = tl.where(middle > low, middle, high)
        sums = tl.zeros([TILE], tl.float32)
        above = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], -float("inf"), tl.float32)
        for start in range(0, size, TILE):
            score = _scores(source_ptr, start + tl.arange(0, TILE), size, top, inverse)
            is_above = score >= middle
            if COUNTS:
                sums += tl.where(is_above, 1.0, 0.0)
            else:
                sums += tl.where(is_above, tl.exp(score), 0.0)
            above = tl.minimum(above, tl.where(is_above, score, float("inf")))
            below = tl.maximum(below, tl.where(is_above, -float("inf"), score))
        reached = tl.sum(sums, 0) >= target
        low = tl.where(reached, tl.min(above, 0), low)
        high = tl.where(reached, high, tl.max(below, 0))
    return low

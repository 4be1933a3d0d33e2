"""The online softmax of attention in base 2, processing some positions per step."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
IN_KERNELS = tl.constexpr(LOG2_E)
LOWEST = tl.constexpr(-1e38)  # initial maximum: finite, so that a row of masked scores gets weights of 0, not NaN


@triton.jit
def empty_softmax(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Return the initial state: the largest score, the sum of weights, and the weighted sum of values."""
    return tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def add_sinks(best, total, sinks_ptr, head, is_first, HAS_SINKS: tl.constexpr):
    """Add the attention sinks to the initial state. With split-KV only the row's first part counts its sink."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_first, other=0.0) * IN_KERNELS
        best = tl.where(is_first, sink, best)
        total = tl.where(is_first, 1.0, total)
    return best, total


@triton.jit
def soft_cap(scores, cap, HAS_CAP: tl.constexpr):
    """Apply the soft cap, if any, to scores in base 2. With a cap, scores are scaled so that 2^score is e^(2 x)."""
    if HAS_CAP:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit
def softmax_step(scores, values, best, total, acc):
    """Update the state with scores [M, N] in base 2 and values [N, D]."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    fade = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return new_best, total, acc

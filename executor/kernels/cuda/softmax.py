"""The softmax of attention, some positions at a time, with powers of two."""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
IN_KERNELS = tl.constexpr(LOG2_E)
LOWEST = tl.constexpr(-1e38)  # where maxima begin: finite, so that a row of masked scores gives weights of 0, not NaN


@triton.jit
def unseen(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Of rows that have seen nothing: the largest score, the sum of weights, and of weighted values."""
    return tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def see_sinks(best, total, sinks_ptr, head, is_first, HAS_SINKS: tl.constexpr):
    """What `unseen` gave, with the sinks of rows seen whose first positions these are: one that is cut counts it once."""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_first, other=0.0) * IN_KERNELS
        best = tl.where(is_first, sink, best)
        total = tl.where(is_first, 1.0, total)
    return best, total


@triton.jit
def squeeze(scores, cap, HAS_CAP: tl.constexpr):
    """Scores in log2; with a cap they are still to go through tanh, scaled so that 2 to their power is e^(2 x)."""
    if HAS_CAP:
        scores = cap - 2.0 * cap / (1.0 + tl.exp2(scores))
    return scores


@triton.jit
def weigh(scores, values, best, total, acc):
    """One step: scores [M, N] in log2, values [N, D]."""
    new_best = tl.maximum(best, tl.max(scores, 1))
    fade = tl.exp2(best - new_best)
    weights = tl.exp2(scores - new_best[:, None])
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * fade[:, None], input_precision="ieee")
    return new_best, total, acc

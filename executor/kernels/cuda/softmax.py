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
def sink_softmax(sinks_ptr, head, is_head, DIM: tl.constexpr):
    """Return the state of rows that have seen only the attention sink of their head."""
    sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0) * IN_KERNELS
    acc = tl.zeros([head.shape[0], DIM], tl.float32)
    return tl.where(is_head, sink, LOWEST), tl.where(is_head, 1.0, 0.0), acc


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


@triton.jit
def merge_softmax(state, other):
    """Merge the state of later positions into that of earlier ones. Explicit fma fixes which product is rounded; the
    compiler might choose differently in two kernels."""
    best, total, acc = state
    other_best, other_total, other_acc = other
    new_best = tl.maximum(best, other_best)
    fade = tl.exp2(best - new_best)
    gain = tl.exp2(other_best - new_best)
    total = tl.fma(total, fade, other_total * gain)
    return new_best, total, tl.fma(acc, tl.broadcast_to(fade[:, None], acc.shape), other_acc * gain[:, None])

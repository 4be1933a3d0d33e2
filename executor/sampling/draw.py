"""`SamplingOps` on the CPU: thresholds of min-p, top-k and top-p, and drawing one token per row from weights.

Weights are exp((logit - largest) / temperature), so the largest is 1 and no softmax is needed. A filter keeps the
tokens whose weight reaches a threshold, including ties with the last kept one. The vocabulary is never sorted: top-k,
and in most cases top-p, use the few largest weights; otherwise top-p uses bisection.

No row influences another, not even in its last bit: sums run over blocks of fixed size in fixed order, so a request
gets the same tokens alone and in any batch. `torch.sum` over a long row does not guarantee that.
"""

import numpy as np
import torch
from torch import Tensor

from penstock import _csrc
from penstock.executor.kernels import IN_PROMPT

BLOCK = 256  # weights summed at once; rows are padded with zeros to a multiple of it
CANDIDATES = 128  # a larger nucleus is found by bisection, at four times the cost

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE_AS_INT = 0x3F800000  # the bits of 1.0; positive floats are ordered like their bits
_MINUS_INFINITY = {torch.float32: 0xFF800000, torch.bfloat16: 0xFF80, torch.float16: 0xFC00}  # as bits


class CpuSampling:
    """Implements `SamplingOps`. Weights of `part_rows` rows are processed at once; they stay in the CPU's cache."""

    def __init__(self, vocab_size: int, part_rows: int) -> None:
        # Columns beyond the vocabulary stay zero forever, so they are never drawn.
        self._weights = torch.zeros(part_rows, -(-vocab_size // BLOCK) * BLOCK)
        self._scratch = torch.empty_like(self._weights)

    def choose(self, logits: Tensor, /, *options: Tensor) -> tuple[Tensor, Tensor]:
        drawn = np.flatnonzero(options[0].numpy())  # rows with a temperature above 0
        if len(drawn) < len(logits):
            largest, tokens = _top(logits)
        else:  # several times faster without the index
            largest, tokens = logits.amax(-1).float(), torch.zeros(len(logits), dtype=torch.int64)
        for first in range(0, len(drawn), len(self._weights)):
            rows = drawn[first : first + len(self._weights)]
            begin, end = int(rows[0]), int(rows[-1]) + 1
            index = slice(begin, end) if end - begin == len(rows) else torch.from_numpy(rows)  # a slice copies nothing
            tokens[index] = self._draw(logits[index], largest[index, None], [each.numpy()[rows] for each in options])
        finite = np.isfinite(largest.numpy())  # this takes a tenth of torch's time
        return tokens if finite.all() else tokens * torch.from_numpy(finite), largest

    def _draw(self, logits: Tensor, largest: Tensor, options: list[np.ndarray]) -> Tensor:
        """Draw a token for each row of logits [R, V], whose largest logits are [R, 1]. options [R]: those of `choose`."""
        temperature, min_p, top_k, top_p, seeds, positions = options
        weights = self._weights[: len(logits)]
        values, width = weights[:, : logits.shape[1]], weights.shape[1]
        torch.sub(logits, largest, out=values)
        if (divisors := _column(temperature, 1.0)) is not None:
            values.div_(divisors)
        values.exp_()
        top_k = np.where(top_k > 0, np.minimum(top_k, width), width).astype(np.int64)
        filters = _column(min_p, 0.0), _column(top_k, width), _column(top_p, 1.0)
        max_top_k = int(top_k.max(where=top_k < width, initial=0))
        filter_weights(weights, self._scratch[: len(weights)], *filters, max_top_k)
        return draw(weights, torch.from_numpy(uniforms(seeds.view(np.uint64), positions))[:, None])

    @staticmethod
    def penalize(logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, coefficients: Tensor) -> None:
        """Apply the penalties, but compute only the tokens that a request has seen."""
        for row, slot, by in zip(rows.tolist(), slots.tolist(), coefficients.tolist(), strict=True):
            (repetition, frequency, presence), seen, own = by, counts[slot].numpy(), logits[row].numpy()
            ids = np.flatnonzero(seen)
            sampled = (seen[ids] & (IN_PROMPT - 1)).astype(np.float32)
            values = np.where(own[ids] > 0, own[ids] / repetition, own[ids] * repetition)
            own[ids] = values - frequency * sampled - presence * sampled.clip(max=1)

    def mask(self, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
        """Mask in C: 10 to 15 µs for a bfloat16 row of 49,152; numpy.unpackbits and masked_fill_ took 75."""
        assert logits.stride(1) == 1 and masks.is_contiguous()
        form = logits.stride(0), logits.element_size(), _MINUS_INFINITY[logits.dtype]
        sizes = *masks.shape, logits.shape[1]
        _csrc.lib.penstock_mask(logits.data_ptr(), *form, rows.data_ptr(), masks.data_ptr(), *sizes)


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's largest logit and its index. numpy is ten times as fast as torch at this."""
    numbers = logits.float().numpy()
    places = numbers.argmax(-1)
    return torch.from_numpy(numbers[np.arange(len(places)), places]), torch.from_numpy(places)


def _column(values: np.ndarray, neutral: float) -> Tensor | None:
    """Return the values as [R, 1], or None if every row has the neutral value."""
    return None if (values == neutral).all() else torch.from_numpy(values)[:, None]


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return a number in [0, 1) per row that depends only on its seed (uint64) and position: two SplitMix64 rounds."""
    steps = positions.astype(np.uint64) + np.uint64(1)
    mixed = _mix(_mix(seeds + _GOLDEN) + steps * _GOLDEN)
    # 52 bits, so that the product with any total stays below that total after rounding.
    numbers: np.ndarray = (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return numbers


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


def cumulative(weights: Tensor) -> Tensor:
    """Return the cumulative block sums of weights [R, V'] as [R, V' / BLOCK] float64; the last is the total."""
    return weights.view(len(weights), -1, BLOCK).sum(-1).double().cumsum(-1)


def keep(weights: Tensor, threshold: Tensor, scratch: Tensor) -> None:
    """Set every weight below its row's threshold [R, 1] to zero."""
    # A float mask: comparing into and multiplying by bools takes ten times as long on a CPU.
    weights.mul_(torch.ge(weights, threshold, out=scratch))


def filter_weights(
    weights: Tensor, scratch: Tensor, min_p: Tensor | None, top_k: Tensor | None, top_p: Tensor | None, max_top_k: int
) -> None:
    """Apply the filters in this order, each to the result of the previous one. Options are [R, 1] or None; their
    neutral values are 0, V' and 1. weights and scratch: [R, V']; weights change in place."""
    if min_p is not None:
        keep(weights, min_p, scratch)
    if top_k is None and top_p is None:
        return
    num = min(max(max_top_k, CANDIDATES if top_p is not None else 0), weights.shape[1])
    largest = weights.topk(num, -1).values  # [R, num]
    if top_k is not None:
        last = largest.gather(1, (top_k - 1).clamp(max=num - 1))
        threshold = torch.where(top_k <= num, last, 0.0)
        keep(weights, threshold, scratch)
        largest = torch.where(largest >= threshold, largest, 0.0)
    if top_p is not None:
        target_sum = cumulative(weights)[:, -1:] * top_p
        keep(weights, _nucleus(weights, scratch, largest[:, :CANDIDATES], target_sum, top_p < 1), scratch)


def _nucleus(weights: Tensor, scratch: Tensor, largest: Tensor, target_sum: Tensor, is_on: Tensor) -> Tensor:
    """Return the largest threshold at which the kept weights reach `target_sum`, [R, 1]; 0 where the filter is off."""
    sums = largest.double().cumsum(-1)
    index = (sums < target_sum).sum(-1, keepdim=True)
    threshold = torch.where(is_on, largest.gather(1, index.clamp(max=largest.shape[1] - 1)), 0.0)
    rows = (is_on & (sums[:, -1:] < target_sum)).view(-1).nonzero().view(-1)
    if len(rows):
        threshold[rows] = _bisect(weights[rows], scratch[: len(rows)], target_sum[rows])
    return threshold


def _bisect(weights: Tensor, scratch: Tensor, target_sum: Tensor) -> Tensor:
    """Compute `_nucleus` by bisection over the bits of the threshold, until one float is left."""
    low = torch.zeros(len(weights), 1, dtype=torch.int32, device=weights.device)  # the kept sum reaches `target_sum`
    high = torch.full_like(low, _ONE_AS_INT + 1)  # nothing is kept, so the sum does not reach `target_sum`
    for _ in range(_ONE_AS_INT.bit_length()):
        middle = low + (high - low) // 2
        torch.ge(weights, middle.view(torch.float32), out=scratch)
        reached = cumulative(scratch.mul_(weights))[:, -1:] >= target_sum
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return low.view(torch.float32)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return tokens [R] int64 at fraction `uniform` [R, 1] (float64, from `uniforms`) of the cumulative weights.

    A token of weight zero is never drawn, because the first sum above the target is larger than the sum before it.
    """
    sums = cumulative(weights)  # [R, blocks]
    target = uniform * sums[:, -1:]
    block = (sums <= target).sum(-1, keepdim=True).clamp(max=sums.shape[1] - 1)
    inside = weights.view(len(weights), -1, BLOCK).gather(1, block[..., None].expand(-1, 1, BLOCK))[:, 0]
    within = inside.double().cumsum(-1)  # [R, BLOCK]
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    # The block's own sum was rounded, so the rest may be slightly beyond its end.
    rest = (target - before).minimum(within[:, -1:] * (1 - 2.0**-40))
    index = (within <= rest).sum(-1, keepdim=True).clamp(max=BLOCK - 1)
    return (block * BLOCK + index)[:, 0]

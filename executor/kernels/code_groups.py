"""GGUF's types that a GPU computes from, as `Grouped`: Q4_0 and Q8_0 as they are; Q4_K and Q6_K with the scales of their
groups multiplied out, in float16: off by at most 1/4096 of a scale, where bfloat16 rounds every product to 1/512."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.executor.kernels.codes import Coded
from penstock.executor.kernels.grouped import Grouped

Parts = tuple[Tensor, Tensor, Tensor | None]  # codes [rows, blocks, values], scales and minima [rows, blocks, groups]


def as_groups(weight: Coded) -> Grouped | None:
    """None: another type."""
    if weight.type.name not in _READERS:
        return None
    bits, read = _READERS[weight.type.name]
    codes, scales, minima = read(weight.rows.unflatten(1, (-1, weight.type.size_bytes)))
    halves = [part.half().flatten(1) for part in (scales, minima) if part is not None]
    for half in halves:
        if not (finite := half.isfinite().all(1)).all():
            raise weight.error(int((~finite).nonzero()[0, 0]))
    return Grouped(weight.name, codes.flatten(1), halves[0], halves[1] if len(halves) > 1 else None, bits)


def _half_at(blocks: Tensor, at: int) -> Tensor:
    """[rows, blocks, 1]"""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(part: Tensor, count: int) -> Tensor:
    """Runs of `count` bytes: the codes in their lower halves, then those in their upper ones."""
    runs = part.unflatten(-1, (-1, count))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _q4_0(blocks: Tensor) -> Parts:
    return _nibbles(blocks[..., 2:], 16), _half_at(blocks, 0), None


def _q8_0(blocks: Tensor) -> Parts:
    return blocks[..., 2:] ^ 128, _half_at(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    """Scales and minima of six bits: four of each in whole bytes, whose upper two bits belong to the other four."""
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (low & 15) | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, low >> 4 | second >> 6 << 4), -1)
    by, under = _half_at(blocks, 0).float(), _half_at(blocks, 2).float()
    return _nibbles(blocks[..., 16:], 32), by * scales, under * minima


def _q6_k(blocks: Tensor) -> Parts:
    """Offset by 32, here as codes of eight bits by 128."""
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3
    codes = _nibbles(blocks[..., :128], 64) | high.flatten(-3) << 4
    return codes + 96, _half_at(blocks, 208).float() * blocks[..., 192:208].view(torch.int8), None


_READERS: dict[str, tuple[int, Callable[[Tensor], Parts]]] = {
    "Q4_0": (4, _q4_0),
    "Q8_0": (8, _q8_0),
    "Q4_K": (4, _q4_k),
    "Q6_K": (8, _q6_k),
}

"""From GGML's block formats to float32. Plain torch over whole tensors: the default model takes 0.1 s on two cores.

A row of a quantized tensor is a sequence of blocks, each with its own scale (and minimum). The K formats
group eight or sixteen such blocks under one pair of float16 and keep the inner scales in 6 or 8 bits.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def dequantize(raw: Tensor, type_name: str, shape: tuple[int, ...]) -> Tensor:
    """Bytes [size] of a tensor stored as `type_name`, as values of `shape`.

    Float formats keep their dtype and share memory with `raw`; quantized ones become float32.
    """
    if type_name in _FLOATS:
        return raw.view(_FLOATS[type_name]).view(shape)
    size_bytes, unpack = _UNPACK[type_name]
    return unpack(raw.view(-1, size_bytes)).view(shape)


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block, [blocks, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes → [..., 2, n] float32: the low halves of all bytes come before the high ones."""
    out = packed.new_empty((*packed.shape[:-1], 2, packed.shape[-1]), dtype=torch.float32)
    out[..., 0, :] = packed & 15
    out[..., 1, :] = packed >> 4
    return out


def _bits(packed: Tensor, step: int) -> Tensor:
    """[..., n] bytes → [..., 8 / step, n] uint8: field i of every byte, lowest first, each `step` bits wide."""
    shifts = torch.arange(0, 8, step, dtype=torch.uint8).view(-1, 1)
    return (packed.unsqueeze(-2) >> shifts) & ((1 << step) - 1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """32 bits at byte `at`, bit i for value i, worth 16 each: [blocks, 2, 16] float32."""
    bits = _bits(blocks[:, at : at + 4], 1)  # [blocks, 8 bits, 4 bytes]
    return bits.transpose(1, 2).reshape(-1, 2, 16).float().mul_(16)


# Blocks of 32 values: scale · quant (+ minimum). [blocks, bytes] → [blocks, 2, 16] or [blocks, 32]


def _q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks, 0)[:, None])


def _q4_1(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 4:]).mul_(_half(blocks, 0)[:, None]).add_(_half(blocks, 2)[:, None])


def _q5_0(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 6:]).add_(_fifth_bits(blocks, 2))
    return quants.sub_(16).mul_(_half(blocks, 0)[:, None])


def _q5_1(blocks: Tensor) -> Tensor:
    quants = _nibbles(blocks[:, 8:]).add_(_fifth_bits(blocks, 4))
    return quants.mul_(_half(blocks, 0)[:, None]).add_(_half(blocks, 2)[:, None])


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


# Blocks of 256 values with inner scales.


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of Q4_K and Q5_K, [blocks, 8, 1] each.

    Twelve bytes at byte 4 hold eight 6-bit scales and minimums: of the first four, bytes 0-3 (scales) and 4-7
    (minimums) have all six bits; of the last four, bytes 8-11 have the low four (scale, then minimum) and the
    top two bits of bytes 0-7 the high two.
    """
    first, second, low = blocks[:, 4:16].view(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (low & 15) | ((first >> 6) << 4)], 1)
    minimums = torch.cat([second & 63, (low >> 4) | ((second >> 6) << 4)], 1)
    return (scales * _half(blocks, 0))[..., None], (minimums * _half(blocks, 2))[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    quants = _nibbles(blocks[:, 16:].view(-1, 4, 32)).view(-1, 8, 32)
    return quants.mul_(scales).sub_(minimums)


def _q5_k(blocks: Tensor) -> Tensor:
    scales, minimums = _k_scales(blocks)
    high = _bits(blocks[:, 16:48], 1)  # [blocks, 8, 32]: byte i has the fifth bit of value i of each group
    quants = _nibbles(blocks[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    return quants.add_(high, alpha=16).mul_(scales).sub_(minimums)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _nibbles(blocks[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    high = _bits(blocks[:, 128:192].view(-1, 2, 32), 2)  # [blocks, 2, 4, 32]
    quants = low.add_(high, alpha=16).sub_(32).view(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8) * _half(blocks, 208)
    return quants.mul_(scales[..., None])


_UNPACK: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}

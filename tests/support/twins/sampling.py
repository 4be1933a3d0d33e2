"""`SamplingOps` in plain torch, as this module is one: the oracle of the Triton kernels."""

import torch
from torch import Tensor

from penstock.executor.kernels import IN_PROMPT

# The noise of tokens 4096 b + 1024 j + i is output j of the generator's call number 1024 b + i.
LANES, OUTPUTS = 1024, 4
_U32 = 0xFFFF_FFFF
_MULTIPLY_A, _MULTIPLY_B, _WEYL_A, _WEYL_B = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85  # Philox 4x32


def choose(logits: Tensor, /, *options: Tensor) -> tuple[Tensor, Tensor]:
    temperature, min_p, top_k, top_p, seeds, positions = options
    largest, tokens = logits.float().max(-1)
    vocab_size = logits.shape[1]
    inverse = torch.where(temperature > 0, 1 / temperature, 1.0).clamp(max=3e38)
    scores = (logits.float() - largest[:, None]) * inverse[:, None]  # logarithms of weights; the largest is 0
    kept = scores.isfinite() & (scores >= min_p.log()[:, None])
    down = scores.where(kept, -torch.inf).sort(descending=True).values  # [R, V]
    last = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long()[:, None] - 1
    kept &= scores >= down.gather(1, last)
    down = scores.where(kept, -torch.inf).sort(descending=True).values
    sums = down.double().exp().cumsum(-1)
    last = (sums < top_p[:, None] * sums[:, -1:]).sum(-1, keepdim=True).clamp(max=vocab_size - 1)
    kept &= (scores >= down.gather(1, last)) | (top_p >= 1)[:, None]
    noisy = (scores + gumbel(seeds, positions, vocab_size)).where(kept, -torch.inf)
    tokens = torch.where(temperature > 0, noisy.argmax(-1), tokens)
    return torch.where(largest.isfinite(), tokens, 0), largest


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Noise of the standard Gumbel distribution, [R, vocab_size] float32."""
    token = torch.arange(vocab_size, device=seeds.device)
    block, place = token // (LANES * OUTPUTS), token % (LANES * OUTPUTS)
    outputs = _philox(seeds[:, None], (block * LANES + place % LANES)[None], positions[:, None])
    bits = outputs.gather(0, (place // LANES).expand(1, len(seeds), vocab_size))[0]
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    small = uniform * (1 + uniform * (0.5 + uniform / 3))  # -log(1 - u) where that loses its digits
    return -torch.where(uniform < 1e-3, small, -(1 - uniform).log()).log()


def _philox(seeds: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Ten rounds on the counters (low, high, 0, 0) with a key of 64 bits; [4, R, n], 32 bits in an int64 each."""
    low, high = torch.broadcast_tensors(low & _U32, high & _U32)
    c0, c1, c2, c3 = low, high, torch.zeros_like(low), torch.zeros_like(low)
    k0, k1 = seeds & _U32, (seeds >> 32) & _U32
    for _ in range(10):
        a, b = c0 * _MULTIPLY_A, c2 * _MULTIPLY_B  # the low 64 bits of the products are all of them
        c0, c2 = (b >> 32 & _U32) ^ c1 ^ k0, (a >> 32 & _U32) ^ c3 ^ k1
        c1, c3 = b & _U32, a & _U32
        k0, k1 = (k0 + _WEYL_A) & _U32, (k1 + _WEYL_B) & _U32
    return torch.stack((c0, c1, c2, c3))


def penalize(logits: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, coefficients: Tensor) -> None:
    vocab_size = counts.shape[1]
    seen = counts[slots.long()]
    sampled = (seen & (IN_PROMPT - 1)).float()
    values = logits[rows.long(), :vocab_size]
    wide = values.float()
    repetition, frequency, presence = coefficients[..., None].unbind(1)
    wide = torch.where(wide > 0, wide / repetition, wide * repetition)
    wide = wide - frequency * sampled - presence * sampled.clamp(max=1)
    logits[rows.long(), :vocab_size] = torch.where(seen != 0, wide.to(logits.dtype), values)


def mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[:, token // 32] >> (token % 32)) & 1
    logits[rows.long()] = logits[rows.long()].masked_fill(allowed == 0, -torch.inf)

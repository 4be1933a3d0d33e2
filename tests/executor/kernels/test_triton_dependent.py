"""Kernels that start before the last one's end compute the same. The interpreter runs one after the other anyway, so
what it can show is that all of them take their turn; that they touch nothing before it, test_triton_compiled shows."""

import pytest
import torch

from penstock.executor.kernels import KeyStore, Rotation
from penstock.executor.kernels.cuda import dependent, few_rows
from penstock.executor.kernels.cuda.ops import OPS
from penstock.executor.kernels.weight import numbers
from tests.support.paged import Cache, latent_step, random

HEADS, KV_HEADS, DIM, PAGE, CONTEXT = 4, 2, 32, 16, 100


def layer(device: torch.device) -> list[torch.Tensor]:
    """A decoding layer's kernels but for its products, for two rows, then a layer of experts."""
    cache = Cache([CONTEXT, CONTEXT], KV_HEADS, DIM, PAGE, torch.float32).to(device)
    x, residual = (random(2, HEADS * DIM, seed=seed).to(device) for seed in (1, 2))
    normed, total = OPS.add_rms_norm(x, residual, torch.ones(HEADS * DIM, device=device), 1e-6)
    merged = random(2, HEADS + 2 * KV_HEADS, DIM, seed=3).to(device)
    q, k, v = merged.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    positions = torch.full((2,), CONTEXT - 1, dtype=torch.int32, device=device)
    slots = cache.tables[:, (CONTEXT - 1) // PAGE].long() * PAGE + (CONTEXT - 1) % PAGE
    cos, sin = (random(CONTEXT, DIM // 2, seed=seed).to(device) for seed in (4, 5))
    pages = cache.k_pages, cache.v_pages
    rotated = OPS.rope_and_store(q, k, v, KeyStore(Rotation(cos, sin, positions), pages, slots))
    batch = cache.batch([(0, 1, CONTEXT), (1, 1, CONTEXT)])
    attended = OPS.paged_attention(rotated, pages, batch, 0.2)
    latent = OPS.latent_attention(rotated, cache.k_pages[..., :DIM], batch, 0.2, 8)
    gated = OPS.gate(normed, "silu")
    stored = latent_step(OPS, torch.float32, device, 0, False)
    gate_up, down = (random(4, *shape, seed=6).to(device) for shape in ((64, HEADS * DIM), (HEADS * DIM, 32)))
    slots = torch.tensor([[0, 3], [2, 1]], device=device)
    product = OPS.gated_linear(normed, gate_up[0], "silu")
    weights = numbers(gate_up), numbers(down)
    experts = OPS.fused_experts(normed, slots, torch.full((2, 2), 0.5, device=device), *weights, 0, "silu")
    return [
        normed,
        total,
        rotated,
        attended,
        latent,
        gated,
        *stored,
        product,
        experts,
        cache.k_pages[cache.tables[0].long()],
    ]


@pytest.mark.slow_in_interpreter
def test_the_numbers_are_the_same(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(dependent, "ENABLED", False)
    expected = layer(device)
    turns: list[str] = []
    if device.type == "cpu":  # the interpreter knows no such instructions
        monkeypatch.setattr(dependent, "gdc_wait", lambda: turns.append("wait"))
        monkeypatch.setattr(dependent, "gdc_launch_dependents", lambda: turns.append("launch"))
        monkeypatch.setattr(few_rows, "prefetch", lambda *_: None)
    monkeypatch.setattr(dependent, "ENABLED", True)
    for actual, wanted in zip(layer(device), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    assert turns.count("wait") == turns.count("launch") and (turns or device.type == "cuda")
    assert bool(turns) == (device.type == "cpu")

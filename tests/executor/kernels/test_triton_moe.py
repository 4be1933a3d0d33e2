"""The experts in Triton against their twin, and both against the loop over experts that a CPU runs."""

import dataclasses

import pytest
import torch

from penstock.executor.kernels import torch_fp8, torch_ops
from penstock.executor.kernels.cuda import moe, tiles
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.driver import Driver
from tests.executor.eight_bits import quantize
from tests.executor.kernels.cases import close, every_dtype
from tests.executor.paged import random
from tests.executor.small_models import folder, greedy


def case(tokens: int, experts: int, top_k: int, width: int, inner: int, dtype: torch.dtype, device: torch.device):
    choice = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1))
    choice[:, 0] += 0.5  # a favourite, so that some tiles are full and some experts have none
    slots = choice.topk(top_k).indices
    shares = random(tokens, top_k, seed=2).softmax(-1)
    gate_up = random(experts, 2 * inner, width, dtype=dtype, seed=3) / width**0.5
    down = random(experts, width, inner, dtype=dtype, seed=4) / inner**0.5
    return [tensor.to(device) for tensor in (random(tokens, width, dtype=dtype), slots, shares, gate_up, down)]


@every_dtype
def test_experts_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    for tokens, experts, top_k, width, inner, activation in (
        (9, 5, 2, 64, 64, "silu"),
        (1, 4, 3, 40, 24, "gelu_tanh"),
    ):
        given = case(tokens, experts, top_k, width, inner, dtype, device)
        expected = torch_ops.fused_experts(*(t.double() if t.is_floating_point() else t for t in given), 0, activation)
        close(moe.fused_experts(*given, 0, activation), expected)


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_experts_with_more_tokens_than_a_tile(monkeypatch: pytest.MonkeyPatch, device: torch.device, rows: int) -> None:
    monkeypatch.setattr(moe, "expert_tile", lambda *_: tiles.Tile(rows, 32, 4, 2))
    given = case(70, 3, 2, 32, 32, torch.float32, device)
    close(moe.fused_experts(*given, 0, "silu"), torch_ops.fused_experts(*given, 0, "silu"))


@every_dtype
def test_experts_of_eight_bits_equal_the_twin(device: torch.device, dtype: torch.dtype) -> None:
    """384 columns and rows: three blocks, whose scales are padded to four along the depth."""
    hidden, slots, shares, gate_up, down = case(9, 3, 2, 384, 128, dtype, torch.device("cpu"))
    weights = (*in_blocks(gate_up), *in_blocks(down))
    given = [tensor.to(device) for tensor in (hidden, slots, shares, *weights)]
    exact = torch_fp8.fused_block_experts(hidden.double(), slots, shares.double(), *weights, 0, "silu")
    close(moe.fused_block_experts(*given, 0, "silu"), exact, dtype)
    unscaled = torch_ops.fused_experts(hidden.double(), slots, shares, gate_up.double(), down.double(), 0, "silu")
    assert (exact - unscaled).norm() < 0.06 * unscaled.norm()


def in_blocks(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, N, K] in eight bits, and the scales as the kernels take them."""
    pairs = [quantize(weight.float()) for weight in weights]
    return torch.stack([values for values, _ in pairs]), torch.stack([torch_fp8.pad_scales(s) for _, s in pairs])


def test_a_rank_adds_only_what_its_own_experts_make(device: torch.device) -> None:
    hidden, slots, shares, gate_up, down = case(9, 6, 3, 32, 32, torch.float32, device)
    whole = torch_ops.fused_experts(hidden, slots, shares, gate_up, down, 0, "silu")
    parts = []
    for first, end in ((0, 2), (2, 6)):
        given = (hidden, slots, shares, gate_up[first:end], down[first:end], first, "silu")
        parts.append(moe.fused_experts(*given))
        close(parts[-1], torch_ops.fused_experts(*given))
    close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("kind", ["the twin", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case_name", ["mixtral", "deepseek-v2-lite"])
def test_a_model_gives_the_tokens_of_transformers(monkeypatch: pytest.MonkeyPatch, case_name: str, kind: str) -> None:
    """Through the models' seam: the experts' weights in one tensor, on a CPU whose linear layers are plain."""
    fused = torch_ops.fused_experts if kind == "the twin" else moe.fused_experts
    ops = dataclasses.replace(torch_ops.OPS, fused_experts=fused)
    monkeypatch.setattr("penstock.executor.loading.load.select_ops", lambda *_: ops)
    monkeypatch.setattr("penstock.executor.linear.is_repacked", lambda _: False)
    config = ExecutorConfig(model=str(folder(case_name)), device="cpu", dtype="float32", kv_cache_bytes=2**20)
    driver = Driver(UniprocExecutor(config))
    prompt = [5, 17, 3, 99, 42, 8, 71, 150]
    assert driver.generate(driver.admit(prompt), count=4) == [greedy(case_name, prompt, 4)[0]]

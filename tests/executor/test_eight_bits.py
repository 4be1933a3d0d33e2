"""Checkpoints in eight bits with scales per block: a CPU computes with their values, a GPU's kernels in eight bits."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.executor.kernels.linear import join_blocks
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight, plain_weight
from penstock.executor.protocol import Step, Transfers
from tests.support.checkpoints import compute_with, copied, edit_config, edit_weights, executor_of, prompts, refusal
from tests.support.driver import Driver
from tests.support.eight_bits import QUANTIZATION, dequantize, quantize
from tests.support.packed_models import WEIGHTS, folders
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.small_models import BLOCKS as CASES
from tests.support.twins import changed, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins.experts import fused_experts

CPU = torch.device("cpu")


def in_eight_bits(
    monkeypatch: pytest.MonkeyPatch, fused: Callable[..., torch.Tensor] | None = None, **changes: Any
) -> None:
    """Compute with eight-bit weights as on a GPU, with the twins for kernels."""
    blocks = changed(eight_bits_twin, **changes)
    ops = changed(torch_ops, blocks=blocks, fused_experts=fused)
    compute_with(monkeypatch, ops)


@pytest.mark.parametrize("case", CASES)
def test_on_a_cpu_the_memory_is_that_of_the_full_values(case: str) -> None:
    narrow, full = (executor_of(path).info.memory for path in folders(case))
    assert narrow["FP8 weights as float32"] > narrow["weights"] > 0
    assert narrow["FP8 weights as float32"] + narrow["weights"] == full["weights"]


def logits_of(path: Path, recorded: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """Return the logits [1, vocabulary] after a prompt that comes in chunks."""
    executor = executor_of(path, **options)
    driver = Driver(executor)
    recorded.clear()
    driver.generate(driver.admit(prompts(1, low=41, high=41)[0]), count=1, chunk=16)
    return recorded[-1]


@pytest.mark.parametrize("fused", [None, fused_experts])
@pytest.mark.parametrize("case", CASES)
def test_in_eight_bits_logits_are_near_those_of_the_full_values(
    case: str, fused: Any, monkeypatch: pytest.MonkeyPatch, recorded: list[torch.Tensor]
) -> None:
    """Rounding to eight bits is an error of up to 1/16 in each number, about 1/40 in the mean, at every product."""
    exact = logits_of(folders(case)[1], recorded)
    in_eight_bits(monkeypatch, fused)
    near = logits_of(folders(case)[0], recorded)
    assert 0 < (near - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("max_plain_rows", [0, 2])
def test_norm_and_activation_quantize_as_they_write(monkeypatch: pytest.MonkeyPatch, max_plain_rows: int) -> None:
    """Unless so few rows stay in 16 bits. Products that could apply the norm themselves do not decide that."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        plain = getattr(eight_bits_twin, name)
        return lambda *arguments: (calls.update([name]), plain(*arguments))[1]

    names = ("quantize", "silu_mul_quantize", "add_rms_norm_quantize")
    blocks = changed(eight_bits_twin, **{name: counted(name) for name in names})
    compute_with(monkeypatch, changed(torch_ops, blocks=blocks, max_normed_rows=2, max_plain_rows=max_plain_rows))
    monkeypatch.setattr(eight_bits_twin, "block_linear", counted("block_linear"))
    driver = Driver(executor_of(folders("qwen3")[0]))
    driver.advance(driver.admit([1, 2]))
    # Two layers: `quantize` alone for the first input and the outputs of attention, after a norm for the others.
    expected = {"quantize": 3, "silu_mul_quantize": 2, "add_rms_norm_quantize": 3, "block_linear": 8}
    assert calls == ({} if max_plain_rows == 2 else expected)


def test_in_eight_bits_weights_stay_as_they_were_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, full = folders("qwen3")
    before, on_a_cpu = executor_of(full).info, executor_of(narrow).info
    in_eight_bits(monkeypatch)
    after = executor_of(narrow).info
    assert after.fingerprint != on_a_cpu.fingerprint
    assert list(after.memory) == ["weights", "KV cache"]
    assert after.memory["weights"] < 0.4 * before.memory["weights"]  # float32 there; embedding and head are here, too


def test_every_byte_is_the_number_that_torch_says() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(16, 16)
    made = Weight(BLOCKS, values, torch.full((1, 1), 3.0)).dequantize(CPU, torch.float32)
    torch.testing.assert_close(made, values.float() * 3, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("cuts", "keeps"), cases(__file__, "parts in eight bits"))
def test_eight_bits_are_kept_where_blocks_stay_whole(cuts: list[tuple[int, int]], keeps: bool) -> None:
    whole = Weight(BLOCKS, *quantize(random(512, 256, seed=5)))
    parts = [whole.narrow(0, *cut) for cut in cuts]
    blocks = join_blocks(parts, CPU)
    assert (blocks is not None) is keeps
    if blocks is not None:
        assert blocks.scales is not None
        expected = torch.cat([part.dequantize(CPU, torch.float32) for part in parts])
        assert torch.equal(dequantize(blocks.codes, blocks.scales[:, :2]), expected)
    assert join_blocks([*parts, plain_weight(torch.zeros(128, 256))], CPU) is None
    assert join_blocks([parts[0].narrow(1, 64, 128)], CPU) is None
    assert join_blocks([parts[0].narrow(1, 0, 64)], CPU) is None


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return copied(folders("qwen3")[0], tmp_path / "model")


UP = "model.layers.0.mlp.up_proj.weight"


def test_other_schemes_are_refused_before_weights_are_read(model: Path) -> None:
    (model / WEIGHTS).unlink()
    edit_config(model, quantization_config=QUANTIZATION | {"fmt": "e5m2"})
    assert refusal(model).startswith(f"{model / 'config.json'}: quantization_config: fmt: 'e5m2' found")


def test_scales_may_be_stored_in_sixteen_bits_and_are_part_of_the_fingerprint(model: Path) -> None:
    name = f"{UP}_scale_inv"
    first = executor_of(model).info.fingerprint
    scales = load_file(model / WEIGHTS)[name]
    edit_weights(model, {name: scales.bfloat16()})
    assert executor_of(model).info.fingerprint != first
    edit_weights(model, {name: scales})
    assert executor_of(model).info.fingerprint == first
    scales[2, 1] *= 1 + 2**-20
    edit_weights(model, {name: scales})
    assert executor_of(model).info.fingerprint != first


@pytest.mark.parametrize("case", CASES)
def test_dummy_weights_are_alike(case: str, monkeypatch: pytest.MonkeyPatch, recorded: list[torch.Tensor]) -> None:
    in_eight_bits(monkeypatch)
    stored = executor_of(folders(case)[0]).info.memory
    assert executor_of(folders(case)[0], load_format="dummy").info.memory == stored
    assert 0.3 < logits_of(folders(case)[0], recorded, load_format="dummy").std() < 3


@pytest.mark.parametrize("case", ["qwen3", "deepseek-v3"])
def test_pages_of_eight_bits_take_a_quarter_and_have_their_own_fingerprint(
    case: str, monkeypatch: pytest.MonkeyPatch, recorded: list[torch.Tensor]
) -> None:
    """float32 pages are four times as large. A cached number errs by up to 1/16, the logits by much less than that."""
    in_eight_bits(monkeypatch)
    full = folders(case)[1]
    info = {name: executor_of(full, kv_cache_dtype=name).info for name in ("auto", "fp8", "fp8_e4m3")}
    assert info["auto"].block_bytes == 4 * info["fp8"].block_bytes
    assert info["fp8"].num_blocks == 4 * info["auto"].num_blocks
    assert info["fp8"].fingerprint == info["fp8_e4m3"].fingerprint != info["auto"].fingerprint
    exact = logits_of(full, recorded)
    near = logits_of(full, recorded, kv_cache_dtype="fp8")
    assert 0 < (near - exact).norm() < 0.1 * exact.norm()


def test_a_tier_moves_blocks_of_eight_bits_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    in_eight_bits(monkeypatch)
    executor = executor_of(folders("deepseek-v3")[1], kv_cache_dtype="fp8", kv_host_bytes=2**20)
    driver = Driver(executor)
    sequence = driver.admit([1, 2, 3, 4, 5, 6, 7, 8, 9])
    driver.advance(sequence)
    for number, transfers in ((100, Transfers(saves=[(sequence.blocks[0], 0)])), (101, Transfers(restores=[(0, 77)]))):
        executor.submit(Step(number, [], [], transfers))
        executor.collect()
    blocks = executor._rank.kv.view(torch.uint8)
    assert blocks[77].any() and torch.equal(blocks[77], blocks[sequence.blocks[0]])

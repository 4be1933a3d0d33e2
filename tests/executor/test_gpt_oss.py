"""gpt-oss as its checkpoints are: experts of MXFP4 in one tensor a layer, computed as stored or as numbers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.loading.arrangement import Arranged
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.moe_families import GPT_OSS
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.uniproc import UniprocExecutor
from tests.support.driver import Driver
from tests.support.small_models import folder, reference
from tests.support.twins import changed, torch_ops
from tests.support.twins import experts as experts_twin

PROMPT = [5, 17, 3, 99, 42, 8, 71, 150, 20, 11, 90, 64, 33]


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with random codes for experts, as OpenAI's checkpoint has them."""
    path = tmp_path_factory.mktemp("models") / "gpt-oss-mxfp4"
    shutil.copytree(folder("gpt-oss"), path)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, depth, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, depth // 32, 16), generator=generator).byte()
        tensors[f"{name}_scales"] = torch.randint(119, 124, (experts, rows, depth // 32), generator=generator).byte()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head", "model.layers.*.mlp.router"],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.no_grad()
def expected(path: Path, count: int) -> list[int]:
    """What transformers generates with the numbers that its own reader of MXFP4 makes."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = reference("gpt-oss")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        scales = tensors[name.replace("_blocks", "_scales")]
        wide = convert_moe_packed_tensors(tensors[name], scales, dtype=torch.float32)
        model.state_dict()[name.removesuffix("_blocks")].copy_(wide)
    try:
        out = model.generate(torch.tensor([PROMPT]), max_new_tokens=count, do_sample=False)
    finally:
        model.load_state_dict(kept)
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def executor_of(path: Path, **options: Any) -> UniprocExecutor:
    return UniprocExecutor(ExecutorConfig(model=str(path), kv_cache_bytes=2**22, block_size=8, device="cpu", **options))


@pytest.mark.parametrize(("dtype", "is_coded"), [("auto", True), ("float32", False)])
def test_experts_of_mxfp4_give_the_tokens_of_transformers(coded: Path, dtype: Any, is_coded: bool) -> None:
    executor = executor_of(coded, dtype=dtype)
    assert ("weights as codes" in executor.info.memory) == is_coded
    assert ("coded weights as float32" in executor.info.memory) == (not is_coded)
    driver = Driver(executor)
    assert driver.generate(driver.admit(PROMPT), count=16, chunk=5) == [expected(coded, 16)]


def test_experts_that_are_computed_at_once_stay_codes(coded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose grouped products are played by their twin: every expert's bytes are in one tensor."""
    ops = changed(torch_ops, fused_experts=experts_twin.fused_experts)
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: ops)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)
    monkeypatch.setattr("penstock.executor.models.load._kept_codes", lambda *_: "MXFP4")
    executor = executor_of(coded)
    layers = executor._rank.runner._model.experts
    assert all(layer.is_fused and layer.slots[0].down.tensors()[0].dtype is torch.uint8 for layer in layers)
    driver = Driver(executor)
    assert driver.generate(driver.admit(PROMPT), count=16, chunk=5) == [expected(coded, 16)]


def test_a_scale_that_is_no_number_is_refused_by_name(coded: Path, tmp_path: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(coded, path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 7, 1] = 255
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    for dtype in ("auto", "float32"):
        with pytest.raises(ExecutorError, match=r"layers\.1\.mlp\.experts\.2\.down_proj\.weight.*row 7 has a scale"):
            executor_of(path, dtype=dtype)


@pytest.mark.parametrize(
    ("end", "cut", "message"),
    [
        (
            "blocks",
            (..., slice(15)),
            r"down_proj_blocks' of shape .*15\]: \[experts, rows, depth / 32, 16\] is expected",
        ),
        ("scales", (..., slice(1)), r"down_proj_scales' of shape \[6, 64, 3\] is expected, \[6, 64, 1\] found"),
        ("scales", None, r"down_proj_scales' of shape \[6, 64, 3\] is expected, none found"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused_by_name(
    coded: Path, tmp_path: Path, end: str, cut: Any, message: str
) -> None:
    path = tmp_path / "broken"
    shutil.copytree(coded, path)
    tensors = load_file(path / "model.safetensors")
    stored = tensors.pop(name := f"model.layers.1.mlp.experts.down_proj_{end}")
    if cut is not None:
        tensors[name] = stored[cut].contiguous()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExecutorError, match=message):
        executor_of(path)


def test_experts_lie_in_tensors_of_their_own_for_whoever_reads(coded: Path) -> None:
    view = Arranged(open_checkpoint(coded), GPT_OSS)
    assert view.has_codes
    assert view.shape("model.layers.0.mlp.experts.5.up_proj.weight") == (96, 64)
    assert view.shape("model.layers.0.mlp.experts.5.up_proj.bias") == (96,)
    assert not any(name.endswith(("_blocks", "_scales")) for name in view.names())
    plain = Arranged(open_checkpoint(folder("gpt-oss")), GPT_OSS)
    experts = reference("gpt-oss").state_dict()["model.layers.2.mlp.experts.gate_up_proj"]
    gate, up = (plain.read(f"model.layers.2.mlp.experts.3.{part}_proj.weight") for part in ("gate", "up"))
    assert isinstance(gate, torch.Tensor) and isinstance(up, torch.Tensor)
    assert torch.equal(gate, experts[3, :, 0::2].T) and torch.equal(up, experts[3, :, 1::2].T)


@pytest.mark.parametrize(
    ("field", "value"),
    [("swiglu_limit", 5.0), ("swiglu_alpha", 1.0), ("num_experts_per_tok", 9), ("rope_parameters", None)],
)
def test_what_is_not_computed_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ExecutorError, match=field if value else "rope_scaling"):
        executor_of(folder("gpt-oss"), hf_overrides={field: value})


@pytest.mark.parametrize("cut", [{"quant_method": "mxfp4", "dequantize": True}, {"quant_method": "mxfp4", "group": 16}])
def test_other_kinds_of_mxfp4_are_refused_by_name(coded: Path, cut: dict[str, Any]) -> None:
    with pytest.raises(ExecutorError, match="dequantize|group"):
        executor_of(coded, hf_overrides={"quantization_config": cut})


def test_random_weights_need_no_tensors_of_the_folder(coded: Path, tmp_path: Path) -> None:
    shutil.copy(coded / "config.json", tmp_path)
    assert "weights as codes" not in executor_of(tmp_path, load_format="dummy").info.memory

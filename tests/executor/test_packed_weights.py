"""Checkpoints of AWQ, GPTQ and compressed-tensors against transformers on the numbers that their codes stand for: as codes
and widened on a CPU, and where the seam of a GPU's kernels is there."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.executor.code_types import is_computed
from penstock.executor.kernels.cpu_product import CpuProduct, code_type
from penstock.executor.kernels.linear import Linear, make_linear, multiply_each
from penstock.executor.kernels.weight import Groups, Weight, group_of
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.export import export
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.ranks.ranked import open_multiproc
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_models import prompts
from tests.support.driver import Driver
from tests.support.packed_models import CASES, WEIGHTS, folders, greedy, quantize
from tests.support.small_models import REFUSED
from tests.support.twins import changed, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins import grouped as grouped_twin

COUNT = 12
CPU = torch.device("cpu")
needs_codes = pytest.mark.skipif(not is_computed(), reason="without AVX2 codes become numbers")


def config_of(path: Path, **options: Any) -> ExecutorConfig:
    given = {"kv_cache_bytes": 2**22, "block_size": 8, "max_num_seqs": 16, **options}
    return ExecutorConfig(model=str(path), **given)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the twins for kernels."""
    ops = changed(torch_ops, groups=grouped_twin, blocks=eight_bits_twin)
    monkeypatch.setattr("penstock.executor.models.load.select_ops", lambda *_: ops)
    monkeypatch.setattr("penstock.executor.kernels.linear.is_repacked", lambda _: False)


@pytest.mark.parametrize("name", CASES)
def test_every_weight_is_the_numbers_that_were_packed(name: str) -> None:
    narrow, full = folders(name)
    checkpoint, numbers = open_checkpoint(narrow), load_file(full / WEIGHTS)
    packed = 0
    for weight, expected in numbers.items():
        assert checkpoint.shape(weight) == expected.shape
        part = checkpoint.read(weight)
        if isinstance(part, Weight):
            packed += 1
            assert torch.equal(part.dequantize(CPU, torch.float32), expected)
            assert torch.equal(part.narrow(0, 3, 40).dequantize(CPU, torch.bfloat16), expected[3:43].bfloat16())
            assert (part.zeros is None) is (CASES[name].is_symmetric)
            assert (part.order is None) is (not CASES[name].is_ordered)
        else:
            assert isinstance(part, torch.Tensor) and torch.equal(part.float(), expected)
    assert packed >= 14


@needs_codes
@pytest.mark.parametrize("name", CASES)
def test_on_a_cpu_tokens_are_those_of_the_numbers(name: str) -> None:
    given = prompts(3, seed=3)
    executor = UniprocExecutor(config_of(folders(name)[0], **({"dtype": "float32"} if "floats" in name else {})))
    assert executor.info.dtype == "float32"
    memory = executor.info.memory
    if "floats" in name:
        assert "weights as codes" not in memory and memory["FP8 weights as float32"] > 0
    elif name == "gptq-v2":  # scales of 32 bits that no 16 are
        assert "weights as codes" not in memory and memory["coded weights as float32"] > 0
    else:
        assert memory["weights as codes"] > 0 and "coded weights as float32" not in memory
    assert Driver(executor).one_by_one(COUNT, given) == [greedy(name, prompt, COUNT) for prompt in given]


@pytest.mark.parametrize("name", CASES)
def test_where_a_gpu_computes_tokens_are_those_of_the_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    given = prompts(3, seed=3)
    executor = UniprocExecutor(config_of(folders(name)[0], dtype="float32"))
    memory = executor.info.memory
    assert all(experts.is_fused for experts in executor._rank._loaded.model.experts)
    assert memory["weights as codes"] > 0 and not {"coded weights as float32", "FP8 weights as float32"} & memory.keys()
    assert Driver(executor).one_by_one(COUNT, given) == [greedy(name, prompt, COUNT) for prompt in given]


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("name", "by_experts"),
    [("awq-32", False), ("gptq-ordered", False), ("packed-8", False), ("packed-experts", True)],
)
def test_ranks_cut_and_give_the_same_tokens(name: str, by_experts: bool) -> None:
    given = prompts(3, seed=3)
    config = config_of(folders(name)[0], tensor_parallel_size=2, enable_expert_parallel=by_experts)
    executor = open_multiproc(config)
    try:
        # Inputs that are out of order are cut as numbers.
        assert not is_computed() or ("coded weights as float32" in executor.info.memory) is CASES[name].is_ordered
        got = Driver(executor).one_by_one(COUNT, given)
    finally:
        executor.close()
    assert got == [greedy(name, prompt, COUNT) for prompt in given]


def test_a_part_cut_within_groups_has_the_numbers_of_the_whole() -> None:
    codes, made = torch.randint(16, (3, 256), dtype=torch.uint8), torch.Generator().manual_seed(1)
    scales = torch.rand(3, 2, generator=made).half()
    whole = Weight(Groups(4), codes, scales, torch.full((3, 2), 5, dtype=torch.uint8))
    numbers = whole.dequantize(CPU, torch.float32)
    for start, size, group in ((128, 128, 128), (64, 128, 64), (0, 160, 32), (16, 48, 16)):
        part = whole.narrow(1, start, size)
        assert group_of(part) == group
        assert torch.equal(part.dequantize(CPU, torch.float32), numbers[:, start : start + size])
    for part, start, size in ((whole, 8, 16), (whole._replace(order=torch.arange(256)), 0, 128)):
        cut = part.narrow(1, start, size)
        assert cut.is_numbers and torch.equal(cut.codes, numbers[:, start : start + size])
    channel = whole._replace(scales=scales[:, :1], zeros=None).narrow(1, 7, 30)
    assert group_of(channel) == 30


@needs_codes
def test_codes_in_panels_of_a_cpu_stand_for_the_same_numbers() -> None:
    for name in ("awq-32", "awq-all", "gptq-8", "packed", "packed-8-zeros", "packed-8", "bytes-zeros"):
        checkpoint = open_checkpoint(folders(name)[0])
        part = checkpoint.read("model.layers.0.mlp.up_proj.weight")
        assert isinstance(part, Weight) and code_type(part) is not None
        made = CpuProduct([part], torch.float32).rows(torch.arange(part.shape[0]))
        assert torch.equal(made, part.dequantize(CPU, torch.float32))
    assert isinstance(part, Weight) and part.scales is not None
    assert code_type(part._replace(scales=part.scales.float() + 1e-6)) is None, "in 16 bits scales would be others"


@needs_codes
def test_experts_of_different_kinds_are_computed_each_by_its_own() -> None:
    """Columns in order, out of order, numbers; also when another's tensors have taken the place of a layer's own."""
    made = [quantize(torch.randn(24, 128), CASES["gptq-ordered"], seed) for seed in (0, 1)]
    layers: list[Linear] = [make_linear(made[0].numbers, None, torch_ops)]
    numbers, parts = [made[0].numbers], []
    for one, order in ((made[0], None), (made[1], made[1].g_idx.argsort(stable=True))):
        codes = one.codes if order is None else one.codes[:, order]
        part = Weight(Groups(4), codes, one.scales, order=order)
        parts.append(part)
        product = CpuProduct([part], torch.float32)
        layers.append(Linear(product.weights, None, torch_ops, product))
        numbers.append(part.dequantize(CPU, torch.float32))
    for first in range(3):
        picked, x = [*layers[first:], *layers[:first]], torch.randn(9, 128)
        expected = [
            part @ weight.t() for part, weight in zip(x.split(3), [*numbers[first:], *numbers[:first]], strict=True)
        ]
        torch.testing.assert_close(multiply_each(picked, [3, 3, 3], x), torch.cat(expected), rtol=1e-3, atol=1e-3)
    ordered, other = layers[2], CpuProduct(parts[:1], torch.float32)
    for tensor, new in zip(ordered.tensors(), [other.weights[0].codes, torch.arange(128)], strict=True):
        tensor.set_(new.clone())  # type: ignore[call-overload]
    x = torch.randn(3, 128)
    torch.testing.assert_close(multiply_each([ordered], [3], x), other(x))


# Files that lie.


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(folders(name)[0], tmp_path / "model"))


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    changed_ones = {name.replace("UP", UP): part for name, part in changes.items()}
    save_file({name: part for name, part in (tensors | changed_ones).items() if part is not None}, path / WEIGHTS)


def reconfigure(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= changes
    (path / "config.json").write_text(json.dumps(config))


def refusal(path: Path) -> str:
    with pytest.raises(ExecutorError) as caught:
        UniprocExecutor(config_of(path, dtype="float32"))
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


UP = "model.layers.0.mlp.up_proj"
MINUS, LOW = torch.full((128,), -2, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("gptq", {"UP.g_idx": MINUS}, f"tensor '{UP}.g_idx': group -2 found; one of 0 to 1 is expected"),
        ("gptq", {"UP.g_idx": LOW + 7}, f"tensor '{UP}.g_idx': group 7 found; one of 0 to 1 is"),
        ("gptq", {"UP.g_idx": LOW}, f"tensor '{UP}.g_idx': group 0 with inputs 128 found; 64 of each is"),
        ("gptq", {"UP.g_idx": LOW[:9]}, f"tensor '{UP}.g_idx': shape [9] found; [128] is expected"),
        ("gptq", {"UP.g_idx": LOW.float()}, f"tensor '{UP}.g_idx': dtype F32 found; I32 or I64 is"),
        ("gptq", {"UP.qzeros": None}, f"tensor '{UP}.qzeros' of shape [2, 32] is missing"),
        ("gptq", {"UP.qzeros": torch.zeros(2, 31).int()}, f"tensor '{UP}.qzeros': shape [2, 31] found; [2, 32] is"),
        ("gptq", {"UP.scales": torch.ones(4, 256)}, f"tensor '{UP}.scales': shape [4, 256] found; [2, 256] is"),
        ("gptq", {"UP.scales": torch.full((2, 256), torch.nan)}, f"'{UP}.weight': row 0 has a scale that is not"),
        ("gptq", {"UP.scales": torch.ones(2, 256).int()}, f"tensor '{UP}.scales': dtype I32 found; F16 or BF16 or F32"),
        ("gptq", {"UP.qweight": torch.ones(8, 256).int()}, f"tensor '{UP}.weight' has shape [256, 64]; config.json"),
        ("gptq", {"UP.qweight": torch.ones(8).int()}, f"tensor '{UP}.qweight': shape [8] found; a matrix's is"),
        ("gptq", {"UP.qweight": torch.ones(16, 256)}, f"tensor '{UP}.qweight': dtype F32 found; I32 is expected"),
        ("gptq", {"UP.bias": torch.ones(256)}, f"1 tensors that the architecture does not have: '{UP}.bias'"),
        ("awq", {"UP.qweight": torch.ones(128, 31).int()}, f"tensor '{UP}.weight' has shape [248, 128]; config.json"),
        ("awq", {"UP.scales": torch.full((2, 256), torch.inf)}, f"tensor '{UP}.weight': row 0 has a scale that"),
        (
            "packed",
            {"UP.weight_shape": torch.tensor([256, 1 << 40])},
            f"tensor '{UP}.weight_shape': value [256, {1 << 40}] found; [256, 128], by the packed weight, is expected",
        ),
        ("packed", {"UP.weight_shape": torch.tensor([-1, 128])}, f"tensor '{UP}.weight_shape': value [-1, 128] found"),
        ("packed", {"UP.weight_shape": None}, f"tensor '{UP}.weight_shape' of shape [2] is missing"),
        (
            "packed",
            {"UP.weight_scale": torch.ones(256, 3)},
            f"tensor '{UP}.weight_scale': groups 3 found; as many as 4 bits by 64 have for 128 inputs is expected",
        ),
        ("packed", {"UP.weight_scale": torch.ones(1, 2)}, f"tensor '{UP}.weight_scale': shape [1, 2] found; [256, 2]"),
        ("packed-zeros", {"UP.weight_zero_point": LOW[:8, None]}, f"'{UP}.weight_zero_point': shape [8, 1] found; [32"),
        ("floats", {"UP.weight_scale": torch.ones(3)}, f"tensor '{UP}.weight_scale': shape [3] found; [256, 1] is"),
        ("floats", {"UP.weight_zero_point": LOW}, f"1 tensors that the architecture does not have: '{UP}.weight_zero"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(
    model: Callable[[str], Path], name: str, changes: dict[str, Any], complaint: str
) -> None:
    path = model(name)
    edit(path, **changes)
    assert complaint in refusal(path)


WEIGHT_FIELDS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}


@pytest.mark.parametrize(("name", "changes", "complaint"), REFUSED["schemes of codes"])
def test_schemes_that_are_not_computed_are_refused_by_field(
    model: Callable[[str], Path], name: str, changes: dict[str, Any], complaint: str
) -> None:
    path = model(name)
    reconfigure(path, **changes)
    assert complaint in refusal(path)


def test_several_schemes_in_one_file_go_by_the_tensors_shapes(model: Callable[[str], Path]) -> None:
    path = model("packed")
    groups = {name: {"weights": WEIGHT_FIELDS | {"group_size": size}} for name, size in (("a", 32), ("b", 64))}
    reconfigure(path, config_groups=groups)
    assert isinstance(open_checkpoint(path).read(f"{UP}.weight"), Weight)


def test_an_old_file_beside_config_json_says_as_much(model: Callable[[str], Path]) -> None:
    path = model("gptq")
    config = json.loads((path / "config.json").read_text())
    fields = config.pop("quantization_config")
    (path / "config.json").write_text(json.dumps(config))
    old = {name: fields[name] for name in ("bits", "group_size", "desc_act", "sym", "damp_percent")}
    (path / "quantize_config.json").write_text(json.dumps(old))
    part = open_checkpoint(path).read(f"{UP}.weight")
    assert isinstance(part, Weight)


def test_an_export_writes_the_numbers_and_computing_codes_is_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, full = folders("gptq-ordered")
    export(open_checkpoint(narrow), tmp_path / "out", "float32")
    written, expected = load_file(tmp_path / "out" / WEIGHTS), load_file(full / WEIGHTS)
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    widened = UniprocExecutor(config_of(narrow, dtype="float32")).info.fingerprint
    as_on_a_gpu(monkeypatch)
    assert UniprocExecutor(config_of(narrow, dtype="float32")).info.fingerprint != widened

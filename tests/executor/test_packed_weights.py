"""Checkpoints of AWQ, GPTQ and compressed-tensors: each weight has the values that were packed, whole, cut and repacked."""

import json
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from benchmarks.export import export
from safetensors.torch import load_file

from penstock.executor.code_types import has_vectors
from penstock.executor.kernels.cpu_product import CpuProduct
from penstock.executor.kernels.linear import Linear, make_linear, multiply_each
from penstock.executor.kernels.stored_formats import BLOCKS, Groups, Shuffled, group_of
from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.checkpoint import open_checkpoint
from penstock.executor.models.weights import Matrix, Weights
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from tests.support import eight_bits
from tests.support.checkpoints import compute_codes_as_a_gpu, copied, edit_config, edit_weights, executor_of
from tests.support.coded import FILE_TYPES, coded
from tests.support.packed_models import CASES, WEIGHTS, folders, quantize
from tests.support.paged import random
from tests.support.refusals import cases
from tests.support.twins import changed, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin

CPU = torch.device("cpu")
needs_codes = pytest.mark.skipif(not has_vectors(), reason="without AVX2 codes become numbers")


@pytest.mark.parametrize("name", CASES)
def test_every_weight_has_the_values_that_were_packed(name: str) -> None:
    narrow, full = folders(name)
    checkpoint, numbers = open_checkpoint(narrow), load_file(full / WEIGHTS)
    packed = 0
    for weight, expected in numbers.items():
        assert checkpoint.shape(weight) == expected.shape
        part = checkpoint.read(weight)
        if isinstance(part, Weight):
            packed += 1
            assert torch.equal(part.dequantize(CPU, torch.float32), expected)
            assert torch.equal(part.narrow(0, 3, 5).dequantize(CPU, torch.bfloat16), expected[3:8].bfloat16())
            assert (part.zeros is None) is (CASES[name].is_symmetric)
            assert isinstance(part.format, Shuffled) is CASES[name].is_ordered
        else:
            assert isinstance(part, torch.Tensor) and torch.equal(part.float(), expected)
    assert packed >= 13


SCALES = torch.rand(300, 2, generator=torch.Generator().manual_seed(1)).half()
IN_GROUPS = Weight(Groups(4), torch.randint(16, (300, 256), dtype=torch.uint8), SCALES, (3 * SCALES).to(torch.uint8))
WHOLE: dict[str, Weight] = dict(cases(__file__, "weights to be cut", **globals()))


@pytest.mark.parametrize(("kind", "start", "size", "group"), cases(__file__, "cuts of columns"))
def test_a_part_cut_anywhere_has_the_numbers_of_the_whole(kind: str, start: int, size: int, group: int | None) -> None:
    """It stays codes, of groups of this size, or becomes numbers."""
    whole = WHOLE[kind]
    for first, count in ((0, 300), (100, 60), (299, 1)):
        part = whole.narrow(0, first, count).narrow(1, start, size)
        is_broken = kind == "blocks" and first % 128 > 0
        assert part.shape == (count, size) and part.is_numbers == (group is None or is_broken)
        assert not isinstance(part.format, Groups) or group_of(part) == group
        for dtype in (torch.float32, torch.bfloat16):
            expected = whole.dequantize(CPU, torch.float32)[first : first + count, start : start + size].to(dtype)
            assert torch.equal(part.dequantize(CPU, dtype), expected)


@needs_codes
@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize("kind", ["blocks", *CASES, *FILE_TYPES])
def test_rows_that_alternate_between_kinds_are_sorted_as_codes(kind: str, is_gpu: bool) -> None:
    if kind in CASES:
        stored = open_checkpoint(folders(kind)[0]).read("model.layers.1.self_attn.q_proj.weight")
    elif kind in FILE_TYPES:
        stored = coded(np.random.default_rng(1), (256, 256), kind)[0]
    else:
        stored = Weight(BLOCKS, *eight_bits.quantize(random(1024, 256, seed=1)))
    assert isinstance(stored, Weight)
    (rows, columns), turn = stored.shape, 256 if kind == "blocks" else 32
    sizes = turn // 2, turn - turn // 2
    ops = changed(torch_ops, has_packed=True, blocks=eight_bits_twin) if is_gpu else torch_ops
    layers, dequantized = [], []
    for pieces in (None, sizes):
        read = Mock(return_value=stored)
        weights = Weights(read, torch.float32, CPU, RankGroup(), print, ops, Mock(), None, "MXFP4" if is_gpu else "all")
        layers.append(weights.linear(columns, Matrix("q_proj", rows, pieces=pieces)))
        dequantized.append(weights.linear_maker.num_bytes["widened"])
    is_first = torch.arange(rows) % turn < sizes[0]
    order = torch.cat([is_first.nonzero(), (~is_first).nonzero()]).flatten()
    x = torch.eye(columns) if is_gpu else random(3, columns, seed=2)  # sums of torch may depend on the column
    assert torch.equal(layers[1](x), layers[0](x)[:, order])
    is_shuffled = isinstance(stored.format, Shuffled)
    assert dequantized[0] == dequantized[1] and (dequantized[0] == 0 or not is_gpu or is_shuffled)
    assert dequantized[0] > 0 or not is_shuffled


def test_rows_that_break_up_blocks_of_eight_bits_are_sorted_as_numbers() -> None:
    whole = Weight(BLOCKS, *eight_bits.quantize(random(512, 256, seed=1)))
    rows = torch.arange(512).view(4, 2, 64).transpose(0, 1).flatten()
    part = whole.take(rows)
    assert part.is_numbers and torch.equal(part.codes, whole.dequantize(CPU, torch.float32)[rows])


@needs_codes
def test_codes_in_panels_of_a_cpu_stand_for_the_same_numbers() -> None:
    for name in ("awq-32", "awq-all", "gptq-8", "packed", "packed-8-zeros", "packed-8", "bytes-zeros"):
        checkpoint = open_checkpoint(folders(name)[0])
        part = checkpoint.read("model.layers.0.mlp.up_proj.weight")
        assert isinstance(part, Weight) and part.format.codes_for_cpu(part) is not None
        rows = CpuProduct([part], torch.float32).rows(torch.arange(part.shape[0]))
        assert torch.equal(rows, part.dequantize(CPU, torch.float32))
    assert isinstance(part, Weight) and part.scales is not None
    wider = part._replace(scales=part.scales.float() + 1e-6)
    assert wider.format.codes_for_cpu(wider) is None, "in 16 bits scales would be others"


@needs_codes
def test_experts_of_different_kinds_are_computed_each_by_its_own() -> None:
    """Some are codes and some numbers; the tensors of another expert may have replaced a layer's own."""
    stored = [quantize(torch.randn(24, 128), CASES["gptq"], seed) for seed in (0, 1)]
    layers: list[Linear] = [make_linear(stored[0].full, None, torch_ops)]
    numbers, parts = [stored[0].full], []
    for one in stored:
        part = Weight(Groups(4), one.codes, one.scales)
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
    moved, other = layers[2], CpuProduct(parts[:1], torch.float32)
    (tensor,) = moved.tensors()
    tensor.set_(other.weights[0].codes.clone())  # type: ignore[call-overload]
    x = torch.randn(3, 128)
    torch.testing.assert_close(multiply_each([moved], [3], x), other(x))


def test_several_schemes_in_one_file_go_by_the_tensors_shapes(tmp_path: Path) -> None:
    path = copied(folders("packed")[0], tmp_path / "model")
    fields = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    groups = {name: {"weights": fields | {"group_size": size}} for name, size in (("a", 32), ("b", 64))}
    config = json.loads((path / "config.json").read_text())
    edit_config(path, quantization_config=config["quantization_config"] | {"config_groups": groups})
    assert isinstance(open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight"), Weight)


def test_a_size_of_groups_that_does_not_divide_the_inputs_is_refused(tmp_path: Path) -> None:
    path, name = copied(folders("gptq")[0], tmp_path / "model"), "model.layers.0.mlp.up_proj"
    edit_weights(path, {f"{name}.qweight": torch.zeros(96 // 8, 256, dtype=torch.int32)})
    with pytest.raises(ExecutorError, match=f"group_size: 64 found; a divisor of 96, the inputs of '{name}', is"):
        open_checkpoint(path).read(f"{name}.weight")


def test_an_old_quantize_config_beside_config_json_is_read(tmp_path: Path) -> None:
    path = copied(folders("gptq")[0], tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())["quantization_config"]
    edit_config(path, quantization_config=None)
    old = {name: fields[name] for name in ("bits", "group_size", "desc_act", "sym", "damp_percent")}
    (path / "quantize_config.json").write_text(json.dumps(old))
    part = open_checkpoint(path).read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(part, Weight)
    given = ExecutorConfig(model=str(path), hf_overrides={"quantization_config": None})
    assert not open_checkpoint(path, given).has_codes, "an option that says otherwise has the last word"


@pytest.mark.parametrize("name", ["gptq-ordered", "deepseek-v3"])
def test_an_export_writes_the_numbers(name: str, tmp_path: Path) -> None:
    narrow, full = folders(name)
    export(open_checkpoint(narrow), tmp_path / "out", "float32")
    written, expected = load_file(tmp_path / "out" / WEIGHTS), load_file(full / WEIGHTS)
    zeros = {each for each in written if name == "gptq-ordered" and not written[each].any()}  # biases of the layout
    assert written.keys() - zeros == expected.keys() - zeros
    assert all(torch.equal(written[name], expected[name]) for name in expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_computing_codes_is_another_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow, _ = folders("gptq")
    widened = executor_of(narrow).info.fingerprint
    compute_codes_as_a_gpu(monkeypatch)
    assert executor_of(narrow).info.fingerprint != widened

"""Small models whose projections are codes, as AWQ, GPTQ, compressed-tensors and DeepSeek's eight bits store them, and the
same models in full, for the oracle. The layouts are written here independently, a code at a time. The models are those of
packed_models.json."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.support import eight_bits, small_models
from tests.support.small_models import place_for, random_model

Tensor = torch.Tensor
WEIGHTS = "model.safetensors"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # of the outputs in a word


class Case(NamedTuple):
    layout: str
    bits: int = 4
    group: int = 64
    is_symmetric: bool = True
    is_ordered: bool = False  # groups are of inputs from everywhere
    scales: str = "float16"
    model: str = "qwen2"


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text())
CASES = {name: Case(**fields) for name, fields in _DATA["cases"].items()}
BLOCKS = {name: Case("blocks", model=name) for name in small_models.BLOCKS}


class Quantized(NamedTuple):
    codes: Tensor  # uint8 or float8 [N, K]
    scales: Tensor  # [N, groups]
    zeros: Tensor  # int64 [N, groups]
    g_idx: Tensor  # [K]
    full: Tensor  # float32 [N, K]


def quantize(weight: Tensor, case: Case, seed: int = 0) -> Quantized:
    """Round each number of a weight [N, K] to the nearest that the layout can store."""
    if case.layout == "blocks":
        values, scales = eight_bits.quantize(weight)
        return Quantized(values, scales, torch.zeros(0), torch.zeros(0), eight_bits.dequantize(values, scales))
    (rows, columns), most = weight.shape, (1 << case.bits) - 1
    dtype: torch.dtype = getattr(torch, case.scales)
    if case.layout == "floats":
        top = weight.abs().amax(1, keepdim=True) if case.group else weight.abs().amax().expand(rows, 1)
        scales = (top / 448).to(dtype)
        floats = (weight / scales.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
        return Quantized(floats, scales, torch.zeros(0), torch.zeros(0), floats.float() * scales.float())
    group = columns if case.group == -1 else case.group
    g_idx = torch.arange(columns) // group
    if case.is_ordered:
        g_idx = g_idx[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))]
    members = [weight[:, g_idx == number] for number in range(columns // group)]
    if case.is_symmetric:
        scales = torch.stack([part.abs().amax(1) / (most // 2) for part in members], 1).to(dtype)
        zeros = torch.full(scales.shape, most // 2 + 1)
    else:
        low = torch.stack([part.amin(1).clamp(max=0) for part in members], 1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in members], 1)
        scales = ((high - low) / most).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, most).long()
    by, zero = scales.float()[:, g_idx], zeros[:, g_idx]
    codes = (weight / by + zero).round().clamp(0, most)
    return Quantized(codes.to(torch.uint8), scales, zeros, g_idx, (codes - zero) * by)


def words(codes: Tensor, bits: int) -> Tensor:
    """[n, m] -> int32 [n, words], the first code in the lowest bits."""
    each = 32 // bits
    codes = torch.nn.functional.pad(codes.long(), (0, -codes.shape[1] % each)).unflatten(1, (-1, each))
    packed = sum(codes[..., place] << bits * place for place in range(each))
    assert isinstance(packed, Tensor)
    return (packed - (packed >> 31 << 32)).int()


def stored(name: str, weight: Quantized, case: Case) -> dict[str, Tensor]:
    """Return the tensors of a layer, by its name."""
    codes, bits, middle = weight.codes, case.bits, 1 << case.bits - 1
    parts: dict[str, Tensor]
    if case.layout == "blocks":
        parts = {"weight": codes, "weight_scale_inv": weight.scales}
    elif case.layout == "awq":
        places = [8 * (index // 8) + AWQ_ORDER[index % 8] for index in range(len(codes))]
        zeros = words(weight.zeros[places].t(), 4)
        parts = {"qweight": words(codes[places].t(), 4), "qzeros": zeros, "scales": weight.scales.t()}
    elif case.layout.startswith("gptq"):
        zeros = words(weight.zeros.t() - int(case.layout == "gptq"), bits)
        parts = {"qweight": words(codes, bits).t(), "qzeros": zeros, "scales": weight.scales.t()}
        parts |= {"g_idx": weight.g_idx.int(), "bias": torch.zeros(len(codes))}
    else:
        parts = {"weight_scale": weight.scales}
        if case.layout == "packed":
            parts |= {"weight_packed": words(codes, bits), "weight_shape": torch.tensor(codes.shape)}
            parts |= {"weight_g_idx": weight.g_idx.int()} if case.is_ordered else {}
            if not case.is_symmetric:
                parts["weight_zero_point"] = words(weight.zeros.t(), bits).t()
        elif case.layout == "bytes":
            parts["weight"] = (codes.short() - middle).to(torch.int8)
            if not case.is_symmetric:
                parts["weight_zero_point"] = (weight.zeros - middle).to(torch.int8)
        else:
            parts["weight"] = codes
            parts["weight_scale"] = weight.scales if case.group else weight.scales[0]
            parts["input_scale"] = torch.ones(1)
    return {f"{name}.{key}": part.contiguous() for key, part in parts.items()}


def quantization(case: Case) -> dict[str, Any]:
    """Return the `quantization_config` of config.json."""
    if case.layout == "blocks":
        return eight_bits.QUANTIZATION
    fields: dict[str, dict[str, Any]] = _DATA["quantization"]
    if case.layout == "awq":
        return fields["awq"] | {"group_size": case.group}
    if case.layout.startswith("gptq"):
        own = {"bits": case.bits, "group_size": case.group, "desc_act": case.is_ordered, "sym": case.is_symmetric}
        return fields["gptq"] | own | {"checkpoint_format": case.layout}
    kind, formats = "float" if case.layout == "floats" else "int", {"packed": "pack", "bytes": "int", "floats": "float"}
    weights = fields["compressed weights"] | {
        "num_bits": case.bits,
        "type": kind,
        "symmetric": case.is_symmetric,
        "strategy": "group" if case.group > 0 else "channel" if case.group else "tensor",
        "group_size": case.group if case.group > 0 else None,
        "actorder": "group" if case.is_ordered else None,
    }
    inputs = None if case.layout == "packed" else {"num_bits": 8, "type": kind, "dynamic": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
    return fields["compressed"] | {"format": f"{formats[case.layout]}-quantized", "config_groups": groups}


@cache
def folders(name: str) -> tuple[Path, Path]:
    """Return the folders of the model as codes, and as the numbers that they stand for."""
    case, root = (CASES | BLOCKS)[name], place_for(f"packed {name}")
    narrow, full = root / "narrow", root / "full"
    is_blocks = case.layout == "blocks"
    random_model(*(small_models.BLOCKS if is_blocks else small_models.CODED)[case.model]).save_pretrained(narrow)
    tensors = load_file(narrow / WEIGHTS)
    numbers = dict(tensors)
    seeds: dict[str, int] = {}
    gates = "" if is_blocks else "|_ba"  # a few rows, of which no 128 are neighbours once they are sorted
    is_stored = re.compile(rf"_proj(_with_mqa|_qkv|_qkvz|_z{gates})?\.weight$").search
    for weight in sorted(filter(is_stored, tensors)):
        layer = weight.removesuffix(".weight")
        # Projections of the same inputs may have the same order, and need not.
        seed = seeds.setdefault(layer.rsplit(".", 1)[0].replace("k_proj", ""), len(seeds))
        quantized = quantize(tensors.pop(weight).float(), case, seed + ("k_proj" in layer))
        numbers[weight] = quantized.full
        tensors = stored(layer, quantized, case) | tensors
    config = json.loads((narrow / "config.json").read_text())
    full.mkdir()
    (full / "config.json").write_text(json.dumps(config))
    save_file(numbers, full / WEIGHTS, metadata={"format": "pt"})
    (narrow / "config.json").write_text(json.dumps(config | {"quantization_config": quantization(case)}))
    save_file(tensors, narrow / WEIGHTS)
    return narrow, full


@cache
def oracle(name: str) -> Any:
    """Return transformers' model of the full numbers."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folders(name)[1], dtype=torch.float32).eval()

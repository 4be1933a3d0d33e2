"""Reads a checkpoint's quantization schemes from config.json, and refuses unsupported ones with the name of the field.

The tensor names show which weights are quantized: by AWQ, GPTQ, compressed-tensors or MXFP4, or as float8_e4m3fn
`x.weight` with a scale per 128 × 128 block in `x.weight_scale_inv`, stored as floats whatever `scale_fmt` is. Fields that
only describe the quantization process are ignored (field_rules.json). The config's quantization of inputs is not applied,
which makes the products more exact.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.executor.kernels.stored_formats import BLOCK
from penstock.executor.loading.fields import RULES, Fields, read_json

GROUPS = (32, 64, 128, -1)
SUFFIX = "_scale_inv"  # name suffix of the scales by which an FP8 weight is multiplied
OLD_FILE = "quantize_config.json"  # written by AutoGPTQ, with no quantization settings in config.json
Layout = Literal["awq", "gptq", "gptq_v2", "packed", "bytes", "floats"]


class Scheme(NamedTuple):
    layout: Layout
    bits: int
    group: int  # number of neighbours along the depth that share one scale; -1: all
    is_symmetric: bool


def read_schemes(config: dict[str, Any], where: str) -> list[Scheme]:
    """Return the group-quantization schemes that weights may use; [] for unquantized, block-scaled FP8 and MXFP4."""
    fields = Fields(config, where).section("quantization_config")
    if fields is None:
        return []
    fields.only("quant_method", *_READERS)
    method = fields.text("quant_method")
    RULES[method].check(fields)
    schemes = _READERS[method](fields)
    fields.no_others()
    return schemes


def old_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of AutoGPTQ's own file as a quantization_config; None if there is no such file."""
    path = folder / OLD_FILE
    return {"quant_method": "gptq"} | read_json(path) if path.is_file() else None


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of an FP8 weight."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _group(fields: Fields) -> int:
    fields.only("group_size", *GROUPS)
    return fields.integer("group_size", low=-1)


def _awq(fields: Fields) -> list[Scheme]:
    return [Scheme("awq", 4, _group(fields), False)]


def _gptq(fields: Fields) -> list[Scheme]:
    is_v2 = fields.text("checkpoint_format", fields.text("format", "gptq")) == "gptq_v2"
    return [Scheme("gptq_v2" if is_v2 else "gptq", fields.integer("bits"), _group(fields), fields.flag("sym", True))]


def _compressed(fields: Fields) -> list[Scheme]:
    formats: dict[str, tuple[Layout, str, tuple[int, ...]]] = {
        "pack-quantized": ("packed", "int", (4, 8)),
        "int-quantized": ("bytes", "int", (8,)),
        "naive-quantized": ("bytes", "int", (8,)),
        "float-quantized": ("floats", "float", (8,)),
    }
    layout, kind, bits = formats[fields.text("format")]
    groups = fields.required_section("config_groups", "an object of groups")
    schemes = []
    for name in groups.names():
        group = groups.required_section(name, "an object with weights")
        group.texts("targets")
        group.only("format", fields.text("format"), default=fields.text("format"))
        group.only("output_activations", None)
        inputs = group.section("input_activations")
        if inputs is not None:
            inputs.only("num_bits", 8)
        schemes.append(_weights(group.required_section("weights"), layout, kind, bits))
        group.no_others()
    return schemes


def _weights(fields: Fields, layout: Layout, kind: str, bits: tuple[int, ...]) -> Scheme:
    fields.only("type", kind)
    fields.only("num_bits", *bits)
    RULES["weights of compressed-tensors"].check(fields)
    strategies = ("channel", "tensor") if layout == "floats" else ("group", "channel", "tensor")
    fields.only("strategy", *strategies)
    is_grouped = fields.text("strategy") == "group"
    if not is_grouped:
        fields.only("group_size", None, -1)
    fields.only("symmetric", *((True,) if layout == "floats" else (True, False)), default=True)
    group = _group(fields) if is_grouped else -1
    return Scheme(layout, fields.integer("num_bits"), group, fields.flag("symmetric", True))


_READERS: dict[str, Callable[[Fields], list[Scheme]]] = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}
_READERS |= dict.fromkeys(("fp8", "mxfp4"), lambda _fields: [])  # the tensors show which weights are stored so

"""Reads a checkpoint's quantization schemes from config.json, and refuses unsupported ones with the name of the field.

The tensor names show which weights are quantized: by AWQ, GPTQ, compressed-tensors or MXFP4, or as float8_e4m3fn
`x.weight` with a scale per 128 × 128 block in `x.weight_scale_inv`. Fields that only describe the quantization process
are ignored. The config's quantization of inputs is not applied, which makes the products more exact.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.executor.kernels.stored_formats import BLOCK
from penstock.executor.loading.fields import Fields, read_json

GROUPS = (32, 64, 128, -1)
SUFFIX = "_scale_inv"  # name suffix of the scales by which an FP8 weight is multiplied
OLD_FILE = "quantize_config.json"  # written by AutoGPTQ, with no quantization settings in config.json
Layout = Literal["awq", "gptq", "gptq_v2", "packed", "bytes", "floats"]


class Scheme(NamedTuple):
    layout: Layout
    bits: int
    group: int  # number of neighbours along the depth that share one scale; -1: all
    is_symmetric: bool


# Ignored fields: the search for good codes, the kernel choice of other programs, and names.
_GPTQ_PASSED = (
    "damp_percent damp_auto_increment static_groups true_sequential model_name_or_path model_file_base_name meta "
    "dataset tokenizer batch_size block_name_to_quantize module_name_preceding_first_block cache_block_outputs "
    "modules_in_block_to_quantize model_seqlen max_input_length pad_token_id use_cuda_fp16 use_exllama exllama_config "
    "disable_exllama backend uuid lm_head desc_act act_group_aware mse offload_to_disk modules_to_not_convert"
)
_AWQ_PASSED = (
    "modules_to_not_convert backend exllama_config do_fuse modules_to_fuse fuse_max_seq_len desc_act meta uuid"
)
_WEIGHTS_PASSED = "observer observer_kwargs scale_dtype zp_dtype actorder"
_COMPRESSED_PASSED = "quantization_status global_compression_ratio version"


def read_schemes(config: dict[str, Any], where: str) -> list[Scheme]:
    """Return the group-quantization schemes that weights may use; [] for unquantized, block-scaled FP8 and MXFP4."""
    fields = Fields(config, where).section("quantization_config")
    if fields is None:
        return []
    fields.only("quant_method", *_READERS)
    schemes = _READERS[fields.text("quant_method")](fields)
    fields.no_others()
    return schemes


def old_config(folder: Path) -> dict[str, Any] | None:
    """Return the content of AutoGPTQ's own file as a quantization_config; None if there is no such file."""
    path = folder / OLD_FILE
    return {"quant_method": "gptq"} | read_json(path) if path.is_file() else None


def _mxfp4(fields: Fields) -> list[Scheme]:
    """Refuse unsupported variants of MXFP4. Only experts use it; their tensors' names identify them."""
    fields.fixed(dequantize=False)
    fields.texts("modules_to_not_convert")
    return []


def _fp8(fields: Fields) -> list[Scheme]:
    """Refuse unsupported variants of block-scaled FP8."""
    fields.fixed(fmt="e4m3", activation_scheme="dynamic", expert_dtype="fp8", dequantize=False)
    fields.only("weight_block_size", [BLOCK, BLOCK])
    fields.only("scale_fmt", "float", "ue8m0", default="float")  # both are stored as floats, whose dtype is checked
    for name in ("modules_to_not_convert", "modules_to_convert", "ignored_layers"):
        fields.texts(name)
    return []


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of an FP8 weight."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _group(fields: Fields) -> int:
    fields.only("group_size", *GROUPS)
    return fields.integer("group_size", low=-1)


def _awq(fields: Fields) -> list[Scheme]:
    fields.only("bits", 4)
    for name in ("version", "format", "checkpoint_format"):
        fields.only(name, "gemm", "GEMM", default="gemm")
    fields.fixed(zero_point=True, sym=False, pack_dtype="int32")
    fields.only("dynamic", None, {})
    fields.pass_over(_AWQ_PASSED)
    return [Scheme("awq", 4, _group(fields), False)]


def _gptq(fields: Fields) -> list[Scheme]:
    fields.only("bits", 4, 8)
    for name in ("checkpoint_format", "format"):
        fields.only(name, "gptq", "gptq_v2", default="gptq")
    fields.fixed(is_marlin_format=False, pack_dtype="int32")
    fields.only("dynamic", None, {})  # different bits for some layers
    fields.pass_over(_GPTQ_PASSED)
    layout = fields.text("checkpoint_format", fields.text("format", "gptq"))
    is_v2 = layout == "gptq_v2"
    return [Scheme("gptq_v2" if is_v2 else "gptq", fields.integer("bits"), _group(fields), fields.flag("sym", True))]


def _compressed(fields: Fields) -> list[Scheme]:
    formats: dict[str, tuple[Layout, str, tuple[int, ...]]] = {
        "pack-quantized": ("packed", "int", (4, 8)),
        "int-quantized": ("bytes", "int", (8,)),
        "naive-quantized": ("bytes", "int", (8,)),
        "float-quantized": ("floats", "float", (8,)),
    }
    fields.only("format", *formats)
    layout, kind, bits = formats[fields.text("format")]
    fields.only("kv_cache_scheme", None)
    for name in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        fields.only(name, None, {})
    fields.texts("ignore")
    fields.pass_over(_COMPRESSED_PASSED)
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
    fields.only("dynamic", False, default=False)
    fields.only("block_structure", None)
    fields.pass_over(_WEIGHTS_PASSED)
    strategies = ("channel", "tensor") if layout == "floats" else ("group", "channel", "tensor")
    fields.only("strategy", *strategies)
    is_grouped = fields.text("strategy") == "group"
    if not is_grouped:
        fields.only("group_size", None, -1)
    fields.only("symmetric", *((True,) if layout == "floats" else (True, False)), default=True)
    group = _group(fields) if is_grouped else -1
    return Scheme(layout, fields.integer("num_bits"), group, fields.flag("symmetric", True))


_READERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed, "fp8": _fp8, "mxfp4": _mxfp4}

"""Reads a checkpoint's quantization schemes from config.json, and refuses unsupported ones with the name of the field.

The tensor names show which weights are quantized: by AWQ, GPTQ, compressed-tensors or MXFP4, or as float8_e4m3fn
`x.weight` with a scale per 128 × 128 block in `x.weight_scale_inv`. Fields that only describe the quantization process
are ignored. The config's quantization of inputs is not applied, which makes the products more exact.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from penstock.executor.kernels.weight import BLOCK
from penstock.executor.loading.fields import Fields

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
    method = fields.text("quant_method", "fp8")
    if method not in _READERS:
        if method not in ("fp8", "mxfp4"):
            raise fields.error("quant_method", method, f"one of {', '.join((*_READERS, 'fp8', 'mxfp4'))}")
        _check_blocks(fields)
        return []
    schemes = _READERS[method](fields)
    fields.no_others()
    return schemes


def old_config(folder: Path, read_json: Any) -> dict[str, Any] | None:
    """Return the content of AutoGPTQ's own file as a quantization_config; None if there is no such file."""
    path = folder / OLD_FILE
    return {"quant_method": "gptq"} | read_json(path) if path.is_file() else None


def _check_blocks(fields: Fields) -> None:
    """Raise ExecutorError for unsupported variants of block-scaled FP8 or of MXFP4."""
    fields.only("quant_method", "fp8", "mxfp4")
    if fields.text("quant_method") == "mxfp4":  # only experts, which their tensors' names identify
        fields.only("dequantize", False, default=False)
        fields.texts("modules_to_not_convert")
        fields.no_others()
        return
    fields.only("fmt", "e4m3", default="e4m3")
    fields.only("weight_block_size", [BLOCK, BLOCK])
    fields.only("activation_scheme", "dynamic", default="dynamic")
    fields.only("scale_fmt", "float", "ue8m0", default="float")  # both are stored as floats, whose dtype is checked
    fields.only("expert_dtype", "fp8", default="fp8")
    fields.only("dequantize", False, default=False)
    for name in ("modules_to_not_convert", "modules_to_convert", "ignored_layers"):
        fields.texts(name)
    fields.no_others()


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of an FP8 weight."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def _group(fields: Fields) -> int:
    fields.only("group_size", *GROUPS)
    return fields.integer("group_size", low=-1)


def _awq(fields: Fields) -> list[Scheme]:
    fields.only("bits", 4)
    fields.only("zero_point", True, default=True)
    for name in ("version", "format", "checkpoint_format"):
        fields.only(name, "gemm", "GEMM", default="gemm")
    fields.only("sym", False, default=False)
    fields.only("pack_dtype", "int32", default="int32")
    fields.only("dynamic", None, {})
    fields.pass_over(_AWQ_PASSED)
    return [Scheme("awq", 4, _group(fields), False)]


def _gptq(fields: Fields) -> list[Scheme]:
    fields.only("bits", 4, 8)
    formats = ("gptq", "gptq_v2")
    for name in ("checkpoint_format", "format"):
        fields.only(name, *formats, default="gptq")
    fields.only("is_marlin_format", False, default=False)
    fields.only("pack_dtype", "int32", default="int32")
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
    groups = fields.section("config_groups")
    if groups is None or not groups.names():
        raise fields.error("config_groups", None, "an object of groups")
    schemes = []
    for name in groups.names():
        group = groups.section(name)
        if group is None:
            raise groups.error(name, None, "an object with weights")
        group.texts("targets")
        group.only("format", fields.text("format"), default=fields.text("format"))
        group.only("output_activations", None)
        inputs = group.section("input_activations")
        if inputs is not None:
            inputs.only("num_bits", 8)
        weights = group.section("weights")
        if weights is None:
            raise group.error("weights", None, "an object")
        schemes.append(_weights(weights, layout, kind, bits))
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


_READERS = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}

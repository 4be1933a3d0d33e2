"""Exports any checkpoint as a folder that vLLM and transformers load: config.json and safetensors.

The engine writes the tokenizer's files, not this module. config.json is written last, so that the folder of an
interrupted export is not mistaken for a model.
"""

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.executor.kernels.weight import CPU
from penstock.executor.loading.checkpoint import Checkpoint
from penstock.executor.loading.quantization import SUFFIX
from penstock.executor.models.weights import DTYPES, CheckpointReader, read_weight
from penstock.executor.protocol import DType, ExecutorError

SHARD_BYTES = 4 * 2**30  # also the memory that an export needs
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of config.json and generation_config.json


def export(
    checkpoint: Checkpoint,
    out_dir: str | Path,
    dtype: DType = "auto",
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[str], None] = lambda _: None,
    beside: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write `checkpoint` to `out_dir`, which is created if absent and must not contain a model. The dtype "auto" is
    that of the config. `beside` is called before config.json is written, to write additional files."""
    folder = Path(out_dir)
    name = _dtype_name(checkpoint.config, dtype)
    if checkpoint.has_codes and checkpoint.config.get("model_type") == "gpt_oss":
        raise ExecutorError("model_type: 'gpt_oss' stored as codes found; the export does not dequantize these experts")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = [path.name for path in folder.iterdir() if path.name == "config.json" or "safetensors" in path.name]
        if occupied:
            raise ExecutorError(f"{folder}: holds {min(occupied)!r} already; give a folder without a model")
        config = checkpoint.config
        tokens = {field: config[field] for field in _TOKEN_IDS if config.get(field) is not None}
        _write_json(generation_config := folder / "generation_config.json", tokens)
        mode = stat.S_IMODE(generation_config.stat().st_mode)  # as the umask has it
        _write_weights(checkpoint, folder, DTYPES[name], shard_bytes, mode, progress)
        beside(folder)
        _write_json(folder / "config.json", _config(config, name))
    except (OSError, SafetensorError) as error:
        raise ExecutorError(f"{folder}: the export could not be written: {error}") from error


def _write_weights(
    checkpoint: Checkpoint,
    folder: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    mode: int,
    progress: Callable[[str], None],
) -> None:
    kept = [name for name in checkpoint.names() if not name.endswith(SUFFIX)]
    sizes = {name: math.prod(checkpoint.shape(name)) * dtype.itemsize for name in kept}
    shards, read = _shards(sizes, shard_bytes), CheckpointReader(checkpoint, "the model to export")
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weights = ((name, read_weight(read, name, checkpoint.shape(name))) for name in names)
        # Copied, because the checkpoint may return a view of its mapped file.
        tensors = {name: each.dequantize(CPU, dtype, copy=True).contiguous() for name, each in weights}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(mode)  # save_file makes it readable only for its owner
        weight_map |= dict.fromkeys(names, file)
        progress(f"Wrote {file}, {number} of {len(shards)}")
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _shards(sizes: dict[str, int], limit: int) -> list[list[str]]:
    """Split the names, in order, into shards of at most `limit` bytes; a larger tensor gets its own shard."""
    shards: list[list[str]] = [[]]
    room = limit
    for name, size in sizes.items():
        if size > room and shards[-1]:
            shards.append([])
            room = limit
        shards[-1].append(name)
        room -= size
    return shards


def _dtype_name(config: dict[str, Any], dtype: DType) -> str:
    name = (config.get("dtype") or config.get("torch_dtype") or "float32") if dtype == "auto" else dtype
    name = str(name).removeprefix("torch.")
    if name not in DTYPES:
        raise ExecutorError(f"dtype: {name!r} given; one of {', '.join(DTYPES)} is expected")
    return name


def _config(config: dict[str, Any], dtype_name: str) -> dict[str, Any]:
    # transformers 4 and vLLM read torch_dtype; transformers 5 reads both and prefers dtype.
    left_out = ("dtype", "quantization_config")  # the tensors are written unquantized
    return {key: value for key, value in config.items() if key not in left_out} | {"torch_dtype": dtype_name}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

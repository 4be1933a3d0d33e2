"""Writes a model as a Hugging Face folder (safetensors and tokenizer), so that other engines run the same weights.

    python benchmarks/export.py [MODEL] --output DIR [--dtype auto|float32|bfloat16|float16]

MODEL is a .gguf file, a folder or a hub name; without one it is the default model. config.json is written last, so that
the folder of an interrupted export is not mistaken for a model.
"""

import argparse
import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.engine.model_error import ModelError
from penstock.engine.model_files import recommended_sampling, resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.kernels.weight import CPU
from penstock.executor.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.executor.loading.quantization import SUFFIX
from penstock.executor.models.weights import DTYPES, CheckpointReader, read_weight
from penstock.executor.protocol import DType, ExecutorError

SHARD_BYTES = 4 * 2**30  # also the memory that an export needs
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # fields of config.json and generation_config.json


def write_folder(model: str | None, output: str | Path, dtype: DType = "auto") -> None:
    """Write the weights, the tokenizer and the sampling parameters that the model's authors recommend."""
    files = resolve_model(model)
    tokenizer = load_tokenizer(files)

    def save(folder: Path) -> None:
        sampling = {name: value for name, value in recommended_sampling(files).items() if name != "max_tokens"}
        save_tokenizer(tokenizer, folder, sampling and {"do_sample": True, **sampling})

    export(open_checkpoint(files.path), output, dtype, progress=print, beside=save)
    print(f"{files.name} written to {output}")


def save_tokenizer(tokenizer: Tokenizer, folder: Path, sampling: dict[str, Any] | None = None) -> None:
    """Write the files from which transformers loads the same tokenizer, with these defaults of sampling."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(pretty=True), encoding="utf-8")
    # With this class, transformers uses tokenizer.json unchanged; model-specific classes rebuild parts of it.
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    config |= tokenizer.special_tokens
    if list(tokenizer.chat_templates) == ["default"]:
        config["chat_template"] = tokenizer.chat_templates["default"]
    elif tokenizer.chat_templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in tokenizer.chat_templates.items()]
    ids: dict[str, Any] = {f"{name}_id": tokenizer.special_id(name) for name in ("bos_token", "pad_token")}
    ids |= {"eos_token_id": sorted(tokenizer.eos_ids) or None}
    generation = (sampling or {}) | {name: value for name, value in ids.items() if value is not None}
    for name, content in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--output", "-o", required=True)
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    args = parser.parse_args()
    try:
        write_folder(args.model, args.output, args.dtype)
    except (ModelError, ExecutorError) as error:
        parser.error(str(error))

"""Opens the file or folder that weights are read from, as a `Checkpoint`.

No code that comes with the weights is ever executed: no pickle, no Python files of the model. An architecture that is
not built in is refused by name. A folder contains safetensors files and config.json; a .gguf file contains both weights
and configuration.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from penstock.executor.kernels.weight import Weight
from penstock.executor.loading.fields import read_json
from penstock.executor.loading.gguf import GgufCheckpoint
from penstock.executor.loading.packed_weights import PackedCheckpoint
from penstock.executor.loading.quantization import old_config, read_schemes
from penstock.executor.loading.safetensors_folder import SafetensorsFolder
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.shared_tensors import check_sealed


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names. `read` may be called from several threads at once."""

    config: dict[str, Any]  # the content of config.json
    has_codes: bool  # True if `read` returns quantized codes for some weights

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor | Weight: ...


def open_checkpoint(path: str | Path, config: ExecutorConfig | None = None) -> Checkpoint:
    """Open the checkpoint in a folder or in a .gguf file. A folder's weight files are opened when first needed."""
    path, overrides = Path(path), {} if config is None else config.hf_overrides
    if path.is_dir():
        return _open_folder(path, overrides)
    if not path.is_file():
        raise ExecutorError(f"model: {str(path)!r} is neither a folder nor a file")
    if path.suffix != ".gguf":
        raise ExecutorError(f"model: {str(path)!r} is not a .gguf file; give a folder with config.json and safetensors")
    checkpoint = GgufCheckpoint(path)
    _override(checkpoint.config, overrides)
    return checkpoint


def open_tensors(path: Path, model: Path, config: ExecutorConfig) -> Checkpoint:
    """Open a safetensors file of unquantized tensors for the model at `model`, which itself may be stored quantized. A
    file in shared memory must be sealed (executor/shared_tensors.py), so that it does not change while it is read."""
    if not path.is_file():
        raise ExecutorError(f"{path}: neither a folder with weights nor a file")
    check_sealed(path)
    settings = open_checkpoint(model, config).config
    return SafetensorsFolder(path, {key: value for key, value in settings.items() if key != "quantization_config"})


def _open_folder(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    config = read_json(path / "config.json")  # its `auto_map` is ignored
    if config.get("quantization_config") is None and (old := old_config(path)) is not None:
        config["quantization_config"] = old
    _override(config, overrides)
    where = str(path / "config.json")
    schemes = read_schemes(config, where)
    folder = SafetensorsFolder(path, config)
    return PackedCheckpoint(folder, schemes, where) if schemes else folder


def _override(config: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Replace fields of config.json, also in its text part. RoPE settings in the form of transformers 4 replace those in
    that of transformers 5, and vice versa. The base and the rotated part stay unless they are given too."""
    text, own = config.get("text_config"), overrides.get("text_config", {})
    if isinstance(text, dict) and isinstance(own, dict):
        _override(text, overrides | own)
        overrides = overrides | {"text_config": text}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and not overrides.keys().isdisjoint(("rope_parameters", "rope_scaling", "rope_theta")):
        is_nested = isinstance(rope.get("full_attention"), dict)
        scaling = rope.pop("full_attention") if is_nested else config.pop("rope_parameters")
        kept = ("rope_theta",) if is_nested else ("rope_theta", "partial_rotary_factor")
        config |= {"rope_scaling": scaling, **{name: scaling.pop(name) for name in kept if name in scaling}}
    if "rope_parameters" in overrides:
        config.pop("rope_scaling", None)
    config |= overrides

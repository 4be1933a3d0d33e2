"""Where weights come from: one protocol, and the file or folder it is read from.

Nothing that came with the weights is ever executed: no pickle, no Python beside the model. A folder holds
safetensors and config.json; a .gguf file holds both.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from penstock.executor.kernels.codes import Coded
from penstock.executor.kernels.grouped import Grouped
from penstock.executor.loading.quantization import old_config, read_schemes
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.regular_files import read_regular
from penstock.executor.shared_tensors import check_sealed

if TYPE_CHECKING:
    from penstock.executor.gguf_header import GgufFile

MAX_JSON_BYTES = 64 * 2**20  # the index of a model of a trillion weights has 10 MB


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names. `read` may be called from several threads at once."""

    config: dict[str, Any]  # config.json's content
    has_codes: bool  # some weights are read as codes

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> Tensor | Coded | Grouped: ...


def open_checkpoint(
    path: str | Path, config: ExecutorConfig | None = None, file: "GgufFile | None" = None
) -> Checkpoint:
    """The checkpoint in a folder or in a .gguf file. Weights are looked for when their names are first asked for.

    The config's `hf_overrides` replace fields of the model's own configuration.
    """
    path, overrides = Path(path), {} if config is None else config.hf_overrides
    checkpoint = _open(path, file) if not path.is_dir() else _open_folder(path, overrides)
    checkpoint.config = {**checkpoint.config, **overrides}
    return checkpoint


def open_tensors(path: Path, model: Path, config: ExecutorConfig) -> Checkpoint:
    """Named tensors in one safetensors file: numbers for the model at `model`, however that has its own stored. In shared
    memory it must be sealed (executor/shared_tensors.py), so that it is what it was when it is read again."""
    from penstock.executor.loading.safetensors_folder import SafetensorsFolder

    if not path.is_file():
        raise ExecutorError(f"{path}: no folder of weights, and no file")
    check_sealed(path)
    settings = open_checkpoint(model, config).config
    return SafetensorsFolder(path, {key: value for key, value in settings.items() if key != "quantization_config"})


def _open_folder(path: Path, overrides: dict[str, Any]) -> Checkpoint:
    from penstock.executor.loading.safetensors_folder import SafetensorsFolder

    config = {**read_config(path), **overrides}
    if config.get("quantization_config") is None and (old := old_config(path, read_json)) is not None:
        config["quantization_config"] = old
    where = str(path / "config.json")
    schemes = read_schemes(config, where)
    folder = SafetensorsFolder(path, config)
    if not schemes:
        return folder
    from penstock.executor.loading.packed_weights import PackedCheckpoint

    return PackedCheckpoint(folder, schemes, where)


def _open(path: Path, file: "GgufFile | None") -> Checkpoint:
    if not path.is_file():
        raise ExecutorError(f"model: {str(path)!r} is neither a folder nor a file")
    if path.suffix == ".gguf":
        from penstock.executor.loading.gguf import GgufCheckpoint

        return GgufCheckpoint(path, file)
    raise ExecutorError(f"model: {str(path)!r} is not a .gguf file; give a folder with config.json and safetensors")


def read_config(folder: Path) -> dict[str, Any]:
    """An `auto_map` is ignored: code that came with weights is never run, and an architecture that is not built in is
    refused by its name."""
    return read_json(folder / "config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ExecutorError(f"{path}: {size} bytes; at most {MAX_JSON_BYTES} are allowed")
        value = json.loads(read_regular(path))
    except OSError as error:
        raise ExecutorError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ExecutorError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ExecutorError(f"{path}: a JSON object is expected, {type(value).__name__} found")
    return value

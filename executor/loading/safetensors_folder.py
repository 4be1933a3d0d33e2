"""A model folder in the Hugging Face layout: config.json and one safetensors file or a sharded set.

The safetensors library checks a file's header (size, offsets, overlaps, truncation) before reading tensors. Tensors are
views of the mapped file, so the disk is read by the thread that copies them.
"""

import math
from collections import Counter
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.executor.loading.fields import read_json
from penstock.executor.protocol import ExecutorError
from penstock.executor.regular_files import require_regular

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EIGHT_BITS, _BYTES = "F8_E4M3", "U8"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class SafetensorsFolder:
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.config = config
        method = (config.get("quantization_config") or {}).get("quant_method")
        self.has_codes = method == "mxfp4"
        # The stored dtypes that `read` accepts: floats, and those of the quantization in config.json.
        self._dtypes = {*_FLOATS, *([] if method is None else [_BYTES] if self.has_codes else [_EIGHT_BITS])}
        self._folder = folder

    def names(self) -> Collection[str]:
        return self._files.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._get(name, "get_slice").get_shape())

    def read(self, name: str) -> Tensor:
        dtype = self.dtype(name)
        if dtype not in self._dtypes:
            raise ExecutorError(
                f"{self._files[name][0]}: tensor {name!r} is stored as {dtype}; "
                f"one of {', '.join(sorted(self._dtypes))} is expected"
            )
        return self.stored(name)

    def stored(self, name: str) -> Tensor:
        """Return the tensor in its stored dtype, without checking that dtype."""
        tensor: Tensor = self._get(name, "get_tensor")
        return tensor

    def dtype(self, name: str) -> str:
        dtype: str = self._get(name, "get_slice").get_dtype()
        return dtype

    def float_dtype(self) -> str:
        """Return the dtype of most of the stored floating-point numbers: float32, bfloat16 or float16."""
        counts = Counter[str]()
        for name in self._files:
            counts[_FLOATS.get(self.dtype(name), "")] += math.prod(self.shape(name))
        del counts[""]
        return max(counts, key=counts.__getitem__, default="float32")

    def _get(self, name: str, method: Literal["get_slice", "get_tensor"]) -> Any:
        path, file = self._files[name]
        try:
            return getattr(file, method)(name)
        except SafetensorError as error:
            raise ExecutorError(f"{path}: tensor {name!r}: {error}") from None

    @cached_property
    def _files(self) -> dict[str, tuple[Path, Any]]:
        """Map each tensor's name to the path of its file and the open file."""
        single = self._single_file()
        if single is not None:
            file = open_safetensors(single)
            return dict.fromkeys(file.keys(), (single, file))
        paths = self._indexed_paths()
        files = {path: open_safetensors(path) for path in set(paths.values())}
        stored = {path: set(file.keys()) for path, file in files.items()}
        for name, path in paths.items():
            if name not in stored[path]:
                raise ExecutorError(f"{path}: tensor {name!r} is missing; {INDEX} says it is here")
        return {name: (path, files[path]) for name, path in paths.items()}

    def _single_file(self) -> Path | None:
        """Return the single file with all tensors; None if there is an index of several files."""
        if self._folder.is_file():
            return self._folder
        if (self._folder / SINGLE).is_file():
            return self._folder / SINGLE
        if (self._folder / INDEX).is_file():
            return None
        found = sorted(self._folder.glob("*.safetensors"))
        if len(found) == 1:
            return found[0]
        pickles = sorted(path.name for pattern in _PICKLES for path in self._folder.glob(pattern))
        if pickles:
            raise ExecutorError(
                f"{self._folder}: only pickled weights ({pickles[0]}), which can run code when they are loaded. "
                "Convert them once, where you trust them: load the model with transformers and "
                "call save_pretrained(folder), which writes safetensors"
            )
        raise ExecutorError(f"{self._folder}: no weights; {SINGLE} or {INDEX} is expected")

    def _indexed_paths(self) -> dict[str, Path]:
        index = self._folder / INDEX
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ExecutorError(f"{index}: weight_map: an object of tensor names and file names is expected")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise ExecutorError(f"{index}: {name!r}: {file!r} is not the name of a safetensors file beside it")
        return {name: self._folder / file for name, file in weight_map.items()}


def open_safetensors(path: Path) -> Any:
    try:
        require_regular(path)
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ExecutorError(f"{path}: not a whole safetensors file ({error})") from None

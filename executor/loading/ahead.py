"""Packs weights while torch is imported, which keeps one core busy for most of a second. Imports no torch.

The largest weights of a GGUF file are packed for a CPU in C without the GIL. The loader
(executor/kernels/cpu_product.py) uses those that are packed by then, and packs the rest itself, with the same result.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock import _csrc
from penstock.cache.tiers.memory import address_of
from penstock.executor.code_types import has_vectors
from penstock.executor.gguf_header import GgufFile, TensorEntry, open_gguf
from penstock.executor.machine import usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.weight_memory import allocate

_lib: Any = _csrc.lib
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # without torch it is unknown whether the GPU is usable
MAX_CORES = 8


@contextmanager
def packing(config: ExecutorConfig) -> Iterator[GgufFile | None]:
    """Pack weights in threads within the context. Yield None if the model is no GGUF file that a CPU runs quantized."""
    path = Path(config.model)
    is_cpu = config.device == "cpu" or (config.device == "auto" and not any(map(os.path.exists, GPU_FILES)))
    is_kept = config.dtype == "auto" and config.load_format != "dummy" and has_vectors()
    if not (is_cpu and is_kept and path.suffix == ".gguf" and path.is_file()):
        yield None
        return
    file, is_over = open_gguf(config.model), threading.Event()
    largest = sorted(file.tensors.items(), key=lambda each: -each[1].size_bytes)
    turns = iter([each for each in largest if _is_stored_as_computed(*each)])
    count = max(min(usable_cores(), MAX_CORES) - 1, 1)  # one core is left for the import
    threads = [threading.Thread(target=_pack, args=(file, turns, is_over), name="ahead") for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield file
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _is_stored_as_computed(name: str, entry: TensorEntry) -> bool:
    """Tell whether C computes the tensor as it is stored: not the joined experts of a layer, nor query and key weights,
    whose rows llama.cpp may have permuted."""
    return entry.type.is_quantized and len(entry.shape) == 2 and not name.endswith(("attn_q.weight", "attn_k.weight"))


def _pack(file: GgufFile, turns: Iterator[tuple[str, TensorEntry]], is_over: threading.Event) -> None:
    columns = _lib.penstock_coded_columns(_lib.penstock_cpu_best_level(_lib.penstock_cpu_instructions()))
    while not is_over.is_set() and (turn := next(turns, None)):
        name, entry = turn
        kind, (rows, depth) = entry.type.number, entry.shape
        try:
            panels = allocate(_lib.penstock_code_bytes(kind, rows, depth, columns))
        except OSError:  # the loader will report what the memory does not suffice for
            return
        addresses = address_of(file.data) + entry.offset, rows, depth, columns, address_of(panels)
        if _lib.penstock_code_pack(kind, *addresses) < 0:  # otherwise the loader reports the error
            file.packed[name] = columns, panels

"""What goes on while torch is imported, which takes one core most of a second. No torch here.

The largest weights of a GGUF file are packed for a CPU, in C, without the interpreter's lock. What is packed by the time
that torch is there is found by the loader (executor/kernels/cpu_product.py), which packs the rest: the same bytes.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock import _csrc
from penstock.cache.tiers.memory import address_of
from penstock.executor.code_types import is_computed
from penstock.executor.gguf_header import GgufFile, TensorEntry, open_gguf
from penstock.executor.machine import usable_cores
from penstock.executor.protocol import ExecutorConfig
from penstock.executor.weight_memory import take

_lib: Any = _csrc.lib
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg")  # only torch knows whether it can use one
MAX_CORES = 8


@contextmanager
def packing(config: ExecutorConfig) -> Iterator[GgufFile | None]:
    """Pack weights in threads during the context. Yields None if the config has no file that a CPU computes as codes."""
    path = Path(config.model)
    is_cpu = config.device == "cpu" or (config.device == "auto" and not any(map(os.path.exists, GPU_FILES)))
    is_kept = config.dtype == "auto" and config.load_format != "dummy" and is_computed()
    if not (is_cpu and is_kept and path.suffix == ".gguf" and path.is_file()):
        yield None
        return
    file, is_over = open_gguf(config.model), threading.Event()
    largest = sorted(file.tensors.items(), key=lambda each: -each[1].size_bytes)
    turns = iter([each for each in largest if _is_stored_as_computed(*each)])
    count = max(min(usable_cores(), MAX_CORES) - 1, 1)  # the import has a core
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
    """Tell whether C computes the tensor as it is stored. A layer's experts lie in one tensor, and llama.cpp has changed the
    order of the rows of queries and keys."""
    return bool(entry.type.codes and len(entry.shape) == 2 and not name.endswith(("attn_q.weight", "attn_k.weight")))


def _pack(file: GgufFile, turns: Iterator[tuple[str, TensorEntry]], is_over: threading.Event) -> None:
    columns = _lib.penstock_coded_columns(_lib.penstock_cpu_best_level(_lib.penstock_cpu_instructions()))
    while not is_over.is_set() and (turn := next(turns, None)):
        name, entry = turn
        assert entry.type.codes is not None
        kind, (rows, depth) = entry.type.codes.number, entry.shape
        try:
            panels = take(_lib.penstock_code_bytes(kind, rows, depth, columns))
        except OSError:  # the loader says for what the memory does not suffice
            return
        addresses = address_of(file.data) + entry.offset, rows, depth, columns, address_of(panels)
        if _lib.penstock_code_pack(kind, *addresses) < 0:  # otherwise the loader says what is wrong
            file.packed[name] = columns, panels

"""A GGUF file: its metadata (executor/gguf_header.py) and where each tensor's bytes lie. Nothing about models; checked
like the header."""

import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from penstock.executor.code_types import CODE_TYPES, CodeType
from penstock.executor.gguf_header import MAX_NAME_BYTES, GgufHeader

MAX_DIMS = 4
MAX_ALIGNMENT = 65536


class TensorType(NamedTuple):
    """A storage format: rows are stored in blocks of `block` values, each taking `size_bytes`."""

    name: str
    block: int
    size_bytes: int
    codes: CodeType | None = None  # the values are codes


# GGML type number → format, for the types that can be read.
TENSOR_TYPES = {0: TensorType("F32", 1, 4), 1: TensorType("F16", 1, 2), 30: TensorType("BF16", 1, 2)}
_NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13}
_NUMBERS |= {"Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}
for name, number in _NUMBERS.items():
    kind = CODE_TYPES[name]
    TENSOR_TYPES[number] = TensorType(name, kind.block, kind.size_bytes, kind)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `shape` in row-major order (GGUF stores it reversed), `offset` from the file's start."""

    shape: tuple[int, ...]
    type: TensorType
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An open file. `data` is private to this process (copy on write) and lives as long as a tensor views it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: mmap.mmap
    # Panels by name, with their columns, where they were packed ahead (executor/loading/ahead.py).
    packed: dict[str, tuple[int, memoryview]] = field(default_factory=dict)


def open_gguf(path: str | Path) -> GgufFile:
    """Map a file and parse its header. Raises ExecutorError when it is not sound."""
    header = GgufHeader(path)
    infos = [_tensor_info(header, index) for index in range(header.num_tensors)]
    return GgufFile(header.path, header.metadata, _placed(header, infos, _alignment(header)), header.data)


def _tensor_info(header: GgufHeader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """(name, shape, type number, offset in the data section), as the file says them."""
    header.what = f"tensor {index}"
    name = header.string(MAX_NAME_BYTES)
    header.what = f"tensor {name[:80]!r}"
    num_dims = header.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        header.fail(f"{num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = tuple(header.u64() for _ in range(num_dims))
    return name, dims[::-1], header.u32(), header.u64()


def _placed(
    header: GgufHeader, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, TensorEntry]:
    """Check each tensor's extent against the data section, which starts at the next aligned byte."""
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in infos:
        header.what = f"tensor {name[:80]!r}"
        if name in tensors:
            header.fail("appears twice")
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            known = ", ".join(t.name for t in TENSOR_TYPES.values())
            header.fail(f"type {type_id} cannot be read; these can: {known}")
        if 0 in shape or shape[-1] % kind.block:
            header.fail(f"shape {shape} of type {kind.name}; rows must be a positive multiple of {kind.block}")
        size = math.prod(shape) // kind.block * kind.size_bytes  # Python integers: no overflow
        if offset % alignment:
            header.fail(f"offset {offset} is not a multiple of the alignment {alignment}")
        if start + offset + size > len(header.data):
            header.fail(f"bytes {start + offset} to {start + offset + size}; the file has {len(header.data)}")
        tensors[name] = TensorEntry(shape, kind, start + offset, size)
    return tensors


def _alignment(header: GgufHeader) -> int:
    value = header.metadata.get("general.alignment", 32)
    header.what = "key 'general.alignment'"
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        header.fail(f"{value!r}; a power of two from 8 to {MAX_ALIGNMENT} is expected")
    return value

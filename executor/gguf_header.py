"""Parses the header of a GGUF file: the metadata, read once for the engine's tokenizer and the executor's weights, and
the location of each tensor's bytes. Independent of models and of torch.

The file is untrusted: every count, length and offset is checked against the file's size before it is used, so an
invalid header causes an error, never a large allocation or a crash. The reader of the `gguf` package creates two numpy
views for each of 49 thousand vocabulary entries (1.9 s for the default model); this parser takes 0.02 s.
Format: the GGUF specification, versions 2 and 3.
"""

import math
import mmap
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.executor.code_types import CODE_TYPES, CodeType
from penstock.executor.protocol import ExecutorError
from penstock.executor.regular_files import open_regular

MAX_NAME_BYTES = 65535
MAX_KEYS = 65536
MAX_TENSORS = 1 << 20
MAX_DIMS = 4
MAX_ALIGNMENT = 65536
MAX_HEADER_BYTES = 1 << 27  # ten times the largest vocabulary; Python's lists take up to eight times the bytes

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Metadata value type → struct code, all little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_MIN_KEY_BYTES = 8 + 4 + 1  # name length, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dims, one dim, type, offset


class GgufHeader:
    """The metadata, and a cursor that ends up at the tensor descriptions after it. Raises ExecutorError if the file is
    not valid little-endian GGUF 2 or 3; `part` names the part being read, for the error message.

    `data` is a copy-on-write mapping, private to this process, and lives as long as a view of it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.at, self.part = Path(path), 0, "header"
        try:
            with open_regular(self.path) as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:  # ValueError: the file is empty
            raise ExecutorError(f"{path}: cannot be read: {error}") from error
        self.end = min(len(self.data), MAX_HEADER_BYTES)
        if self.data[:4] != b"GGUF":
            self.fail(f"starts with {self.data[:4]!r}; a GGUF file starts with b'GGUF'")
        self.at = 4
        version = self.u32()
        if version not in (2, 3):
            self.fail(f"version {version:#x}; 2 and 3, little-endian, can be read")
        self.num_tensors = self.count("tensor count", self.u64(), _MIN_TENSOR_BYTES, MAX_TENSORS)
        num_keys = self.count("key count", self.u64(), _MIN_KEY_BYTES, MAX_KEYS)
        self.metadata: dict[str, Any] = {}
        for index in range(num_keys):
            self.part = f"key {index}"
            key = self.string(MAX_NAME_BYTES)
            if key in self.metadata:
                self.fail(f"{key!r} appears twice")
            self.part = f"key {key[:80]!r}"
            self.metadata[key] = self.value(self.u32())

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string(self.end)
        if kind == _ARRAY:
            return self.array(self.u32(), self.u64())
        if kind not in _SCALARS:
            self.fail(f"value type {kind} is unknown")
        return self.scalars(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            self.count("array length", count, 8, self.end)
            return self.strings(count)
        if kind not in _SCALARS:
            self.fail(f"array of value type {kind}; strings, numbers and booleans can be read")
        self.count("array length", count, struct.calcsize(_SCALARS[kind]), self.end)
        return self.scalars(kind, count)

    def scalars(self, kind: int, count: int) -> list[Any]:
        layout = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(layout, self.data, self.take(struct.calcsize(layout)))
        return [bool(v) for v in values] if kind == _BOOL else list(values)

    def string(self, limit: int) -> str:
        length = self.u64()
        if length > limit:
            self.fail(f"a string of {length} bytes; at most {limit} are possible")
        start = self.take(length)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            self.fail("a string is not UTF-8")

    def strings(self, count: int) -> list[str]:
        """Read strings inline, as calling `string` for each takes twice as long; `string` reports invalid ones."""
        found: list[str] = []
        with suppress(struct.error, UnicodeDecodeError):
            while len(found) < count and (end := (start := self.at + 8) + _U64(self.data, self.at)[0]) <= self.end:
                found.append(self.data[start:end].decode())
                self.at = end
        return found + [self.string(self.end) for _ in range(count - len(found))]

    def u32(self) -> int:
        return int(_U32(self.data, self.take(4))[0])

    def u64(self) -> int:
        return int(_U64(self.data, self.take(8))[0])

    def take(self, size: int) -> int:
        """Move past the next `size` bytes, which must exist, and return the position where they start."""
        start = self.at
        if size > self.end - start:
            self.fail(f"needs {size} bytes at {start}; the header ends at {self.end} or before")
        self.at = start + size
        return start

    def count(self, label: str, value: int, min_bytes: int, limit: int) -> int:
        """Check an item count against the remaining bytes (at least `min_bytes` per item) before any allocation."""
        limit = min(limit, (self.end - self.at) // min_bytes)
        if value > limit:
            self.fail(f"{label} {value}; at most {limit} are possible here")
        return value

    def fail(self, message: str) -> NoReturn:
        raise ExecutorError(f"{self.path}: {self.part}: {message}")


# GGML type number → format, for the types that can be read.
TENSOR_TYPES = {0: CodeType("F32", -1, 1, 4), 1: CodeType("F16", -1, 1, 2), 30: CodeType("BF16", -1, 1, 2)}
_NUMBERS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12, "Q5_K": 13}
_NUMBERS |= {"Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "MXFP4": 39}
TENSOR_TYPES |= {number: CODE_TYPES[name] for name, number in _NUMBERS.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: `shape` is in row-major order (GGUF stores it reversed), `offset` counts from the file's start."""

    shape: tuple[int, ...]
    type: CodeType
    offset: int
    size_bytes: int


@dataclass(frozen=True)
class GgufFile:
    """An open file. `data` is a private copy-on-write mapping, which lives as long as a tensor views it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    data: mmap.mmap


def open_gguf(path: str | Path) -> GgufFile:
    """Map a file and parse its header; raise ExecutorError if it is invalid."""
    header = GgufHeader(path)
    infos = [_tensor_info(header, index) for index in range(header.num_tensors)]
    return GgufFile(header.path, header.metadata, _placed(header, infos, _alignment(header)), header.data)


def _tensor_info(header: GgufHeader, index: int) -> tuple[str, tuple[int, ...], int, int]:
    """Return (name, shape, type number, offset in the data section) as stored in the file, unchecked."""
    header.part = f"tensor {index}"
    name = header.string(MAX_NAME_BYTES)
    header.part = f"tensor {name[:80]!r}"
    num_dims = header.u32()
    if not 1 <= num_dims <= MAX_DIMS:
        header.fail(f"{num_dims} dimensions; 1 to {MAX_DIMS} are allowed")
    dims = tuple(header.u64() for _ in range(num_dims))
    return name, dims[::-1], header.u32(), header.u64()


def _placed(
    header: GgufHeader, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int
) -> dict[str, TensorEntry]:
    """Return the tensors by name after checking that each lies in the data section, which starts at an aligned byte."""
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in infos:
        header.part = f"tensor {name[:80]!r}"
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
    header.part = "key 'general.alignment'"
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        header.fail(f"{value!r}; a power of two from 8 to {MAX_ALIGNMENT} is expected")
    return value

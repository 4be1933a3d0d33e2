"""The head of a GGUF file: its metadata, read once for the engine's tokenizer and the executor's weights. No torch.

A file is untrusted: every count, length and offset is checked against what the file can hold before it is
used, so a lying header costs an error, never memory or a crash. The `gguf` package's reader makes two numpy
views for each of 49 thousand vocabulary entries (1.9 s for the default model); this one takes 0.02 s.
Layout: the GGUF specification, versions 2 and 3.
"""

import mmap
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from penstock.executor.protocol import ExecutorError
from penstock.executor.regular_files import open_regular

MAX_NAME_BYTES = 65535
MAX_KEYS = 65536
MAX_TENSORS = 1 << 20
MAX_HEADER_BYTES = 1 << 27  # ten times the largest vocabulary; Python's lists take up to eight times the bytes

_STRING, _ARRAY, _BOOL = 8, 9, 7
# Metadata value type → struct code, all little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from
_MIN_KEY_BYTES = 8 + 4 + 1  # name length, type, the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, dims, one dim, type, offset


class GgufHeader:
    """The metadata, and a cursor that stands behind it, where the tensors are described. Raises ExecutorError when the
    file is not a sound little-endian GGUF 2 or 3; `what` names the part being read, for its message.

    `data` is private to this process (copy on write) and lives as long as anything views it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.at, self.what = Path(path), 0, "header"
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
            self.what = f"key {index}"
            key = self.string(MAX_NAME_BYTES)
            if key in self.metadata:
                self.fail(f"{key!r} appears twice")
            self.what = f"key {key[:80]!r}"
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
        """As `string` reads them, but for its calls, which took as long again; one that is not sound is left to it."""
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
        """Move past the next `size` bytes, which must exist; returns where they start."""
        start = self.at
        if size > self.end - start:
            self.fail(f"needs {size} bytes at {start}; the header ends at {self.end} or before")
        self.at = start + size
        return start

    def count(self, what: str, value: int, min_bytes: int, limit: int) -> int:
        """Check a number of items, of at least `min_bytes` each, before anything is allocated for them."""
        limit = min(limit, (self.end - self.at) // min_bytes)
        if value > limit:
            self.fail(f"{what} {value}; at most {limit} are possible here")
        return value

    def fail(self, message: str) -> NoReturn:
        raise ExecutorError(f"{self.path}: {self.what}: {message}")

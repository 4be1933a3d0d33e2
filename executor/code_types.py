"""The storage formats of GGML, among them, by name, those whose weights stay quantized for the kernels (csrc/codes.h).
Imports no torch."""

from typing import Any, NamedTuple

from penstock import _csrc

_lib: Any = _csrc.lib


class CodeType(NamedTuple):
    """A storage format: a row is stored in blocks of `block` values, each taking `size_bytes`."""

    name: str
    number: int  # the index of the format in the C code; -1: unquantized numbers
    block: int
    size_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.number >= 0


def _types() -> dict[str, CodeType]:
    found: dict[str, CodeType] = {}
    while name := _lib.penstock_code_name(len(found)):
        index = len(found)
        sizes = _lib.penstock_code_block_values(index), _lib.penstock_code_block_bytes(index)
        text = _csrc.ffi.string(name).decode()
        found[text] = CodeType(text, index, *sizes)
    return found


CODE_TYPES = _types()


def has_vectors() -> bool:
    """Return whether this CPU has vector instructions (AVX2) for our products; without them, torch's are faster."""
    return bool(_lib.penstock_cpu_best_level(_lib.penstock_cpu_instructions()) > 0)

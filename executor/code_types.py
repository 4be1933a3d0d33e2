"""The formats of GGML whose weights are computed as codes (csrc/codes.h), by their names. No torch."""

from typing import Any, NamedTuple

from penstock import _csrc

_lib: Any = _csrc.lib


class CodeType(NamedTuple):
    """A storage format of GGML: a row lies in blocks of `block` values, each taking `size_bytes`."""

    name: str
    number: int  # as the C side counts
    block: int
    size_bytes: int


def _types() -> dict[str, CodeType]:
    found: dict[str, CodeType] = {}
    while name := _lib.penstock_code_name(len(found)):
        index = len(found)
        sizes = _lib.penstock_code_block_values(index), _lib.penstock_code_block_bytes(index)
        text = _csrc.ffi.string(name).decode()
        found[text] = CodeType(text, index, *sizes)
    return found


CODE_TYPES = _types()


def is_computed() -> bool:
    """Whether this CPU has vector instructions for them; without, numbers in float32 are faster."""
    return bool(_lib.penstock_cpu_best_level(_lib.penstock_cpu_instructions()) > 0)

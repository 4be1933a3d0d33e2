"""Named tensors in shared memory, for an engine on this machine to read.

It is a safetensors file without a name in any folder, so nothing is left where its process dies. It is sealed before
others learn of it: what they read cannot change or shrink beneath them, at any step of an update. Tensors are torch's,
but nothing here imports it.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from ctypes import c_char
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from penstock.executor.protocol import ExecutorError, WeightsError

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedTensors:
    """`with SharedTensors(model.state_dict()) as shared: engine.update_weights(shared.path)`"""

    def __init__(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Copy the tensors. Where names share memory, as those of a tied head do, the first one counts."""
        named = tensors.items() if isinstance(tensors, Mapping) else tensors
        once: dict[object, tuple[str, Any]] = {}
        for name, tensor in named:
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.device
            once.setdefault(place if tensor.numel() else name, (name, tensor))
        self._fd = os.memfd_create("penstock weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            _write(dict(once.values()), self._fd)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The path at which processes of this user on this machine can read the tensors until `close`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _write(tensors: dict[str, Any], fd: int) -> None:
    """In the format of safetensors, whose own writer wants a folder to rename a file in: the header's length, the header,
    the bytes."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WeightsError(f"tensor {name!r} is of {dtype}; one of {', '.join(DTYPES)} is expected")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # so that the numbers are aligned
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            here = tensor.detach().cpu().contiguous()
            file.write((c_char * here.nbytes).from_address(here.data_ptr()))


def check_sealed(path: Path) -> None:
    """Raises ExecutorError of shared memory that its owner may still change; files of a disk have no seals."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return
    finally:
        os.close(fd)
    if seals & SEALS != SEALS:
        raise ExecutorError(f"{path}: shared memory that is not sealed; SharedTensors seals what it holds")

"""Named tensors in shared memory, for an engine on this machine to read.

The memory is an anonymous safetensors file without a directory entry, so nothing is left behind if its process dies. It
is sealed before its path is published, so that it cannot change or shrink while another process reads it. The tensors
are torch tensors, but this module does not import torch.
"""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from ctypes import c_char
from pathlib import Path
from typing import Any, Self

from penstock.executor.protocol import ExecutorError, WeightsError

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedTensors:
    """`with SharedTensors(model.state_dict()) as shared: engine.update_weights(shared.path)`"""

    def __init__(self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Copy the tensors. If several names share memory, as with a tied LM head, only the first name is kept."""
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

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(tensors: dict[str, Any], fd: int) -> None:
    """Write the safetensors format: header length, header, tensor bytes. The safetensors library cannot write to a file
    descriptor: its writer renames a temporary file in a folder."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise WeightsError(f"tensor {name!r} is of {dtype}; one of {', '.join(DTYPES)} is expected")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPES[dtype], "shape": [*tensor.shape], "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # aligns the tensor data
    with os.fdopen(fd, "wb", closefd=False) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors.values():
            here = tensor.detach().cpu().contiguous()
            file.write((c_char * here.nbytes).from_address(here.data_ptr()))


def check_sealed(path: Path) -> None:
    """Raise ExecutorError for shared memory that its owner may still change; files on disk have no seals and pass."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_nlink:  # a file of a tmpfs has the seals of such memory, but a name
            return
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return
    finally:
        os.close(fd)
    if seals & SEALS != SEALS:
        raise ExecutorError(f"{path}: shared memory that is not sealed; SharedTensors seals what it holds")

"""How an object becomes bytes for the ring: a pickle, and beside it every larger buffer as it lies in memory.

PEP 574: numpy arrays and CPU tensors are named in the pickle and carried out of band, so that they are copied once,
into the ring. Large `bytes` stay within the pickle, but the pickler hands them over as they are, not copied either.
Nothing here reads a pickle; executor/ring/queue.py alone does. torch is used only where somebody else has imported it.
"""

import ctypes
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

# Where both ways cost the same: at 20 KB a buffer is faster within the pickle (0.83 of the round trip), at 2 MB faster
# beside it (1.6 to 1.8 times). See docs/ring.md.
OUT_OF_BAND_BYTES = 64 << 10

Buffer = bytes | bytearray | memoryview


class Encoded:
    """The pieces of one pickle, in order, and the buffers that it refers to."""

    def __init__(self, obj: Any, out_of_band_bytes: int) -> None:
        self.pieces: list[Buffer] = []
        self.buffers: list[memoryview] = []
        self._limit = out_of_band_bytes
        _Pickler(self, self._carry).dump(obj)

    def write(self, piece: Buffer) -> None:
        """The pickler's file."""
        self.pieces.append(piece)

    def _carry(self, buffer: pickle.PickleBuffer) -> bool:
        """False is how a pickler is told that the buffer travels out of band."""
        view = buffer.raw()
        if view.nbytes < self._limit:
            return True
        self.buffers.append(view)
        return False


class _Pickler(pickle.Pickler):
    def __init__(self, file: Encoded, carry: Callable[[pickle.PickleBuffer], bool]) -> None:
        super().__init__(file, 5, buffer_callback=carry)

    def reducer_override(self, obj: Any) -> Any:
        """Tensors as buffers; torch's own way writes a whole file for each."""
        torch = sys.modules.get("torch")
        if torch is None or type(obj) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if obj.device.type != "cpu" or obj.layout != torch.strided:
            raise TypeError(f"a tensor on {obj.device} ({obj.layout}) was sent; only dense ones on the CPU travel")
        flat = obj.detach().contiguous().reshape(-1)
        octets = flat.view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(octets), str(obj.dtype).removeprefix("torch."), tuple(obj.shape))


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor over the buffer. Borrowed memory cannot be written: doing so ends the process."""
    import torch

    octets = np.frombuffer(buffer, np.uint8)
    if not octets.size:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    if not octets.flags.writeable:  # torch has no read-only tensors and warns of each; it cannot see through this
        lent = (ctypes.c_uint8 * octets.size).from_address(octets.ctypes.data)
        lent.owner = octets  # type: ignore[attr-defined]  # for as long as the tensor lives
        return torch.frombuffer(lent, dtype=getattr(torch, dtype)).view(shape)
    return torch.frombuffer(octets, dtype=getattr(torch, dtype)).view(shape)

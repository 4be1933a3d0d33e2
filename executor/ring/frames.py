"""How an object becomes bytes for the ring: a pickle, and beside it every larger buffer as it lies in memory.

PEP 574: numpy arrays and CPU tensors are named in the pickle and carried out of band, so that they are copied once,
into the ring; `bytes` stay within the pickle. Nothing here reads a pickle; executor/ring/queue.py alone does. torch is
used only where the process has imported it.
"""

import ctypes
import io
import pickle
import sys
from typing import Any

import numpy as np

# Where both ways cost the same: at 20 KB a buffer is faster within the pickle (0.83 of the round trip), at 2 MB faster
# beside it (1.6 to 1.8 times). See docs/ring.md.
OUT_OF_BAND_BYTES = 64 << 10


def encode(obj: Any, out_of_band_bytes: int) -> tuple[bytes, list[memoryview]]:
    """The pickle, and the buffers that it refers to, in order."""
    buffers: list[memoryview] = []

    def carry(buffer: pickle.PickleBuffer) -> bool:
        """False is how a pickler learns that the buffer travels out of band."""
        view = buffer.raw()
        if view.nbytes < out_of_band_bytes:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    _Pickler(file, 5, buffer_callback=carry).dump(obj)
    return file.getvalue(), buffers


class _Pickler(pickle.Pickler):
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

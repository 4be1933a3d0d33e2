"""Small asynchronous copies from the host to a device.

A copy from pageable memory may block the host until the device has finished its queued work, so these copies go through
pinned memory. torch's caching allocator provides it, and reuses a buffer once the event recorded after its copy has
completed; `DeviceInputs` does the same by itself for its two large blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device with these values; on a CPU it shares the memory of `values`."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_list(values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return send(torch.tensor(values, dtype=dtype), device)

"""Small copies from the host to a device, which neither side waits for.

A copy from ordinary memory may make the host wait for all that the device has still to do, and more so the busier it is.
So what goes over passes through pinned memory. That is torch's, which keeps it for the next of its size and hands it
out again when the event behind the copy has come: what `DeviceInputs` does by itself for its two large blocks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def send(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    """A tensor of the device with these values; on a CPU the very same memory."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def send_list(values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    return send(torch.tensor(values, dtype=dtype), device)

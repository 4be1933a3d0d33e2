"""Copies the results of a step to the host while the next step computes.

    computing stream   ── step N ──┬── step N+1 ──
    outbox's stream                └─ copy N ─┘

An ordinary copy would also wait for all work launched after the tensor was computed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Pending copies of tensors. References to the originals keep their memory from being reused before the end."""

    def __init__(self, originals: Sequence[Tensor], copies: Sequence[Tensor], event: "torch.cuda.Event | None") -> None:
        self._originals, self._copies, self._event = originals, copies, event

    def wait(self) -> Sequence[Tensor]:
        """Wait for the copies and return them."""
        if self._event is not None:
            self._event.synchronize()
        self._originals = ()
        return self._copies


class Outbox:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None

    def send(self, tensors: Sequence[Tensor]) -> HostCopy:
        """Start copying the tensors to the host; on a CPU, return them as they are."""
        if self._stream is None:
            return HostCopy((), tensors, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
            self._last = torch.cuda.Event()
            self._last.record()
        return HostCopy(tensors, copies, self._last)

    def hold(self) -> None:
        """Make work launched from now on wait for the copies, so that it may overwrite the originals."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

"""What a step found, copied to the host while the next step computes.

    computing stream   ── step N ──┬── step N+1 ──
    outbox's stream                └─ copy N ─┘

Reading a tensor in the usual way would wait for everything that was launched after it, too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Tensors in flight. It holds on to their originals: their memory is not another's before the copy is done."""

    def __init__(self, originals: Sequence[Tensor], copies: Sequence[Tensor], event: "torch.cuda.Event | None") -> None:
        self._originals, self._copies, self._event = originals, copies, event

    def wait(self) -> Sequence[Tensor]:
        """The tensors, on the host."""
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
        """On a CPU they have arrived already."""
        if self._stream is None:
            return HostCopy((), tensors, None)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
            self._last = torch.cuda.Event()
            self._last.record()
        return HostCopy(tensors, copies, self._last)

    def hold(self) -> None:
        """What is launched from now on may overwrite what was sent: it begins when the copies are done."""
        if self._last is not None:
            torch.cuda.current_stream(self._device).wait_event(self._last)

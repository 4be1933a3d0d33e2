"""Copies between a GPU's blocks and pinned host slots, on a stream of their own beside the computing one.

    computing stream   ── rows N-1 ──┬── rows N ────────┬── rows N+1
    copying stream                   └─ save, restore N ─┘

A step's copies begin when the rows before it are done and must be over before the rows after it begin; the rows
of the step itself touch none of these blocks, so both run at once.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from penstock.executor.protocol import ExecutorError
from penstock.executor.transfers import Pairs


class CudaCopier:
    """Pins `arena` for its life. Call `start` before the rows of the step are launched."""

    def __init__(self, blocks: torch.Tensor, arena: np.ndarray) -> None:
        self._blocks = blocks  # uint8 [blocks, bytes of a block], on the GPU
        self._slots = torch.from_numpy(arena)[:, : blocks.shape[1]]
        status = torch.cuda.cudart().cudaHostRegister(arena.ctypes.data, arena.nbytes, 0)
        if int(status) != 0:
            raise ExecutorError(f"kv_host_bytes: the driver refuses to pin {arena.nbytes} bytes (error {int(status)})")
        self._stream = torch.cuda.Stream(blocks.device)
        self._under_way: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._last_use: dict[int, torch.cuda.Event] = {}  # slot → end of the copies that use it
        self._restored: torch.cuda.Event | None = None  # what the rows of the next step wait for

    def begin_step(self) -> None:
        if self._restored is not None:
            torch.cuda.current_stream(self._blocks.device).wait_event(self._restored)
            self._restored = None

    def start(self, saves: Pairs, restores: Pairs) -> None:
        computing = torch.cuda.current_stream(self._blocks.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream):
            begin.record()
            for block, slot in saves:
                self._slots[slot].copy_(self._blocks[block], non_blocking=True)
            for slot, block in restores:
                self._blocks[block].copy_(self._slots[slot], non_blocking=True)
            end.record()
        self._under_way.append((begin, end))
        for slot in (*(slot for _, slot in saves), *(slot for slot, _ in restores)):
            self._last_use[slot] = end
        self._restored = end

    def finish(self) -> float:
        begin, end = self._under_way.popleft()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def settle(self, slots: Iterable[int]) -> None:
        for slot in slots:
            event = self._last_use.get(slot)
            if event is not None:
                event.synchronize()

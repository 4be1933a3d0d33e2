"""Copies between a GPU's blocks and pinned host slots, on two streams beside the computing one.

    computing stream   ── rows N-1 ──┬── rows N ────────┬── rows N+1
    restoring stream                 ├── restores N ────┘
    saving stream                    └── saves N ────────────────────

A step's copies begin when the rows before it are done; the rows of the step itself touch none of these blocks, so all run
at once. The rows after it wait for what was restored. Nobody waits for a save but who would overwrite what it reads: rows
that write to the block, a restore into it. The core hands out a block again only when the step that saved it is over, but
it hears that from another rank, perhaps, which is ahead of this one. The same holds for host slots.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from penstock.executor.protocol import ExecutorError
from penstock.executor.tiers.transfers import Pairs


class CudaCopier:
    """Pins `arena` for its life. Call `start` before the rows of the step are launched."""

    def __init__(self, blocks: torch.Tensor, arena: np.ndarray) -> None:
        self._blocks = blocks  # uint8 [blocks, bytes of a block], on the GPU
        self._slots = torch.from_numpy(arena)[:, : blocks.shape[1]]
        status = torch.cuda.cudart().cudaHostRegister(arena.ctypes.data, arena.nbytes, 0)
        if int(status) != 0:
            raise ExecutorError(f"kv_host_bytes: the driver refuses to pin {arena.nbytes} bytes (error {int(status)})")
        self._saving, self._restoring = torch.cuda.Stream(blocks.device), torch.cuda.Stream(blocks.device)
        self._under_way: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = (
            deque()
        )  # beginning and end of a step's copies
        self._saved: dict[int, torch.cuda.Event] = {}  # block → end of the copies that last read it
        self._used: dict[int, torch.cuda.Event] = {}  # slot → end of the copies that last used it
        self._restored: torch.cuda.Event | None = None  # what the rows of the next step wait for

    def begin_step(self, written: Iterable[int]) -> None:
        computing = torch.cuda.current_stream(self._blocks.device)
        if self._restored is not None:
            computing.wait_event(self._restored)
            self._restored = None
        _wait(computing, self._saved, written)

    def start(self, saves: Pairs, restores: Pairs) -> None:
        """No block and no slot is in both."""
        self._under_way.append([])
        if restores:
            _wait(self._restoring, self._saved, (block for _, block in restores))
            copies = [(self._blocks[block], self._slots[slot]) for slot, block in restores]
            self._restored = self._copy(self._restoring, copies, [slot for slot, _ in restores])
        if saves:
            copies = [(self._slots[slot], self._blocks[block]) for block, slot in saves]
            end = self._copy(self._saving, copies, [slot for _, slot in saves])
            self._saved |= dict.fromkeys((block for block, _ in saves), end)

    def finish(self) -> float:
        copies = self._under_way.popleft()
        for _, end in copies:
            end.synchronize()
        return max(begin.elapsed_time(end) for begin, end in copies) / 1000

    def settle(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if slot in self._used:
                self._used.pop(slot).synchronize()

    def _copy(
        self, stream: torch.cuda.Stream, copies: list[tuple[torch.Tensor, torch.Tensor]], slots: list[int]
    ) -> torch.cuda.Event:
        """copies: (target, source) each. They begin when the rows so far are done, and what was at these slots is."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        _wait(stream, self._used, slots)
        with torch.cuda.stream(stream):
            begin.record()
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            end.record()
        self._under_way[-1].append((begin, end))
        self._used |= dict.fromkeys(slots, end)
        return end


def _wait(stream: torch.cuda.Stream, ends: dict[int, torch.cuda.Event], numbers: Iterable[int]) -> None:
    """For the copies that used these blocks or slots. What comes later on any stream waits for this one, or for them."""
    for event in {ends.pop(number) for number in numbers if number in ends}:
        stream.wait_event(event)

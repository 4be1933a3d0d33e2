"""Copies between a GPU's blocks and pinned host blocks, on two streams beside the computing one.

    computing stream   ── rows N-1 ──┬── rows N ────────┬── rows N+1
    restoring stream                 ├── restores N ────┘
    saving stream                    └── saves N ────────────────────

A step's copies begin after the rows of the previous step; the step's own rows use none of these blocks, so all three
run in parallel. The rows of the next step wait for restored blocks. Saves delay only operations that would overwrite
their source: rows that write to the block, or a restore into it. The core reuses a block only after the step that saved
it, but another rank may have reported that step while this rank is behind. The same applies to host blocks.
All saves of a step are one kernel, and all restores another: a copy of each block would cost the host microseconds.
"""

from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from penstock.executor.kernels import InputOps
from penstock.executor.protocol import ExecutorError
from penstock.executor.staging import send_list
from penstock.executor.tiers.transfers import Pairs


class CudaCopier:
    """Copies blocks by CUDA; pins `arena` until `close`. Call `start` before the rows of the step are launched."""

    def __init__(self, blocks: torch.Tensor, arena: np.ndarray, ops: InputOps) -> None:
        self._ops, self._blocks = ops, blocks  # uint8 [blocks, bytes of a block], on the GPU
        self._hosts = torch.from_numpy(arena)[:, : blocks.shape[1]]
        self._arena_address = arena.ctypes.data
        status = torch.cuda.cudart().cudaHostRegister(self._arena_address, arena.nbytes, 2)  # mapped for kernels
        if int(status) != 0:
            raise ExecutorError(f"kv_host_bytes: the driver refuses to pin {arena.nbytes} bytes (error {int(status)})")
        self._saving, self._restoring = (torch.cuda.Stream(blocks.device) for _ in range(2))
        # Start and end events of each step's copies.
        self._in_flight: deque[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = deque()
        self._saved: dict[int, torch.cuda.Event] = {}  # block → end of the copies that last read it
        self._used: dict[int, torch.cuda.Event] = {}  # host block → end of the copies that last used it
        self._restored: torch.cuda.Event | None = None  # the event that the rows of the next step wait for
        # Compiles the kernel now rather than in a step. Nothing reads the first block of either side.
        for saves, restores in ([(0, 0)], []), ([], [(0, 0)]):
            self.start(saves, restores)
            self.finish()

    def use(self, blocks: torch.Tensor) -> None:
        self._blocks = blocks

    def close(self) -> None:
        """Unpin the arena once no copy uses it. Another executor may get the same addresses to pin."""
        for stream in (self._saving, self._restoring):
            stream.synchronize()
        torch.cuda.cudart().cudaHostUnregister(self._arena_address)

    def begin_step(self, written: Iterable[int]) -> None:
        computing = torch.cuda.current_stream(self._blocks.device)
        if self._restored is not None:
            computing.wait_event(self._restored)
            self._restored = None
        _wait(computing, self._saved, written)

    def start(self, saves: Pairs, restores: Pairs) -> None:
        """Start the copies of a step. No block and no host block is in both lists."""
        self._in_flight.append([])
        if restores:
            _wait(self._restoring, self._saved, (block for _, block in restores))
            self._restored = self._copy(self._restoring, restores, is_save=False)
        if saves:
            end = self._copy(self._saving, saves, is_save=True)
            self._saved |= dict.fromkeys((block for block, _ in saves), end)

    def finish(self) -> float:
        copies = self._in_flight.popleft()
        for _, end in copies:
            end.synchronize()
        return float(max(begin.elapsed_time(end) for begin, end in copies)) / 1000

    def settle(self, hosts: Iterable[int]) -> None:
        for host in hosts:
            if host in self._used:
                self._used.pop(host).synchronize()

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, is_save: bool) -> torch.cuda.Event:
        """Start copying pairs of blocks after the rows so far and after earlier uses of these host blocks."""
        source, target = (self._blocks, self._hosts) if is_save else (self._hosts, self._blocks)
        hosts = [pair[is_save] for pair in pairs]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream(self._blocks.device))
        _wait(stream, self._used, hosts)
        with torch.cuda.stream(stream):
            begin.record()
            self._ops.copy_blocks(source, target, send_list(pairs, torch.int32, self._blocks.device))
            end.record()
        self._in_flight[-1].append((begin, end))
        self._used |= dict.fromkeys(hosts, end)
        return end


def _wait(stream: torch.cuda.Stream, ends: dict[int, torch.cuda.Event], blocks: Iterable[int]) -> None:
    """Make a stream wait for the copies that used these blocks; later work waits for this stream or for the copies."""
    for event in {ends.pop(number) for number in blocks if number in ends}:
        stream.wait_event(event)

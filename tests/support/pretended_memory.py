"""Where torch's allocators put tensors: the device's by stream, those of graphs in the pools that they share, pinned memory.

A block goes back when its last tensor does, and the next one that fits gets it, even if a stream still uses it. The
bytes are real: a graph's results may well lie on another's temporaries.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tests.support.races import Clock, Races

if TYPE_CHECKING:
    from tests.support.pretended_gpu import PretendedGpu
    from tests.support.pretended_streams import Graph

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
SMALL, SEGMENT, LARGE_SEGMENT, ROUND = 1 << 20, 2 << 20, 20 << 20, 512  # of torch's allocator


class Block:
    """Memory of one tensor and its views; it goes back to its pool with the last of them."""

    def __init__(self, pool: "Pool", segment: "Segment", start: int, size: int) -> None:
        self.pool, self.segment, self.start, self.size = pool, segment, start, size
        self.graph: Graph | None = None  # that was being captured

    def holds(self, tensor: torch.Tensor) -> bool:
        at = tensor.storage_offset() * tensor.element_size() - self.segment.first
        return tensor.numel() == 0 or self.start <= at < self.start + self.size

    def __del__(self) -> None:
        self.pool.release(self)


class Segment:
    """Memory that an allocator gets from the driver and gives out in blocks."""

    def __init__(self, races: Races, name: str, size: int, order: int = 0) -> None:
        self.order, self.is_small = order, size <= SEGMENT
        self.bytes = torch.zeros(size + ROUND, dtype=torch.uint8)
        self.first = -self.bytes.data_ptr() % ROUND
        self.memory = races.watch(name, self.bytes.data_ptr() + self.first, size)

    def view_at(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this shape at `start`."""
        typed = self.bytes[self.first + start :][: like.untyped_storage().nbytes()].view(like.dtype)
        return typed.as_strided(like.shape, like.stride(), typed.storage_offset() + like.storage_offset())


class Free(NamedTuple):
    size: int
    order: int  # of the segment
    start: int
    segment: Segment
    freed: Clock


class Pool:
    """Torch's caching allocator, for one stream or for the graphs that share a pool: the smallest free block that will do
    is cut, and neighbours that are free become one."""

    device = GPU

    def __init__(self, gpu: "PretendedGpu", name: str) -> None:
        self.gpu, self._name = gpu, name
        self._free: list[Free] = []
        self._num_segments = 0

    def allocate(self, num_bytes: int) -> Block:
        size = max(ROUND, -(-num_bytes // ROUND) * ROUND)
        is_small = size <= SMALL
        fitting = [free for free in self._free if free.size >= size and free.segment.is_small == is_small]
        if fitting:
            found = min(fitting, key=lambda free: free[:3])
            self._free.remove(found)
        else:
            found = self._grow(size)
        self.gpu.races.wait(self.gpu.host, found.freed)  # the allocator has a lock
        rest = found.size - size
        if rest < (ROUND if is_small else SMALL + 1):
            return Block(self, found.segment, found.start, found.size)
        self._free.append(found._replace(size=rest, start=found.start + size))
        return Block(self, found.segment, found.start, size)

    def _grow(self, size: int) -> Free:
        whole = (
            SEGMENT if size <= SMALL else LARGE_SEGMENT if size < LARGE_SEGMENT // 2 else -(-size // SEGMENT) * SEGMENT
        )
        self._num_segments += 1
        segment = Segment(self.gpu.races, f"memory of {self._name}", whole, self._num_segments)
        return Free(whole, segment.order, 0, segment, self.gpu.races.now(self.gpu.host))

    def release(self, block: Block) -> None:
        new = Free(block.size, block.segment.order, block.start, block.segment, self.gpu.races.now(self.gpu.host))
        for free in list(self._free):
            if free.segment is new.segment and (
                free.start + free.size == new.start or new.start + new.size == free.start
            ):
                self._free.remove(free)
                new = new._replace(
                    size=new.size + free.size, start=min(new.start, free.start), freed=np.maximum(new.freed, free.freed)
                )
        self._free.append(new)


class PinnedPool(Pool):
    """Torch's allocator of pinned memory: by powers of two. A block comes back when the copies that used it are over; that
    this has been found out is certain only where the host has waited for them."""

    device = CPU

    def __init__(self, gpu: "PretendedGpu") -> None:
        super().__init__(gpu, "the host")
        self._spare: dict[int, list[tuple[Segment, Clock]]] = {}

    def allocate(self, num_bytes: int) -> Block:
        size = 1 << max(num_bytes - 1, 1).bit_length()
        now = self.gpu.races.now(self.gpu.host)
        for spare in self._spare.setdefault(size, []):
            if (spare[1] <= now).all():
                self._spare[size].remove(spare)
                return Block(self, spare[0], 0, size)
        return Block(self, Segment(self.gpu.races, "pinned memory", size), 0, size)

    def release(self, block: Block) -> None:
        used = self.gpu.races.last_uses(block.segment.memory, self.gpu.streams)
        self._spare[block.size].append((block.segment, np.maximum(used, self.gpu.races.now(self.gpu.host))))

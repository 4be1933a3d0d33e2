"""What a model takes of a GPU beside its weights, measured before the KV cache gets the rest.

All figures are this process's own: what its allocator holds, not what the driver reports as free, which changes with
every other process on the device. The driver's figure is only the upper bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Runner = TypeVar("Runner")

# What no allocator of ours knows of: the driver's context, compiled kernels, the libraries' own buffers. Set aside, and
# not measured: only the driver's management library knows which process has how much.
CONTEXT_BYTES = 1 << 30
# Set aside for graphs and what they keep of every bucket's tensors: they are captured when the cache has its place. A
# guess that no GPU has confirmed; a line at the start names what they took.
GRAPHS_BYTES = 1 << 30


class CudaMeter:
    """How many bytes this process has allocated on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what loading left behind is free for the cache
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """The most that were allocated at once since `start_peak`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        """Bytes that this process has taken from the device for tensors, but for those that it gives back if asked."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def device(self) -> tuple[int, int]:
        """Bytes that are free, and in all, once this process has given back what it can."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """In bytes."""

    allocated: int  # for good: weights and tables
    activations: int  # the most that a step takes beside all the rest
    requests: int  # the state of all slots, the sampler's too, which is allocated after the cache
    graphs: int  # set aside for them
    context: int
    free: int
    total: int

    def left(self, utilization: float) -> int:
        """For the KV cache, if the process may take that share of the device, and it is free."""
        still = self.activations + self.requests + self.graphs
        ours = int(utilization * self.total) - self.allocated - self.context - still
        return max(0, min(ours, self.free - still))

    def table(self, weight_bytes: int, graph_bytes: int) -> dict[str, int]:
        """As `ModelInfo.memory`."""
        return {
            "tables": max(0, self.allocated - weight_bytes),
            "requests": self.requests,
            "activations": self.activations,
            "graphs": graph_bytes,
            "context (set aside)": self.context,
        }


def measure(
    open_runner: Callable[[], Runner], warm_up: Callable[[Runner], None], meter: CudaMeter, graphs: int
) -> GpuUse:
    """Run the largest steps there may be, among others, on a runner that is as good as the real one but for its cache of
    two blocks. `graphs`: bytes to set aside for them."""
    allocated = meter.allocated()
    runner = open_runner()
    requests = meter.allocated() - allocated
    meter.start_peak()
    warm_up(runner)
    activations = max(0, meter.peak() - allocated - requests)
    del runner
    free, total = meter.device()
    return GpuUse(allocated, activations, requests, graphs, CONTEXT_BYTES, free, total)

"""What a model takes of a GPU beside its weights, measured before the KV cache gets the rest.

All figures are this process's own: what its allocator holds, not what the driver says is free, which changes with every
other process on the device. The driver's word is only the upper bound.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.models.registry import Model
from penstock.executor.protocol import ExecutorConfig

# What no allocator of ours knows of: the driver's context, compiled kernels, the libraries' own buffers. Set aside, and
# not measured: nobody tells a process apart from its neighbours without the driver's management library.
CONTEXT_BYTES = 1 << 30
# The graphs themselves, and what they keep of every bucket's tensors. A guess that no GPU has seen.
GRAPHS_BYTES = 1 << 30


class Meter(Protocol):
    """How many bytes this process has allocated on the device."""

    def allocated(self) -> int: ...

    def start_peak(self) -> None: ...

    def peak(self) -> int:
        """The most that were allocated at once since `start_peak`."""
        ...

    def device(self) -> tuple[int, int]:
        """Bytes that are free, for whomever, and in all."""
        ...


class CudaMeter:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what loading left behind is free for the cache
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        return peak

    def device(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self._device)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """In bytes."""

    allocated: int  # for good: weights, tables, the sampler's state
    activations: int  # the most that a step takes beside them
    requests: int  # the state of all slots, which is allocated after the cache
    graphs: int
    context: int
    free: int
    total: int

    def left(self, utilization: float) -> int:
        """For the KV cache, if the process may take that share of the device, and nobody else has it."""
        still = self.activations + self.requests + self.graphs
        ours = int(utilization * self.total) - self.allocated - self.context - still
        return max(0, min(ours, self.free - still))

    def table(self, weight_bytes: int) -> dict[str, int]:
        """As `ModelInfo.memory`."""
        return {
            "tables": max(0, self.allocated - weight_bytes),
            "requests": self.requests,
            "activations": self.activations,
            "graphs (set aside)": self.graphs,
            "context (set aside)": self.context,
        }


@torch.inference_mode()
def measure(
    model: Model, config: ExecutorConfig, kv_dtype: torch.dtype, positions: int, meter: Meter, device: torch.device
) -> GpuUse:
    """Run the largest steps there may be, over a cache of two blocks. It compiles their kernels, too."""
    num_tokens = min(config.max_num_batched_tokens, positions)
    steps = [(num_tokens, num_tokens)]
    if model.kv_parts == 1 and num_tokens > 1:
        # A long chunk expands latents, most of them at the end of the longest request. Short ones have wide queries.
        steps = [(num_tokens, positions), (2, 2)]
    shape = (2, model.num_layers, model.kv_parts, config.block_size, model.kv_width)
    allocated = meter.allocated()
    kv = torch.zeros(shape, dtype=kv_dtype, device=device)
    pages = [(kv[:, layer, 0], kv[:, layer, -1]) for layer in range(model.num_layers)]
    meter.start_peak()
    for count, context in steps:
        _run(model, pages, num_tokens // count, count, context, config, device)
    activations = max(0, meter.peak() - meter.allocated())
    del kv, pages
    slots = config.max_num_seqs + 1
    blocks = -(-positions // config.block_size)
    free, total = meter.device()
    return GpuUse(
        allocated=allocated,
        activations=activations,
        requests=4 * slots * (positions + 1 + 2 * blocks),
        graphs=0 if config.enforce_eager else GRAPHS_BYTES,
        context=CONTEXT_BYTES,
        free=free,
        total=total,
    )


def _run(
    model: Model, pages: KvPages, rows: int, count: int, context: int, config: ExecutorConfig, device: torch.device
) -> None:
    """Rows of `count` tokens each, the last of `context` positions, and the logits of as many rows as there may be. All
    of it goes to block 0."""
    blocks = -(-context // config.block_size)
    num_tokens = rows * count
    num_sampled = min(num_tokens, config.max_num_seqs)
    positions = torch.arange(context - count, context, dtype=torch.int32, device=device).repeat(rows)
    singles, several = (rows, 0) if count == 1 else (0, rows)
    batch = ForwardBatch(
        tokens=torch.zeros_like(positions),
        positions=positions,
        kv_slots=positions.long() % config.block_size,
        query_starts=torch.arange(0, num_tokens + 1, count, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        block_tables=torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        wanted=torch.arange(num_sampled, device=device),
        num_single_rows=singles,
        query_lens=(count,) * several,
        query_contexts=(context,) * several,
        max_context_len=context,
        max_single_context=context if singles else 0,
    )
    logits = model.logits(model.forward(batch, pages))
    if logits is not None:
        logits.float().softmax(-1)  # log-probabilities take as much; a plain draw takes less

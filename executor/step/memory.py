"""Memory planning: the GPU memory that a model takes beside its weights, the number of KV blocks, the longest request.

GPU figures are this process's own, from its allocator. The driver's figure of free memory changes with every other
process on the device, and serves only as an upper bound.
"""

import errno
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.cache.tiers.memory import huge_buffer
from penstock.executor.batch import KvPages, StatePages
from penstock.executor.cache_layout import CacheLayout
from penstock.executor.machine import address_space_left, available_memory
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ContextLimit, ExecutorConfig, ExecutorError, GroupInfo

CPU_KV_BYTES = 4 * 2**30  # default limit of the KV cache …
CPU_KV_SHARE = 0.25  # … which is also limited to this share of the free memory
# Memory outside of our allocators: the driver's context, compiled kernels, the libraries' buffers. It is assumed, not
# measured: only the driver's management library knows the memory of each process.
CONTEXT_BYTES = 1 << 30
# Memory reserved for graphs beside that of their largest step, because they are captured after the cache is allocated.
# An H100 took 0.2 GiB for the graphs of Qwen3-0.6B; a log line at startup reports what they took.
GRAPHS_BYTES = 1 << 30
MIN_SHARE = 0.9  # of the KV cache's memory: with less, because of other processes, a start waits and warns
RELEASE_WAIT_S, RELEASE_POLL_S = 20.0, 0.5


@contextmanager
def naming_options(purpose: str, options: str) -> Iterator[None]:
    """Turn out-of-memory errors into ExecutorErrors that name the purpose and the options to change. Of nested contexts
    the outermost one decides the message."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ExecutorError) as error:
        if _is_out_of_main_memory(error):
            free_bytes, left_bytes = available_memory(), address_space_left()
            if left_bytes is not None and left_bytes < free_bytes:
                raise ExecutorError(
                    f"the limit on the address space of this process (RLIMIT_AS, ulimit -v) does not suffice for {purpose}: "
                    f"{left_bytes / 2**30:.1f} GiB are left of it, and {free_bytes / 2**30:.1f} GiB of memory are free"
                ) from error
            raise ExecutorError(
                f"the memory does not suffice for {purpose} ({free_bytes / 2**30:.1f} GiB are free): {options}"
            ) from error
        # If the error occurs during a capture, ending the capture fails too, and that error is raised instead.
        cause = error if isinstance(error, torch.OutOfMemoryError) else error.__context__
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        raise ExecutorError(f"the GPU's memory does not suffice for {purpose}: {options}. {cause}") from error


def _is_out_of_main_memory(error: Exception) -> bool:
    """Recognize the out-of-memory errors of Python, the kernel and torch."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


class CudaMeter:
    """Measures the memory that this process has allocated on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device)

    def start_peak(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # memory left over from loading is free for the cache
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        """Return the maximum number of bytes allocated at once since `start_peak`."""
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int:
        """Return the bytes that this process has reserved on the device for tensors, after freeing cached memory."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)

    def device(self) -> tuple[int, int]:
        """Return the free and total bytes of the device, after this process has freed cached memory."""
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)


def check_kv_bytes(num_bytes: int | None, meter: CudaMeter | None) -> None:
    """Raise ExecutorError for a size of the KV cache that exceeds the free memory; called before the weights are read."""
    if num_bytes is None:
        return
    free, where = (available_memory(), "of memory") if meter is None else (meter.device()[0], "of the GPU's memory")
    if num_bytes > free:
        raise ExecutorError(
            f"kv_cache_bytes: {num_bytes} given; {free} bytes {where} are free, before the weights are loaded"
        )


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The memory of a GPU, in bytes."""

    allocated: int  # permanently: weights and tables
    activations: int  # the most that a step takes in addition
    requests: int  # the state of all slots including the sampler's, which is allocated after the cache
    graphs: int  # reserved for CUDA graphs
    context: int
    free: int
    total: int

    @property
    def _not_yet_allocated(self) -> int:
        return self.activations + self.requests + self.graphs

    def share(self, utilization: float) -> int:
        """Return the bytes for the KV cache if no other process were on the device."""
        return max(0, int(utilization * self.total) - self.allocated - self.context - self._not_yet_allocated)

    def left(self, utilization: float) -> int:
        """Return the bytes left for the KV cache if the process may use this share of the device."""
        return max(0, min(self.share(utilization), self.free - self._not_yet_allocated))

    def shortage(self, utilization: float) -> str:
        """Return a warning if other processes take more than a tenth of the KV cache's memory, else an empty text."""
        left, share = self.left(utilization), self.share(utilization)
        if left >= MIN_SHARE * share:
            return ""
        return (
            f"Other processes hold memory of this GPU: {left / 2**30:.1f} GiB are left for the KV cache instead of "
            f"{share / 2**30:.1f} GiB ({self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB are free)"
        )

    def table(self, weight_bytes: int, graph_bytes: int) -> dict[str, int]:
        """Return the table for `ModelInfo.memory`."""
        return {
            "tables": max(0, self.allocated - weight_bytes),
            "requests": self.requests,
            "activations": self.activations,
            "graphs": graph_bytes,
            "context (set aside)": self.context,
        }


def wait_for_release(measure: Callable[[], GpuUse], utilization: float, progress: Callable[[str], None]) -> GpuUse:
    """Return what `measure` returns once other processes hold little memory, or after RELEASE_WAIT_S. The driver frees
    the memory of a killed server only after a while, and a server that restarts meanwhile would get a small cache."""
    use = measure()
    if shortage := use.shortage(utilization):
        progress(f"{shortage}. Waiting up to {RELEASE_WAIT_S:.0f} s for one that is ending")
    for _ in range(int(RELEASE_WAIT_S / RELEASE_POLL_S)):
        if not use.shortage(utilization):
            break
        time.sleep(RELEASE_POLL_S)
        use = measure()
    return use


@dataclass(frozen=True, slots=True)
class KvPlan:
    num_blocks: int  # including block 0, which is never allocated
    max_model_len: int
    context_limit: ContextLimit  # what max_model_len is determined by


def plan_kv(
    config: ExecutorConfig,
    block_bytes: int,
    max_positions: int,
    group: RankGroup,
    use: GpuUse | None = None,
    groups: Sequence[GroupInfo] = (GroupInfo(),),
) -> KvPlan:
    """Return the pool's size and the longest request that it can hold; raise ExecutorError if an option cannot be met.

    `block_bytes`, `kv_cache_bytes` and `use` (of a GPU) are those of one rank. All ranks use the plan of the rank with
    the least memory.
    """
    longest = config.max_model_len or max_positions

    def pages_for(num_tokens: int) -> int:
        sizes = num_tokens, config.max_num_batched_tokens, config.block_size
        return sum(each.most_pages(*sizes) for each in groups)

    if config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
        source = f"kv_cache_bytes ({config.kv_cache_bytes})"
    else:
        cpu_bytes = min(CPU_KV_BYTES, int(CPU_KV_SHARE * available_memory())) // group.world
        budget = cpu_bytes if use is None else use.left(config.gpu_memory_utilization)
        num_blocks = min(budget // block_bytes, config.max_num_seqs * pages_for(longest) + 1)
        source = f"the free memory's share for the KV cache ({budget} bytes)"
    num_blocks = group.minimum(num_blocks)
    fits = bisect_right(range(longest + 1), num_blocks - 1, key=pages_for) - 1
    if fits < 1:
        raise ExecutorError(
            f"{source} holds {num_blocks} blocks of {block_bytes} bytes; at least {1 + pages_for(1)} are needed"
        )
    if config.max_model_len is None:
        return KvPlan(num_blocks, fits, "kv_cache" if fits < longest else "model")
    if config.max_model_len > fits:
        raise ExecutorError(
            f"max_model_len: {config.max_model_len} given; {source} holds one request of {fits} tokens. "
            "Lower max_model_len or raise kv_cache_bytes"
        )
    return KvPlan(num_blocks, fits, "max_model_len")


def allocate_kv(
    num_blocks: int, depth: int, parts: int, block_size: int, kv_width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return zeros [num_blocks, depth, parts, block_size, kv_width]; keys and values are two parts. A block of all its
    layers is contiguous, so a tier moves a block with one copy."""
    shape = (num_blocks, depth, parts, block_size, kv_width)
    if device.type != "cpu":
        with naming_options("the KV cache", "lower kv_cache_bytes or gpu_memory_utilization"):
            return torch.zeros(shape, dtype=dtype, device=device)
    # Zero pages of the kernel: allocating them is free, and blocks take memory when they are first written.
    size = torch.Size(shape).numel() * dtype.itemsize
    with naming_options(f"a KV cache of {size / 2**30:.1f} GiB", "lower kv_cache_bytes"):
        pages = huge_buffer(size)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def layer_pages(kv: torch.Tensor, layout: CacheLayout) -> KvPages:
    """Return each layer's view of the pool."""
    pool = kv.view(len(kv), -1).view(torch.uint8)  # [blocks, bytes per page]
    states = layout.units_per_page, layout.unit_bytes
    return [
        StatePages(pool, place, *states)
        if layout.groups[group].kind == "state"
        else (kv[:, place, 0], kv[:, place, -1])
        for group, place in layout.places
    ]

"""Where the memory goes: how many KV blocks fit, how long a request may be, and the allocation itself."""

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from penstock.executor.free_memory import available_memory
from penstock.executor.parallel import Group
from penstock.executor.protocol import ExecutorConfig, ExecutorError
from penstock.executor.step.profile import GpuUse

CPU_KV_BYTES = 4 * 2**30  # without being asked, no more than this …
CPU_KV_SHARE = 0.25  # … and no more than this share of the free memory


@dataclass(frozen=True, slots=True)
class KvPlan:
    num_blocks: int  # with block 0, which is never handed out
    max_model_len: int


@contextmanager
def naming_options(what: str, options: str) -> Iterator[None]:
    """Memory that does not suffice is an error that names what for, and what the user can do. Of several around each
    other the outermost knows best."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError, ExecutorError) as error:
        if _is_out_of_main_memory(error):
            free = available_memory() / 2**30
            raise ExecutorError(
                f"the memory does not suffice for {what} ({free:.1f} GiB are free): {options}"
            ) from error
        # While a graph is captured, ending the capture fails in its turn, and that is what is raised.
        cause = error if isinstance(error, torch.OutOfMemoryError) else error.__context__
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        raise ExecutorError(f"the GPU's memory does not suffice for {what}: {options}. {cause}") from error


def _is_out_of_main_memory(error: Exception) -> bool:
    """The forms of Python's, the kernel's and torch's error."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def plan_kv(
    config: ExecutorConfig,
    block_bytes: int,
    max_positions: int,
    group: Group,
    use: GpuUse | None = None,
) -> KvPlan:
    """The pool's size and the longest request it can hold; what was asked for is kept to the letter or refused.

    `block_bytes`, `kv_cache_bytes` and `use`, of a GPU, are one rank's. The ranks agree on what the one with the least
    memory holds.
    """
    longest = config.max_model_len or max_positions
    per_request = -(-longest // config.block_size)
    if config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // block_bytes
        source = f"kv_cache_bytes ({config.kv_cache_bytes})"
    else:
        budget = _free_share(group.world) if use is None else use.left(config.gpu_memory_utilization)
        num_blocks = min(budget // block_bytes, config.max_num_seqs * per_request + 1)
        source = f"the free memory's share for the KV cache ({budget} bytes)"
    num_blocks = group.minimum(num_blocks)
    if num_blocks < 2:
        raise ExecutorError(f"{source} holds {num_blocks} blocks of {block_bytes} bytes; at least 2 are needed")
    fits = (num_blocks - 1) * config.block_size
    if config.max_model_len is not None and config.max_model_len > fits:
        raise ExecutorError(
            f"max_model_len: {config.max_model_len} given; {source} holds one request of {fits} tokens. "
            "Lower max_model_len or raise kv_cache_bytes"
        )
    return KvPlan(num_blocks, min(longest, fits))


def _free_share(world: int) -> int:
    """Of the main memory, which the ranks share."""
    return min(CPU_KV_BYTES, int(CPU_KV_SHARE * available_memory())) // world


def allocate_kv(
    num_blocks: int,
    num_layers: int,
    parts: int,
    block_size: int,
    kv_width: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Zeroed [num_blocks, num_layers, parts, block_size, kv_width], keys and values being two parts: one block's
    of all layers lie side by side, so a tier moves a block with one copy."""
    shape = (num_blocks, num_layers, parts, block_size, kv_width)
    if device.type != "cpu":
        with naming_options("the KV cache", "lower kv_cache_bytes or gpu_memory_utilization"):
            return torch.zeros(shape, dtype=dtype, device=device)
    # Zero pages of the kernel's: the start costs nothing, and memory is taken as blocks are first written.
    size = torch.Size(shape).numel() * dtype.itemsize
    with naming_options(f"a KV cache of {size / 2**30:.1f} GiB", "lower kv_cache_bytes"):
        pages = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)

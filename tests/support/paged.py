"""Random pages of keys and values and batches over them, for tests of whichever kernels."""

import copy
from dataclasses import replace

import torch
from benchmarks.gpu.batches import make_batch, make_cache, num_blocks, pages_of, spoil_unused

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_EXTRAS, Ops, ScoreExtras


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """Random pages of one layer of three, and rows whose blocks are scattered over them; unused cells are NaN."""

    def __init__(self, contexts: list[int], kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        rows, cpu = [(1, context) for context in contexts], torch.device("cpu")
        batch = make_batch(rows, cpu, page=page)
        kv = make_cache(num_blocks(rows, page), 3, 2, kv_heads * dim, dtype, cpu, page)
        kv[:, ::2] = torch.nan
        spoil_unused(kv[:, 1], batch)
        (self.k_pages, self.v_pages), self.tables = pages_of(kv, 1), batch.block_tables

    def to(self, device: torch.device) -> "Cache":
        moved = copy.copy(self)
        moved.k_pages, moved.v_pages = self.k_pages.to(device), self.v_pages.to(device)
        moved.tables = self.tables.to(device)
        return moved

    def batch(self, rows: list[tuple[int, int, int]]) -> ForwardBatch:
        """Return a batch of (row of this cache, queries, context), single-token rows first."""
        counts = [(count, context) for _, count, context in rows]
        batch = make_batch(counts, self.tables.device, page=self.k_pages.shape[1])
        return replace(batch, block_tables=self.tables[[row for row, _, _ in rows]])


def attend(
    ops: Ops,
    cache: Cache,
    q: torch.Tensor,
    rows: list[tuple[int, int, int]],
    window: int | None = None,
    extras: ScoreExtras = NO_EXTRAS,
) -> torch.Tensor:
    """Return the output for the queries of `rows`; q [rows of the cache, positions, Hq, D] has one for every position."""
    picked = torch.cat([q[row, context - count : context] for row, count, context in rows])
    batch = cache.batch(rows)
    if window is not None:  # blocks that have left every window were given back: what block 0 has is NaN
        for table, (_, count, context) in zip(batch.block_tables, rows, strict=True):
            table[: max(0, context - count + 1 - window) // cache.k_pages.shape[1]] = 0
    pages = cache.k_pages, cache.v_pages
    return ops.paged_attention(picked, pages, batch, q.shape[-1] ** -0.5, extras._replace(window=window))

"""Random pages of keys and values and batches over them, for tests of whichever kernels."""

import copy
import itertools

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_EXTRAS, Ops, ScoreExtras


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Cache:
    """Random pages of one layer of three, and rows whose blocks are scattered over them; unused cells are NaN."""

    def __init__(self, contexts: list[int], kv_heads: int, dim: int, page: int, dtype: torch.dtype) -> None:
        counts = [-(-context // page) for context in contexts]
        kv = torch.full((sum(counts) + 2, 3, 2, page, kv_heads * dim), float("nan"), dtype=dtype)
        self.k_pages, self.v_pages = kv[:, 1, 0], kv[:, 1, 1]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)) + 1
        self.tables = torch.zeros(len(contexts), max(counts, default=0), dtype=torch.int32)
        for row, (context, blocks) in enumerate(zip(contexts, torch.split(order, counts), strict=True)):
            self.tables[row, : len(blocks)] = blocks
            position = torch.arange(context)
            where = blocks[position // page], position % page
            self.k_pages[where] = random(context, kv_heads * dim, dtype=dtype, seed=2 * row)
            self.v_pages[where] = random(context, kv_heads * dim, dtype=dtype, seed=2 * row + 1)

    def to(self, device: torch.device) -> "Cache":
        moved = copy.copy(self)
        moved.k_pages, moved.v_pages = self.k_pages.to(device), self.v_pages.to(device)
        moved.tables = self.tables.to(device)
        return moved

    def batch(self, rows: list[tuple[int, int, int]]) -> ForwardBatch:
        """Return a batch of (row of this cache, queries, context), single-token rows first."""
        lens = [count for _, count, _ in rows]
        contexts = [context for _, _, context in rows]
        singles = sum(1 for _ in itertools.takewhile(lambda count: count == 1, lens))
        unused, device = torch.empty(0), self.tables.device
        return ForwardBatch(
            tokens=unused,
            positions=unused,
            kv_cells=unused,
            query_starts=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device),
            context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
            block_tables=self.tables[[row for row, _, _ in rows]],
            output_indices=None,
            num_single_rows=singles,
            query_lens=tuple(lens[singles:]),
            query_contexts=tuple(contexts[singles:]),
            max_single_context=max(contexts[:singles], default=0),
        )


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

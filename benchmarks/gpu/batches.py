"""Artificial batches over a cache with the engine's layout: blocks first, then layers, so that pages of a layer are far
apart. Measurements and checks on adjacent pages would say nothing about the engine's."""

import itertools

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.step.memory import allocate_kv

PAGE = 16
Rows = list[tuple[int, int]]  # (tokens, context length) of each row; rows of one token come first


def make_batch(rows: Rows, device: torch.device, longest: int = 0, page: int = PAGE) -> ForwardBatch:
    """Make a batch whose rows have their own blocks, from 1 on, in random order. `longest`: the longest possible
    request, which determines how graphs split a context (executor/step/graphs.py); 0: that of these rows."""
    counts, contexts = [count for count, _ in rows], [context for _, context in rows]
    blocks = torch.tensor([-(-context // page) for context in contexts])
    width = max(int(blocks.max()), -(-longest // page))
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    scattered = 1 + torch.randperm(int(blocks.sum()), generator=torch.Generator().manual_seed(1))
    tables[torch.arange(width) < blocks[:, None]] = scattered.int()
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
    kv_cells = tables[row_of, positions // page].long() * page + positions % page
    singles = sum(1 for _ in itertools.takewhile(lambda count: count == 1, counts))
    longest_single = max(longest, max(contexts[:singles])) if singles else 0
    return ForwardBatch(
        tokens=torch.zeros(len(positions), dtype=torch.int32, device=device),
        positions=positions.int().to(device),
        kv_cells=kv_cells.to(device),
        query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        num_single_rows=singles,
        query_lens=tuple(counts[singles:]),
        query_contexts=tuple(contexts[singles:]),
        max_single_context=longest_single,
    )


def num_blocks(rows: Rows, page: int = PAGE) -> int:
    """Return the size of a cache for these rows, including block 0."""
    return 1 + sum(-(-context // page) for _, context in rows)


def make_cache(
    blocks: int, layers: int, parts: int, width: int, dtype: torch.dtype, device: torch.device, page: int = PAGE
) -> torch.Tensor:
    """Return random numbers [blocks, layers, parts, page, width], allocated like the engine's cache."""
    kv = allocate_kv(blocks, layers, parts, page, width, dtype, device)
    fill(kv)
    return kv


def spoil_unused(pages: torch.Tensor, batch: ForwardBatch) -> None:
    """Make every cell of a layer's pages [blocks, parts, page, width] NaN that is in no row's context."""
    blocks, _, page, _ = pages.shape
    position = torch.arange(batch.block_tables.shape[1] * page, device=pages.device)
    cells = batch.block_tables[:, position // page].long() * page + position % page
    unused = torch.ones(blocks * page, dtype=torch.bool, device=pages.device)
    unused[cells[position < batch.context_lens[:, None]]] = False
    pages.view(torch.uint8).transpose(1, 2)[unused.view(blocks, page)] = 0xFF  # such bytes are NaN in every dtype


def pages_of(kv: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's keys and values [blocks, PAGE, width] as the model gets them; a single part is both."""
    return kv[:, layer, 0], kv[:, layer, -1]


def fill(kv: torch.Tensor) -> None:
    """Fill with random numbers, because zeros are read faster. FP8 numbers are converted from wider ones."""
    if kv.dtype is not torch.float8_e4m3fn:
        kv.normal_()
        return
    for blocks in kv.split(256):
        blocks.copy_(torch.randn(blocks.shape, dtype=torch.bfloat16, device=kv.device))

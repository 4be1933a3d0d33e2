"""Made-up batches over a cache that lies as the engine's does: blocks first, then layers, so that a layer's pages are far
apart. What is measured or checked on pages that lie side by side says nothing about the engine's."""

import itertools

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.step.memory import allocate_kv

PAGE = 16
Rows = list[tuple[int, int]]  # tokens of a row, and the context that they end; rows of one token first


def make_batch(rows: Rows, device: torch.device, longest: int = 0) -> ForwardBatch:
    """Each row has blocks of its own, from 1 on, in a random order. `longest`: of any request there may be, which settles
    how graphs cut a context (executor/step/graphs.py); 0: of these rows alone, as in a step without a graph."""
    counts, contexts = [count for count, _ in rows], [context for _, context in rows]
    blocks = torch.tensor([-(-context // PAGE) for context in contexts])
    width = max(int(blocks.max()), -(-longest // PAGE))
    tables = torch.zeros(len(rows), width, dtype=torch.int32)
    scattered = 1 + torch.randperm(int(blocks.sum()), generator=torch.Generator().manual_seed(1))
    tables[torch.arange(width) < blocks[:, None]] = scattered.int()
    row_of = torch.arange(len(rows)).repeat_interleave(torch.tensor(counts))
    positions = torch.cat([torch.arange(context - count, context) for count, context in rows])
    kv_slots = tables[row_of, positions // PAGE].long() * PAGE + positions % PAGE
    singles = sum(1 for _ in itertools.takewhile(lambda count: count == 1, counts))
    longest_single = max(longest, max(contexts[:singles])) if singles else 0
    return ForwardBatch(
        tokens=torch.zeros(len(positions), dtype=torch.int32, device=device),
        positions=positions.int().to(device),
        kv_slots=kv_slots.to(device),
        query_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        wanted=None,
        num_single_rows=singles,
        query_lens=tuple(counts[singles:]),
        query_contexts=tuple(contexts[singles:]),
        max_single_context=longest_single,
    )


def num_blocks(rows: Rows) -> int:
    """Of a cache that holds them, with block 0."""
    return 1 + sum(-(-context // PAGE) for _, context in rows)


def make_cache(
    blocks: int, layers: int, parts: int, width: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[blocks, layers, parts, PAGE, width] of random numbers, by the engine's own hand."""
    kv = allocate_kv(blocks, layers, parts, PAGE, width, dtype, device)
    fill(kv)
    return kv


def pages_of(kv: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer's keys and values [blocks, PAGE, width], as a rank gives them to the model; one part is both."""
    return kv[:, layer, 0], kv[:, layer, -1]


def fill(kv: torch.Tensor) -> None:
    """With random numbers: zeros are read faster than anything else. Those of eight bits are made as wider ones."""
    if kv.dtype is not torch.float8_e4m3fn:
        kv.normal_()
        return
    for blocks in kv.split(256):
        blocks.copy_(torch.randn(blocks.shape, dtype=torch.bfloat16, device=kv.device))

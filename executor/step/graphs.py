"""Steps as CUDA graphs: steps of single-token rows, captured once per number of rows, and steps with prompt chunks,
captured once per number of tokens.

Launching the few hundred kernels of a step one by one takes the host longer than a small model takes to compute it. A
graph has fixed shapes, so steps are padded to one of a few *buckets* with rows that read nothing and write to addresses
that are never read. A graph reads what changes between steps from memory that `DeviceInputs` fills before the replay.

All graphs are captured before the first step, the largest bucket first, so that smaller ones fit into the memory that
it took. Only one graph runs at a time, so the graphs of a kind share a memory pool: memory that one frees during
capture is reused by the next. Forward passes and draws have separate pools, because the results of a draw are still
being copied to the host while the next forward pass runs.

Ranks capture and replay their graphs together. The captured set follows from the configuration, and the replayed graph
from the step and its requests' options. All ranks get the same steps in the same order, so the collectives in their
graphs match. Each bucket runs every collective in its size before the capture, so the communicator is connected.

Where LoRA is enabled, every graph is captured a second time with adapters. It has as many tiles of rows with an adapter
as any step of its size may need, and those that a step does not use have no rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import KvPages
from penstock.executor.kernels import RowTensors, SamplingOps
from penstock.executor.kernels.lora import ROWS
from penstock.executor.kernels.state import MAX_SEVERAL
from penstock.executor.models.adapters import Adapted, AdapterStore
from penstock.executor.models.decoder import Decoder
from penstock.executor.parallel import RankGroup
from penstock.executor.progress import quarters
from penstock.executor.step.inputs import DeviceInputs, Samples
from penstock.executor.step.layout import Layout
from penstock.executor.step.memory import naming_options

Made = TypeVar("Made")

# Up to 32 rows a step is bound by reading weights, so padding is cheap; beyond that every row costs.
SMALL_BUCKETS, BUCKET_STEP, LARGEST_BUCKET = (1, 2, 4, 8, 16, 24, 32), 16, 512


# Numbers of tokens that graphs are captured for. From 257 tokens on, padding adds at most a quarter.
CHUNK_BUCKETS = (*range(64, 513, 64), *range(640, 1025, 128))


def choose_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that graphs are captured for, ascending; steps with more rows run without a graph."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    buckets = [*SMALL_BUCKETS, *range(SMALL_BUCKETS[-1] + BUCKET_STEP, largest, BUCKET_STEP)]
    return *(bucket for bucket in buckets if bucket < largest), largest


class CudaGraphs:
    """Graphs of one memory pool: replaying one may overwrite the results of another."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, call: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
        """Record what `call` launches, without running it. The returned tensors keep their addresses for the graph's
        lifetime; every replay writes to them."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may still call CUDA: the tiers' copies, a worker that waits for results, NCCL's watchdog.
        with (
            naming_options("CUDA graphs", "lower gpu_memory_utilization or kv_cache_bytes, or set enforce_eager"),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            made = call()
        return graph, made


class DecodeGraphs:
    def __init__(
        self,
        inputs: DeviceInputs,
        model: Decoder,
        pages: KvPages,
        sampling: SamplingOps,
        buckets: Sequence[int],
        open_pool: Callable[[], CudaGraphs],
        group: RankGroup,
        adapters: AdapterStore | None,
    ) -> None:
        self._inputs, self._model, self._pages, self._choose = inputs, model, pages, sampling.choose
        self._tokens, self._max_context, self._group = inputs.tokens.view(-1), inputs.width - 1, group
        self.forward_pool, self._draw_pool = open_pool(), open_pool()
        self._buckets, self._adapters = np.array(buckets), adapters
        self._captured: dict[tuple[int, bool], _Captured] = {}  # by bucket, and whether rows have adapters
        self._last: _Captured | None = None  # the graphs of the last replayed forward pass

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture all graphs. Nothing else may be in flight."""
        largest_first = self._buckets[::-1].tolist()
        for bucket in quarters(largest_first, len(largest_first), "Captured the graphs of {} of {} buckets", progress):
            self._captured[bucket, False] = self._capture(bucket, None)
            if self._adapters is not None:
                self._captured[bucket, True] = self._capture(bucket, self._adapters.in_graph(bucket))

    def takes(self, layout: Layout) -> bool:
        """Tell whether a graph can run the step: every row has one token and samples, and no recurrent state goes
        through several rows."""
        return (
            layout.num_tokens == len(layout.slots)
            and len(layout.slots) <= self._buckets[-1]
            and bool(layout.samples.all())
            and not (layout.has_drafts and self._inputs.has_states)
        )

    def forward(self, layout: Layout, numbers: np.ndarray | None) -> tuple[Tensor, RowTensors]:
        """Return the hidden states [R, hidden] and the row tensors, [R] each; the next call overwrites both.

        numbers [R]: the rows' adapters; None if no row has one."""
        rows = len(layout.slots)
        bucket = int(self._buckets[np.searchsorted(self._buckets, rows)])
        self._inputs.send_singles(layout, bucket)
        self._last = self._captured[bucket, numbers is not None]
        if self._last.adapted is not None and numbers is not None:
            self._last.adapted.set(numbers, layout.query_starts)
        self._last.forward.replay()
        hidden, made = self._last.made
        return hidden[:rows], made

    def sample(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sample for the last `forward`: return the tokens [R], which are also written to the token table, and on the
        first rank the largest logits [R].

        Only for requests without edits or log-probabilities. The next call overwrites both; the next `forward` does
        not."""
        assert self._last is not None
        self._last.draw.replay()
        tokens, largest = self._last.drawn
        return tokens[:rows], largest[:rows]

    def _capture(self, bucket: int, adapted: Adapted | None) -> "_Captured":
        """Capture a bucket with padding rows only, which read nothing and write to addresses that are never read."""
        self._inputs.send_singles(Layout([]), bucket)
        self._draw(*self._compute(bucket, adapted))  # runs what happens only on a first call, outside of the graph
        forward, made = self.forward_pool.capture(lambda: self._compute(bucket, adapted))
        forward.replay()  # uploads the graph to the device, and computes the input of the draw
        draw, drawn = self._draw_pool.capture(lambda: self._draw(*made))
        draw.replay()
        return _Captured(adapted, forward, made, draw, drawn)

    def _compute(self, bucket: int, adapted: Adapted | None) -> tuple[Tensor, RowTensors]:
        batch, made = self._inputs.compute_singles(bucket, self._max_context)
        return self._model.forward(replace(batch, adapters=adapted), self._pages), without_tokens(made)

    def _draw(self, hidden: Tensor, made: RowTensors) -> tuple[Tensor, Tensor]:
        logits = self._model.logits(hidden)
        if logits is None:  # the first rank draws for all
            tokens, largest = torch.empty_like(made.targets), hidden.new_empty(len(hidden))
        else:
            tokens, largest = self._choose(logits, *made.draw())
        self._group.broadcast(tokens)
        self._tokens.index_copy_(0, made.targets, tokens.to(torch.int32))
        return tokens, largest


class ChunkGraphs:
    """Graphs of the forward pass of steps with prompt chunks, possibly with single-token rows. Steps are padded to one
    of a few numbers of tokens. Only the device knows the rows; at most MAX_SEVERAL of them have several tokens.

    The device computes such a step faster than the host can launch its kernels. Models with latents or recurrent states
    have no such graphs, because their layers plan on the host."""

    def __init__(
        self,
        inputs: DeviceInputs,
        model: Decoder,
        pages: KvPages,
        buckets: Sequence[int],
        pool: CudaGraphs,
        adapters: AdapterStore | None,
    ) -> None:
        self._inputs, self._model, self._pages, self._pool = inputs, model, pages, pool
        self._max_context = inputs.width - 1
        self._buckets, self._adapters = np.array(buckets), adapters
        self._captured: dict[tuple[int, bool], _CapturedChunk] = {}  # by tokens, and whether rows have adapters

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        largest_first = self._buckets[::-1].tolist()
        for tokens in quarters(largest_first, len(largest_first), "Captured {} of {} graphs of prompts", progress):
            self._inputs.send_padded(Layout([]), self._rows(tokens), tokens)
            self._captured[tokens, False] = self._capture(tokens, None)
            if self._adapters is not None:
                most_tiles = tokens // ROWS + self._rows(tokens)  # the last tile of each row may be partly filled
                self._captured[tokens, True] = self._capture(tokens, self._adapters.in_graph(most_tiles))

    def takes(self, layout: Layout) -> bool:
        return (
            layout.num_tokens <= self._buckets[-1]
            and 0 < len(layout.slots) - layout.num_single_rows <= MAX_SEVERAL
            and not layout.has_drafts
        )

    def forward(self, layout: Layout, numbers: np.ndarray | None) -> tuple[Tensor, Samples]:
        """Return the hidden states of the rows that sample, as copies: the next graph overwrites its results."""
        tokens = int(self._buckets[np.searchsorted(self._buckets, layout.num_tokens)])
        rows = self._rows(tokens)
        self._inputs.send_padded(layout, rows, tokens)
        adapted, graph, (hidden, made) = self._captured[tokens, numbers is not None]
        if adapted is not None and numbers is not None:
            adapted.set(numbers, layout.query_starts)
        graph.replay()
        return self._inputs.select_samples(rows, int(layout.samples.sum()), hidden, made)

    def _rows(self, tokens: int) -> int:
        """Return the number of rows: one for each slot and one for the padding, at most the number of tokens."""
        return min(self._inputs.num_slots + 1, tokens)

    def _capture(self, tokens: int, adapted: Adapted | None) -> "_CapturedChunk":
        self._compute(tokens, adapted)
        graph, made = self._pool.capture(partial(self._compute, tokens, adapted))
        graph.replay()
        return _CapturedChunk(adapted, graph, made)

    def _compute(self, tokens: int, adapted: Adapted | None) -> tuple[Tensor, RowTensors]:
        batch, made = self._inputs.compute_padded(self._rows(tokens), tokens, self._max_context)
        return self._model.forward(replace(batch, adapters=adapted), self._pages), without_tokens(made)


def without_tokens(made: RowTensors) -> RowTensors:
    """Drop the tensors that only the forward pass reads, so that other graphs can reuse their memory."""
    nothing = made.tokens[:0]
    return made._replace(tokens=nothing, positions=nothing, kv_slots=nothing, block_tables=nothing)


class _Captured(NamedTuple):
    """The graphs of one bucket."""

    adapted: Adapted | None
    forward: torch.cuda.CUDAGraph
    made: tuple[Tensor, RowTensors]  # results of `forward`, inputs of `draw`
    draw: torch.cuda.CUDAGraph
    drawn: tuple[Tensor, Tensor]


class _CapturedChunk(NamedTuple):
    """The graph of one number of tokens."""

    adapted: Adapted | None
    forward: torch.cuda.CUDAGraph
    made: tuple[Tensor, RowTensors]

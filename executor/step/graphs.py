"""Steps as CUDA graphs: decode steps, of single-token rows, captured once per number of rows, and the forward pass of
steps with prompt chunks, captured once per number of tokens.

Launching the few hundred kernels of a step one by one takes the host longer than a small model takes to compute it. A
graph has fixed shapes, so steps are padded to one of a few *buckets* with rows that read nothing and write to addresses
that are never read. A graph reads what changes between steps from memory that `DeviceInputs` fills before the replay.

All graphs are captured before the first step, the largest bucket first, so that smaller ones fit into the memory that
it took. Only one graph runs at a time, so the graphs of a kind share a memory pool: memory that one frees during
capture is reused by the next. Forward passes and draws have separate pools, because the results of a draw are still
being copied to the host while the next forward pass runs.

In a graph of steps with prompts only the device knows the rows; at most MAX_SEVERAL of them have several tokens. The
device computes such a step faster than the host can launch its kernels.

Ranks capture and replay their graphs together. The captured set follows from the configuration, and the replayed graph
from the step and its requests' options. All ranks get the same steps in the same order, so the collectives in their
graphs match. Each bucket runs every collective in its size before the capture, so the communicator is connected.

A draft layer has graphs of its own, which run once a step has sampled. They share the memory of the forward
pass, whose inputs they read: between the two only draws run, which have another pool.

Where LoRA is enabled, every graph is captured a second time with adapters. It has as many tiles of rows with an adapter
as any step of its size may need, and those that a step does not use have no rows.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import RowTensors, SamplingOps
from penstock.executor.kernels.lora import ROWS, SlotRuns
from penstock.executor.kernels.state import MAX_SEVERAL
from penstock.executor.models.adapters import AdapterStore
from penstock.executor.models.decoder import Decoder
from penstock.executor.parallel import RankGroup
from penstock.executor.progress import quarters
from penstock.executor.step.drafting import DraftModel, last_right_rows
from penstock.executor.step.inputs import DeviceInputs, PaddedSize, Samples
from penstock.executor.step.layout import Layout
from penstock.executor.step.memory import naming_options

Results = TypeVar("Results")

# Up to 32 rows a step is bound by reading weights, so padding is cheap; beyond that every row costs.
SMALL_BUCKETS, BUCKET_STEP, LARGEST_BUCKET = (1, 2, 4, 8, 16, 24, 32), 16, 512

# Numbers of tokens that graphs are captured for. From 257 tokens on, padding adds at most a quarter. Beyond 2,048 a model
# of 8B computes longer than the host needs to launch its kernels.
CHUNK_BUCKETS = (*range(64, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256))
MOST_ABSORBED = 512  # tokens of a graph of steps with prompts whose attention is absorbed (executor/models/latent.py)


def choose_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows that graphs are captured for, ascending; steps with more rows run without a graph."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    buckets = [*SMALL_BUCKETS, *range(SMALL_BUCKETS[-1] + BUCKET_STEP, largest, BUCKET_STEP)]
    return *(bucket for bucket in buckets if bucket < largest), largest


class CudaGraphs:
    """Graphs of one memory pool: replaying one may overwrite the results of another."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, call: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
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
            results = call()
        return graph, results


class StepGraphs:
    def __init__(
        self,
        inputs: DeviceInputs,
        model: Decoder,
        pages: KvPages,
        sampling: SamplingOps,
        row_buckets: Sequence[int],
        token_buckets: Sequence[int],
        open_pool: Callable[[], CudaGraphs],
        group: RankGroup,
        adapters: AdapterStore | None,
        drafts: DraftModel | None = None,
    ) -> None:
        """`row_buckets` are the numbers of rows of decode steps, `token_buckets` those of tokens of steps with prompts,
        both ascending."""
        self._inputs, self._model, self._pages, self._choose = inputs, model, pages, sampling.choose
        self._tokens, self._max_context, self._group = inputs.tokens.view(-1), inputs.width - 1, group
        self._forward_pool, self._draw_pool = open_pool(), open_pool()
        self._adapters, self._drafts = adapters, drafts
        self._batch: ForwardBatch | None = None  # of the size that is being captured
        self._decode = [PaddedSize(rows, rows, False) for rows in row_buckets]
        # Recurrent layers take other kernels for the rows of drafts.
        self._chains = [each._replace(has_chains=True) for each in self._decode if drafts and inputs.has_states]
        # A row for each slot and one for the padding.
        self._prompts = [PaddedSize(min(inputs.num_slots + 1, tokens), tokens, True) for tokens in token_buckets]
        self._captured: dict[tuple[PaddedSize, bool], _Captured] = {}  # by size, and whether rows have adapters
        self._last: _Captured | None = None  # the graphs of the last replayed forward pass

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        """Capture all graphs. Nothing else may be in flight."""
        # Sizes with prompts are larger.
        sizes = [*reversed(self._prompts), *reversed(self._chains), *reversed(self._decode)]
        for size in quarters(sizes, len(sizes), "Captured the graphs of {} of {} sizes of steps", progress):
            self._captured[size, False] = self._capture(size, None)
            if self._adapters is not None:
                # In a prompt, the last tile of each row may be partly filled.
                most_tiles = size.rows + size.tokens // ROWS * size.has_prompts
                self._captured[size, True] = self._capture(size, self._adapters.in_graph(most_tiles))

    def size_for(self, layout: Layout) -> PaddedSize | None:
        """Return the size of the graph that can run the step, or None.

        Every row of a decode step must sample, and few recurrent states may go through several rows."""
        if layout.num_tokens > len(layout.slots):
            sizes = self._prompts
            is_fit = len(layout.slots) - layout.num_single_rows <= MAX_SEVERAL and not layout.has_drafts
        else:
            has_chains = layout.has_drafts and self._inputs.has_states
            sizes = self._chains if has_chains else self._decode
            num_several = np.count_nonzero(np.diff(layout.chains()[1]) > 1) if has_chains else 0
            is_fit = bool(layout.samples.all() and num_several <= MAX_SEVERAL)
        index = bisect_left(sizes, layout.num_tokens, key=lambda size: size.tokens)
        return sizes[index] if is_fit and index < len(sizes) else None

    def forward(self, size: PaddedSize, layout: Layout, adapter_numbers: np.ndarray | None) -> None:
        """Compute the hidden states of a step; `results` returns them, and the next call overwrites them.

        adapter_numbers [R]: the rows' adapters; None if no row has one."""
        self._inputs.send_padded(layout, size)
        self._last = self._captured[size, adapter_numbers is not None]
        if self._last.adapted is not None and adapter_numbers is not None:
            self._last.adapted.set(adapter_numbers, layout.query_starts)
        self._last.forward.replay()

    def results(self, size: PaddedSize, layout: Layout) -> tuple[Samples, Tensor]:
        """Return the inputs of sampling, and the hidden states of the rows that sample, of the last `forward`."""
        assert self._last is not None
        (hidden, row_tensors), rows = self._last.outputs, len(layout.slots)
        if size.has_prompts:
            return self._inputs.select_samples(size.rows, int(layout.samples.sum()), hidden, row_tensors)
        return Samples(row_tensors.targets[:rows], tuple(tensor[:rows] for tensor in row_tensors.draw())), hidden[:rows]

    def sample(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sample for the last `forward`, of a decode step: return the tokens [R], which are also written to the token
        table, and on the first rank the largest logits [R].

        Only for requests without edits or log-probabilities. The next call overwrites both; the next `forward` does
        not."""
        assert self._last is not None and self._last.draw is not None
        graph, (tokens, largest) = self._last.draw
        graph.replay()
        return tokens[:rows], largest[:rows]

    def draft(self, rows: int) -> Tensor:
        """Draft after the tokens that were sampled for the last `forward`: [R, most]. The next call overwrites them."""
        assert self._last is not None and self._last.drafts is not None
        graph, drafts = self._last.drafts
        graph.replay()
        return drafts[:rows]

    def _capture(self, size: PaddedSize, adapted: SlotRuns | None) -> "_Captured":
        """Capture a size with padding rows only, which read nothing and write to addresses that are never read."""
        self._inputs.send_padded(Layout([]), size)
        outputs = self._compute(size, adapted)  # runs what happens only on a first call, outside of the graph
        if not size.has_prompts:
            self._draw(*outputs)
        forward, outputs = self._forward_pool.capture(partial(self._compute, size, adapted))
        forward.replay()  # uploads the graph to the device, and computes the input of the draw
        draw = drafts = None
        if not size.has_prompts:
            draw = self._draw_pool.capture(lambda: self._draw(*outputs))
            draw[0].replay()
        if self._drafts is not None:
            self._draft(size, outputs[0])
            drafts = self._forward_pool.capture(lambda: self._draft(size, outputs[0]))
            drafts[0].replay()
        return _Captured(adapted, forward, outputs, draw, drafts)

    def _compute(self, size: PaddedSize, adapted: SlotRuns | None) -> tuple[Tensor, RowTensors]:
        self._batch, row_tensors = self._inputs.compute_padded(size, self._max_context)
        hidden = self._model.forward(replace(self._batch, adapters=adapted), self._pages)
        return hidden, without_tokens(row_tensors)

    def _draft(self, size: PaddedSize, hidden: Tensor) -> Tensor:
        """Draft after the tokens that the step has sampled."""
        assert self._drafts is not None and self._batch is not None
        slots, next_tokens, counts = self._inputs.before_drafts(size.rows, self._batch.positions)
        rows = None
        if size.has_prompts:  # whose rows have no drafts
            rows = torch.arange(size.rows, device=hidden.device)
        else:
            counts = counts * last_right_rows(self._batch, slots, next_tokens)
        return self._drafts.draft(self._batch, hidden, next_tokens, rows, counts, self._drafts.most)

    def _draw(self, hidden: Tensor, row_tensors: RowTensors) -> tuple[Tensor, Tensor]:
        logits = self._model.logits(hidden)
        if logits is None:  # the first rank draws for all
            tokens, largest = torch.empty_like(row_tensors.targets), hidden.new_empty(len(hidden))
        else:
            tokens, largest = self._choose(logits, *row_tensors.draw())
        self._group.broadcast(tokens)
        self._tokens.index_copy_(0, row_tensors.targets, tokens.to(torch.int32))
        return tokens, largest


def without_tokens(row_tensors: RowTensors) -> RowTensors:
    """Drop the tensors that only the forward pass reads, so that other graphs can reuse their memory."""
    nothing = row_tensors.tokens[:0]
    return row_tensors._replace(tokens=nothing, positions=nothing, kv_cells=nothing, block_tables=nothing)


class _Captured(NamedTuple):
    """The graphs of one size."""

    adapted: SlotRuns | None
    forward: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, RowTensors]  # results of `forward`, inputs of `draw`
    draw: tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]] | None  # and its results; only for decode steps
    drafts: tuple[torch.cuda.CUDAGraph, Tensor] | None  # of the draft layer, if the model has one

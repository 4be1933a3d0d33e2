"""Steps as CUDA graphs: those in which every row computes one token, captured once per number of rows, and those with a
part of a prompt, captured once per number of tokens; replayed from then on.

Launching a step's few hundred kernels one by one takes the host longer than small models take to compute it. A graph
has fixed shapes, so the rows are filled up to one of a few *buckets* with rows that see nothing and write to places
that are never read. What changes from step to step the graph reads from memory that `DeviceInputs` fills before it.

All are captured before the first step, the largest bucket first: what a smaller one needs finds room in the memory that
it took. Only one graph runs at a time, so those of a kind share a pool of memory: what one gives back while it is
captured, the next one takes. Forward passes and draws have a pool each, because a draw's results are still being copied
to the host while the next forward pass runs.

Several ranks capture and replay theirs together. What is captured follows from the configuration, what is replayed from
the step and from what its requests asked for, and every rank gets the same steps in the same order: so the collectives
in their graphs meet. Each bucket runs every one of them in that size before it is captured, so the communicator has
made its connections.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import KvPages
from penstock.executor.kernels import RowTensors, SamplingOps
from penstock.executor.kernels.state import MAX_SEVERAL
from penstock.executor.models.registry import CausalModel
from penstock.executor.parallel import RankGroup
from penstock.executor.progress import quarters
from penstock.executor.step.inputs import DeviceInputs, Ends
from penstock.executor.step.layout import Layout
from penstock.executor.step.memory import naming_options

Made = TypeVar("Made")

# Up to 32 rows a step is bound by reading weights, and padding costs little; beyond it every row is paid for.
SMALL_BUCKETS, BUCKET_STEP, LARGEST_BUCKET = (1, 2, 4, 8, 16, 24, 32), 16, 512


# Numbers of tokens that graphs are captured for. From 257 tokens on a step is padded by a quarter at most.
CHUNK_BUCKETS = (*range(64, 513, 64), *range(640, 1025, 128))


def choose_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of rows that graphs are made for, ascending; more rows than the last run without a graph."""
    largest = min(max_num_seqs, LARGEST_BUCKET)
    buckets = [*SMALL_BUCKETS, *range(SMALL_BUCKETS[-1] + BUCKET_STEP, largest, BUCKET_STEP)]
    return *(bucket for bucket in buckets if bucket < largest), largest


class CudaGraphs:
    """Those of one pool: any of them may overwrite what another one made."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, call: Callable[[], Made]) -> tuple[torch.cuda.CUDAGraph, Made]:
        """Record what `call` launches, without running it. What it returns has its place for as long as the graph: every
        replay writes there."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling CUDA: the tiers' copies, a worker that waits for results, NCCL's watchdog.
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
        model: CausalModel,
        pages: KvPages,
        sampling: SamplingOps,
        buckets: Sequence[int],
        open_pool: Callable[[], CudaGraphs],
        group: RankGroup,
    ) -> None:
        self._inputs, self._model, self._pages, self._choose = inputs, model, pages, sampling.choose
        self._tokens, self._max_context, self._group = inputs.tokens.view(-1), inputs.width - 1, group
        self.forward_pool, self._draw_pool = open_pool(), open_pool()
        self._buckets = np.array(buckets)
        self._captured: dict[int, _Captured] = {}
        self._last: _Captured | None = None  # whose forward pass was replayed last

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        """All there are. Nothing else may be in flight."""
        largest_first = self._buckets[::-1].tolist()
        for bucket in quarters(largest_first, len(largest_first), "Captured the graphs of {} of {} buckets", progress):
            self._captured[bucket] = self._capture(bucket)

    def takes(self, layout: Layout) -> bool:
        """Whether the step is one of those: one token in every row, and every row samples. Not where a state goes through
        several of them."""
        return (
            layout.num_tokens == len(layout.slots)
            and len(layout.slots) <= self._buckets[-1]
            and bool(layout.samples.all())
            and not (layout.has_drafts and self._inputs.has_states)
        )

    def forward(self, layout: Layout) -> tuple[Tensor, RowTensors]:
        """Hidden states [R, hidden] and what the rows are like, [R] each. The next call overwrites both."""
        rows = len(layout.slots)
        bucket = int(self._buckets[np.searchsorted(self._buckets, rows)])
        self._inputs.send_singles(layout, bucket)
        self._last = self._captured[bucket]
        self._last.forward.replay()
        hidden, made = self._last.made
        return hidden[:rows], made

    def sample(self, rows: int) -> tuple[Tensor, Tensor]:
        """For the last `forward`, as each request asks: tokens [R], which are in the table then, and on the first rank
        largest logits [R].

        For requests that ask for no more than a draw. The next call overwrites both; the next `forward` does not."""
        assert self._last is not None
        self._last.draw.replay()
        tokens, largest = self._last.drawn
        return tokens[:rows], largest[:rows]

    def _capture(self, bucket: int) -> "_Captured":
        """Every row is padding, which reads nothing and writes to places that are never read."""
        self._inputs.send_singles(Layout([]), bucket)
        self._draw(*self._compute(bucket))  # what happens only at a first call is no part of a graph
        forward, made = self.forward_pool.capture(lambda: self._compute(bucket))
        forward.replay()  # the first replay brings a graph to the device; and the draw reads what it made
        draw, drawn = self._draw_pool.capture(lambda: self._draw(*made))
        draw.replay()
        return _Captured(forward, made, draw, drawn)

    def _compute(self, bucket: int) -> tuple[Tensor, RowTensors]:
        batch, made = self._inputs.compute_singles(bucket, self._max_context)
        return self._model.forward(batch, self._pages), without_tokens(made)

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
    """Graphs of the forward pass of steps with parts of prompts, perhaps beside rows of one token. Steps are padded to one
    of a few numbers of tokens. Only the device knows the rows; at most MAX_SEVERAL of them have several tokens.

    The device computes such a step faster than the host can launch it kernel by kernel. Models with latents or states
    have no such graphs, because their layers plan on the host."""

    def __init__(
        self, inputs: DeviceInputs, model: CausalModel, pages: KvPages, buckets: Sequence[int], pool: CudaGraphs
    ) -> None:
        self._inputs, self._model, self._pages, self._pool = inputs, model, pages, pool
        self._max_context = inputs.width - 1
        self._buckets = np.array(buckets)
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, tuple[Tensor, RowTensors]]] = {}

    @torch.inference_mode()
    def capture(self, progress: Callable[[str], None]) -> None:
        largest_first = self._buckets[::-1].tolist()
        for tokens in quarters(largest_first, len(largest_first), "Captured {} of {} graphs of prompts", progress):
            self._inputs.send_padded(Layout([]), self._rows(tokens), tokens)
            self._compute(tokens)
            graph, made = self._pool.capture(partial(self._compute, tokens))
            graph.replay()
            self._captured[tokens] = graph, made

    def takes(self, layout: Layout) -> bool:
        return (
            layout.num_tokens <= self._buckets[-1]
            and 0 < len(layout.slots) - layout.num_single_rows <= MAX_SEVERAL
            and not layout.has_drafts
        )

    def forward(self, layout: Layout) -> tuple[Tensor, Ends]:
        """Return the hidden states of the rows that sample, as copies: the next graph overwrites its results."""
        tokens = int(self._buckets[np.searchsorted(self._buckets, layout.num_tokens)])
        rows = self._rows(tokens)
        self._inputs.send_padded(layout, rows, tokens)
        graph, (hidden, made) = self._captured[tokens]
        graph.replay()
        return self._inputs.ends_of(rows, int(layout.samples.sum()), hidden, made)

    def _rows(self, tokens: int) -> int:
        """Number of rows: one for each slot and one for the padding, but never more than there are tokens."""
        return min(self._inputs.num_slots + 1, tokens)

    def _compute(self, tokens: int) -> tuple[Tensor, RowTensors]:
        batch, made = self._inputs.compute_padded(self._rows(tokens), tokens, self._max_context)
        return self._model.forward(batch, self._pages), without_tokens(made)


def without_tokens(made: RowTensors) -> RowTensors:
    """Drop the tensors that only the forward pass reads, so that other graphs can reuse their memory."""
    nothing = made.tokens[:0]
    return made._replace(tokens=nothing, positions=nothing, kv_slots=nothing, block_tables=nothing)


class _Captured(NamedTuple):
    """Of one bucket."""

    forward: torch.cuda.CUDAGraph
    made: tuple[Tensor, RowTensors]  # by `forward`, for `draw`
    draw: torch.cuda.CUDAGraph
    drawn: tuple[Tensor, Tensor]

"""Random recurrent layers and states on scattered pages, for tests of whichever kernels."""

from dataclasses import dataclass, replace

import torch
from benchmarks.gpu.batches import make_batch

from penstock.executor.batch import ForwardBatch, StateBatch, StatePages
from penstock.executor.kernels import Ops
from penstock.executor.kernels.recurrent import DeltaHeads, DeltaInputs
from tests.support.paged import random

PER_PAGE = 3


@dataclass
class Layer:
    """One layer of `heads` and its inputs, for some tokens; the convolution has `taps`."""

    heads: DeltaHeads
    taps: int
    inputs: DeltaInputs  # before the convolution
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def random(
        cls,
        tokens: int,
        sizes: tuple[int, int, int, int],
        dtype: torch.dtype = torch.float32,
        taps: int = 4,
        device: str | torch.device = "cpu",
        erases: bool = True,
    ) -> "Layer":
        _, value_heads, _, value_dim = sizes
        rate, shift = -random(value_heads, seed=1).exp(), random(value_heads, seed=2)
        norm = 1 + 0.3 * random(value_dim, seed=3)
        heads = DeltaHeads(*sizes, rate.to(device), shift.to(device), norm.to(device), 1e-6)
        if not erases:
            heads = heads._replace(norm=None, skip=random(value_heads, seed=7).to(device))
        channels = 2 * heads.keys + heads.values
        widths = channels, heads.values, (1 + erases) * value_heads
        merged = random(tokens, sum(widths), dtype=dtype, seed=4).to(device)  # parts of one product
        weight = random(taps, channels, seed=5).to(device) / taps**0.5
        return cls(
            heads, taps, DeltaInputs(*merged.split(widths, 1)), weight, 0.1 * random(channels, seed=6).to(device)
        )

    @property
    def unit_bytes(self) -> int:
        tail = (self.taps - 1) * self.inputs.qkv.shape[1] * self.inputs.qkv.element_size()
        return -(-max(tail, 4 * self.heads.key_dim * self.heads.value_dim) // 64) * 64

    def part(self, tokens: torch.Tensor) -> "Layer":
        """Return the layer for some of the tokens."""
        return replace(self, inputs=DeltaInputs(*(each[tokens] for each in self.inputs)))

    def run(self, ops: Ops, states: StatePages, batch: ForwardBatch) -> torch.Tensor:
        qkv = ops.convolve(self.inputs.qkv, self.weight, self.bias, states, batch, True)
        return ops.delta_rule(self.inputs._replace(qkv=qkv), self.heads, states, batch)


class States:
    """The pages of one layer, the second of a model: random ones for so many states, scattered; the rest is NaN."""

    def __init__(self, layer: Layer, count: int, device: str | torch.device = "cpu") -> None:
        num_units = 1 + layer.heads.value_heads
        pages = -(-2 * num_units // PER_PAGE)
        order = torch.randperm(count * pages, generator=torch.Generator().manual_seed(9)).int() + 1
        self.tables = order.view(count, pages).to(device)
        page_bytes = PER_PAGE * layer.unit_bytes + 64
        base = torch.full((count * pages + 1, page_bytes // 4), float("nan"))
        generator = torch.Generator().manual_seed(10)
        used = 0.3 * torch.randn(count * pages + 1, page_bytes // 4, generator=generator)
        upper = used.view(torch.int32) >> 16 & 0xFFFF  # twice: numbers of about one in bfloat16 too
        used = (upper << 16 | upper).view(torch.float32)
        base[1:] = used[1:]
        self.pages = StatePages(base.view(torch.uint8).to(device), num_units, PER_PAGE, layer.unit_bytes)

    def copy(self) -> "States":
        other = object.__new__(States)
        other.tables, other.pages = self.tables, self.pages._replace(base=self.pages.base.clone())
        return other


def batch_of(
    counts: list[int], tables: torch.Tensor, write: torch.Tensor | None = None, new: tuple[int, ...] = ()
) -> ForwardBatch:
    """Return rows of so many tokens, single ones first; `tables` are where each reads, `write` where it writes."""
    is_new = torch.zeros(len(counts), dtype=torch.bool)
    is_new[list(new)] = True
    states = StateBatch(tables, tables if write is None else write, is_new.to(tables.device))
    return replace(make_batch([(count, count) for count in counts], tables.device), states=states)


def as_in_a_graph(batch: ForwardBatch, num_real: int | None = None) -> ForwardBatch:
    """Return the batch as a graph has it: only the device knows its rows, of which the first `num_real` are real."""
    counts, contexts = batch.query_starts.diff(), batch.context_lens
    real, longest = counts[:num_real], int(contexts.max())
    num_singles = int((real == 1).sum())
    row_counts = [len(real), num_singles, len(real) - num_singles, 0]
    return replace(
        batch,
        num_single_rows=0,
        query_lens=(int(counts.sum()), *(0,) * (len(counts) - 1)),
        query_contexts=(longest,) * len(counts),
        max_single_context=longest,
        single_contexts=torch.where(counts == 1, contexts, 0),
        row_counts=torch.tensor(row_counts, dtype=torch.int32, device=counts.device),
        memo={},
    )

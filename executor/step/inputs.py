"""From a step's layout to the tensors that a model is told of it: made by the host, or by a GPU from one copy.

`HostInputs` computes everything in numpy: on a CPU nothing has to go anywhere. `DeviceInputs` packs what the device
cannot know into a single block of pinned memory, a few numbers per row and what changed of the requests, sends it with
one copy, and lets kernels do the rest. Nothing in it waits for the device.
"""

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import InputOps, RowTensors
from penstock.executor.kernels.state import MAX_RUN, DeviceState
from penstock.executor.protocol import Row
from penstock.executor.staging import send
from penstock.executor.step.layout import Layout
from penstock.executor.step.slots import Slots

HEADER = 4  # numbers before the rows' own; the first says how many rows there are
PAYLOAD = 4 * MAX_RUN  # numbers of runs in one copy; more of them take several
NUM_BLOCKS = 2  # of pinned memory: one is filled while the device may still read the other


class Ends(NamedTuple):
    """Of the S rows that sample."""

    targets: Tensor  # [S] int64 into the flattened table of tokens: where the sampled ones go
    options: (
        tuple[Tensor, ...] | None
    )  # as `SamplingOps.choose` takes them, if the device has them anyway; positions last


class Prepared(NamedTuple):
    batch: ForwardBatch
    ends: Ends


class Inputs(Protocol):
    def edit_blocks(self, rows: list[Row]) -> None: ...

    def flush(self) -> None:
        """After a step without rows: what was said of the requests reaches the device."""
        ...

    def prepare(self, layout: Layout, wanted: np.ndarray) -> Prepared:
        """wanted [W]: the tokens whose hidden state is asked for, ascending."""
        ...


class HostInputs:
    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots, self._device = slots, device

    def edit_blocks(self, rows: list[Row]) -> None:
        self._slots.edit_blocks(rows)

    def flush(self) -> None:
        pass

    def prepare(self, layout: Layout, wanted: np.ndarray) -> Prepared:
        slots = self._slots
        tables = self._tensor(layout.block_tables(slots), np.int32)
        batch = make_batch(
            layout,
            tokens=slots.tokens.view(-1)[self._tensor(layout.token_index(slots))],
            positions=self._tensor(layout.positions, np.int32),
            kv_slots=self._tensor(layout.kv_slots(slots)),
            query_starts=self._tensor(layout.query_starts, np.int32),
            context_lens=self._tensor(layout.context_lens, np.int32),
            block_tables=tables,
            wanted=None if len(wanted) == layout.num_tokens else self._tensor(wanted),
        )
        targets = layout.slots[layout.samples] * slots.width + layout.context_lens[layout.samples]
        return Prepared(batch, Ends(self._tensor(targets), None))

    def _tensor(self, array: np.ndarray, dtype: type = np.int64) -> Tensor:
        return send(np.ascontiguousarray(array, dtype), self._device)


class DeviceInputs:
    """`compute` is what a graph may hold; everything before it, `send`, differs from step to step."""

    def __init__(
        self, state: DeviceState, ops: InputOps, max_rows: int, max_tokens: int, payload: int = PAYLOAD
    ) -> None:
        self._state, self._ops, self._payload = state, ops, payload
        device = state.flat.device
        # Each row has five numbers if it samples, each token one if it is wanted, each run three beside what it holds.
        size = HEADER + 1 + 5 * max_rows + max(max_tokens, MAX_RUN) + 4 * payload
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._blocks = [_Pinned(size, device) for _ in range(NUM_BLOCKS)]

    def edit_blocks(self, rows: list[Row]) -> None:
        for row in rows:
            if row.blocks:
                self._state.write_blocks(row.slot, row.first_block, row.blocks)

    def flush(self) -> None:
        self._send([])

    def prepare(self, layout: Layout, wanted: np.ndarray) -> Prepared:
        rows, block_size = len(layout.slots), self._state.places.block_size
        samples = np.flatnonzero(layout.samples)
        has_all = len(wanted) == layout.num_tokens
        extra = [samples] if has_all else [samples, wanted]
        self._send([[rows, 0, 0, 0], layout.query_starts, layout.slots, layout.starts, layout.write_from, *extra])
        end = HEADER + 1 + 4 * rows
        sampled = self._packed[end : end + len(samples)].long()
        longest, width = int(layout.counts.max()), -(-int(layout.context_lens.max()) // block_size)
        made = self._ops.prepare(
            self._packed, self._state.flat, self._state.places, rows, layout.num_tokens, longest, width
        )
        batch = make_batch(
            layout,
            **self._tensors(made),
            wanted=None if has_all else self._packed[end + len(samples) :][: len(wanted)].long(),
        )
        drawn = [tensor.index_select(0, sampled) for tensor in made.draw()]
        return Prepared(batch, Ends(made.targets.index_select(0, sampled), tuple(drawn)))

    def send_singles(self, layout: Layout, bucket: int) -> None:
        """Rows of one token each, filled up to `bucket` with rows that the header excludes."""
        spare = np.zeros(bucket - len(layout.slots), dtype=np.int64)
        columns = [part for column in (layout.slots, layout.starts, layout.write_from) for part in (column, spare)]
        self._send([[len(layout.slots), 0, 0, 0], np.arange(bucket + 1), *columns])

    def compute_singles(self, bucket: int, max_context: int) -> tuple[ForwardBatch, RowTensors]:
        """From the last block sent, a batch of `bucket` rows. Padding has a context of 0 and writes to block 0."""
        places = self._state.places
        made = self._ops.prepare(self._packed, self._state.flat, places, bucket, bucket, 1, places.max_blocks)
        batch = ForwardBatch(
            **self._tensors(made),
            wanted=None,
            num_single_rows=bucket,
            query_lens=(),
            query_contexts=(),
            max_context_len=max_context,
            max_single_context=max_context,
        )
        return batch, made

    def _tensors(self, made: RowTensors) -> dict[str, Tensor]:
        """By their names in `ForwardBatch`."""
        return {
            "tokens": made.tokens,
            "positions": made.positions,
            "kv_slots": made.kv_slots,
            "query_starts": self._packed[HEADER : HEADER + len(made.context_lens) + 1],
            "context_lens": made.context_lens,
            "block_tables": made.block_tables,
        }

    def _send(self, head: list) -> None:
        """One copy, but for what does not fit, which goes before it: a step that admits very long prompts."""
        runs = self._state.take()
        parts: list[list[tuple[int, np.ndarray]]] = [[]]
        room = self._payload
        for run in runs:
            if len(run[1]) > room:
                parts.append([])
                room = self._payload
            parts[-1].append(run)
            room -= len(run[1])
        for part in parts[:-1]:
            self._upload([], part)
        if head or parts[-1]:
            self._upload(head, parts[-1])

    def _upload(self, head: list, runs: list[tuple[int, np.ndarray]]) -> None:
        self._blocks.append(block := self._blocks.pop(0))
        numbers = block.wait()
        size = sum(len(part) for part in head)
        if head:
            numbers[:size] = np.concatenate(head)
        if runs:
            values = np.concatenate([values for _, values in runs])
            lengths = [len(values) for _, values in runs]
            first = size + 3 * len(runs)
            table = numbers[size:first].reshape(-1, 3)
            table[:, 0] = [at for at, _ in runs]
            table[:, 2] = lengths
            table[:, 1] = first + np.cumsum([0, *lengths[:-1]])
            numbers[first : first + len(values)] = values
            block.copy_to(self._packed, first + len(values))
            self._ops.apply_runs(self._packed, self._state.flat, size, len(runs), max(lengths))
        else:
            block.copy_to(self._packed, size)


class _Pinned:
    """Memory of the host that a GPU reads by itself; not to be written before it has."""

    def __init__(self, size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._tensor = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._event = torch.cuda.Event() if is_cuda else None

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.numpy()

    def copy_to(self, target: Tensor, size: int) -> None:
        target[:size].copy_(self._tensor[:size], non_blocking=True)
        if self._event is not None:
            self._event.record()


def make_batch(layout: Layout, **tensors: Any) -> ForwardBatch:
    singles, contexts = layout.num_single_rows, layout.context_lens.tolist()
    return ForwardBatch(
        **tensors,
        num_single_rows=singles,
        query_lens=tuple(layout.counts[singles:].tolist()),
        query_contexts=tuple(contexts[singles:]),
        max_context_len=max(contexts),
        max_single_context=max(contexts[:singles], default=0),
    )

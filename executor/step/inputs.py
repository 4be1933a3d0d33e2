"""The tokens and block tables of requests in their slots, and the model's input tensors for a step.

`HostInputs` keeps and computes everything in numpy, for the CPU. `DeviceInputs` packs what the device cannot know (a
few numbers per row, and changes of requests) into a block of pinned memory, sends it with one copy, and computes the
rest in kernels. It never synchronizes with the device.

The sampler writes tokens to the device's table, and the next step reads them there, without the host in between. Block
tables change only on the host's request; a batch gets a copy of the part it needs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.executor.batch import Chains, ForwardBatch, StateBatch
from penstock.executor.cache_layout import CacheLayout
from penstock.executor.kernels import InputOps, RowTensors
from penstock.executor.kernels.state import HEADER, DeviceState, PackedStep
from penstock.executor.protocol import Row, Sampling
from penstock.executor.staging import send
from penstock.executor.step.layout import Layout

PAYLOAD = 1 << 18  # numbers of runs in one copy; runs that exceed it are copied by themselves
NUM_BLOCKS = 2  # blocks of pinned memory: one is filled while the device may still read the other

# The first fields of `ForwardBatch`, up to the block tables.
BatchTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
# Tensors of the attention groups after the first: `ForwardBatch.other_groups`.
GroupTensors = tuple[tuple[Tensor, Tensor], ...]
ONE_GROUP = CacheLayout()
# The sampling options of a slot on a CPU, in the order of the arguments of `SamplingOps.choose`.
OPTIONS = {"temperature": "f4", "min_p": "f4", "top_k": "i4", "top_p": "f4", "seed": "u8"}


class Samples(NamedTuple):
    """The token targets and sampling options of the S rows that sample."""

    targets: Tensor  # [S] int64: indices of the sampled tokens in the flattened token table
    options: tuple[Tensor, ...]  # the arguments of `SamplingOps.choose` after the logits


class PaddedSize(NamedTuple):
    """The size that a step is padded to. Without prompts every row is a token."""

    rows: int
    tokens: int
    has_prompts: bool
    has_chains: bool = False  # recurrent layers see the rows of a request as one


def slot_sizes(max_model_len: int, block_size: int) -> tuple[int, int]:
    """Return the tokens and blocks of a slot; the token sampled at the very end is stored but never computed."""
    return max_model_len + 1, -(-max_model_len // block_size)


class HostInputs:
    def __init__(
        self, num_slots: int, max_model_len: int, block_size: int, cache_layout: CacheLayout = ONE_GROUP
    ) -> None:
        self.width, max_blocks = slot_sizes(max_model_len, block_size)
        self.num_slots, self.block_size, self._group_of = num_slots, block_size, cache_layout.group_of
        # [slots, width]; allocated by calloc, so a slot takes memory only as far as it was used.
        self._tokens = np.zeros((num_slots, self.width), np.int32)
        self.tokens = torch.from_numpy(self._tokens)
        self._blocks, *self._others = np.zeros((cache_layout.attention_groups, num_slots, max_blocks), dtype=np.int32)
        # For each slot, the pages that its rows read their state from and write it to.
        self._states = np.zeros((num_slots, 2, cache_layout.state_pages), dtype=np.int32)
        self._options = {name: np.zeros(num_slots, kind) for name, kind in OPTIONS.items()}

    def admit(self, slot: int, tokens: np.ndarray, sampling: Sampling) -> None:
        self._tokens[slot, : len(tokens)] = tokens
        for name, column in self._options.items():
            column[slot] = getattr(sampling, name)

    def put(self, targets: Tensor, tokens: Tensor) -> None:
        """Store sampled tokens [S] at their indices in the flattened token table."""
        self._tokens.reshape(-1)[targets.numpy()] = tokens.numpy()

    def take(self, rows: list[Row]) -> None:
        """Store the blocks and tokens that rows bring along."""
        for row in rows:
            if row.blocks:
                self._blocks[row.slot, row.first_block : row.first_block + len(row.blocks)] = row.blocks
            if row.tokens:
                self._tokens[row.slot, row.first_token : row.first_token + len(row.tokens)] = row.tokens
            for table, (first, blocks) in zip(self._others, row.groups, strict=False):
                table[row.slot, first : first + len(blocks)] = blocks
            for place, pages in enumerate((row.states_in, row.states_out)):
                if pages:
                    self._states[row.slot, place] = pages

    def flush(self) -> None:
        """Send changes of requests to the device after a step without rows."""

    def prepare(self, layout: Layout, output_indices: np.ndarray) -> tuple[ForwardBatch, Samples]:
        """Return the model's inputs. output_indices [W]: indices of tokens whose hidden state is needed, ascending."""
        slot_of = layout.slots[layout.row_of]
        is_skipped = layout.positions < layout.write_from[layout.row_of] if layout.write_from.any() else None
        tokens = torch.from_numpy(self._tokens[slot_of, layout.positions])
        kv_cells, tables = self._in_blocks(self._blocks, layout, slot_of, is_skipped)
        positions, starts, contexts = (
            _tensor(array, np.int32) for array in (layout.positions, layout.query_starts, layout.context_lens)
        )
        indices = None if len(output_indices) == layout.num_tokens else _tensor(output_indices)
        others = tuple(self._in_blocks(table, layout, slot_of, is_skipped) for table in self._others)
        tensors = tokens, positions, kv_cells, starts, contexts, tables
        batch = _make_batch(layout, tensors, indices, others, self._group_of, self._state_batch(layout))
        slots, ends = layout.slots[layout.samples], _tensor(layout.context_lens[layout.samples])
        *options, seeds = (torch.from_numpy(column[slots]) for column in self._options.values())
        return batch, Samples(_tensor(slots * self.width) + ends, (*options, seeds.view(torch.int64), ends))

    def _in_blocks(
        self, table: np.ndarray, layout: Layout, slot_of: np.ndarray, is_skipped: np.ndarray | None
    ) -> tuple[Tensor, Tensor]:
        """Return one group's KV cells of the tokens, and the block tables of the rows."""
        size = self.block_size
        blocks = table[slot_of, layout.positions // size]
        if is_skipped is not None:  # positions that must not be written again go to block 0
            blocks = np.where(is_skipped, 0, blocks)
        kv_cells = _tensor(blocks.astype(np.int64) * size + layout.positions % size)
        return kv_cells, _tensor(table[layout.slots, : -(-layout.longest // size)], np.int32)

    def _state_batch(self, layout: Layout) -> StateBatch | None:
        if not self._states.shape[2]:
            return None
        rows = layout.chains()[0] if layout.has_drafts else slice(None)
        read, write = (_tensor(self._states[layout.slots[rows], place], np.int32) for place in range(2))
        return StateBatch(read, write, _tensor(layout.starts[rows] == 0, np.bool_))


class DeviceInputs:
    """Inputs on a GPU. The `compute` methods can be captured in a graph; the `send` methods before them cannot."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_tokens: int,
        ops: InputOps,
        device: torch.device,
        payload: int = PAYLOAD,
        cache_layout: CacheLayout = ONE_GROUP,
        draft_tokens: int = 0,
    ) -> None:
        self.width, max_blocks = slot_sizes(max_model_len, block_size)
        self.num_slots, self.block_size, self._group_of = num_slots, block_size, cache_layout.group_of
        self._state = DeviceState(
            num_slots, self.width, max_blocks, block_size, device, cache_layout, ahead=max(0, draft_tokens - 1)
        )
        self.tokens = self._state.tokens
        self._ops, self._payload = ops, payload
        # Numbers per row: five if it samples, and three of drafts; per token: one if its hidden state is needed; per run: three
        # and its content.
        size = PackedStep.size(num_slots) + 4 * num_slots + 5 + max_tokens + 4 * payload
        self._packed = torch.zeros(size, dtype=torch.int32, device=device)
        self._blocks = [_Pinned(size, device) for _ in range(NUM_BLOCKS)]

    def admit(self, slot: int, tokens: np.ndarray, sampling: Sampling) -> None:
        self._state.write_tokens(slot, 0, tokens)
        self._state.write_options(slot, sampling)

    def put(self, targets: Tensor, tokens: Tensor) -> None:
        self.tokens.view(-1)[targets] = tokens.to(torch.int32)

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            if row.blocks:
                self._state.write_blocks(row.slot, row.first_block, row.blocks)
            if row.tokens:
                self._state.write_tokens(row.slot, row.first_token, np.array(row.tokens, dtype=np.int32))
            for group, (first, blocks) in enumerate(row.groups, 1):
                if blocks:
                    self._state.write_blocks(row.slot, first, blocks, group)
            for is_written, pages in enumerate((row.states_in, row.states_out)):
                if pages:
                    self._state.write_states(row.slot, bool(is_written), pages)

    def flush(self) -> None:
        self._send([])

    def prepare(self, layout: Layout, output_indices: np.ndarray) -> tuple[ForwardBatch, Samples]:
        rows, samples = len(layout.slots), np.flatnonzero(layout.samples)
        has_all = len(output_indices) == layout.num_tokens
        extra = [samples] if has_all else [samples, output_indices]
        self._send([[rows, 0, 0, 0], layout.query_starts, layout.slots, layout.starts, layout.write_from, *extra])
        packed = PackedStep(self._packed, rows)
        sampled = packed.more(0, len(samples)).long()
        indices = None if has_all else packed.more(len(samples), len(output_indices)).long()
        longest, width = int(layout.counts.max()), -(-layout.longest // self.block_size)
        row_tensors, others = self._prepare(rows, layout.num_tokens, longest, width)
        drawn = tuple(tensor.index_select(0, sampled) for tensor in row_tensors.draw())
        states = self._state_batch(rows)
        if states is not None and layout.has_drafts:
            firsts = send(layout.chains()[0], self.tokens.device)
            states = StateBatch(*(each.index_select(0, firsts) for each in states))
        batch = _make_batch(layout, self._tensors(row_tensors), indices, others, self._group_of, states)
        return batch, Samples(row_tensors.targets.index_select(0, sampled), drawn)

    def send_padded(self, layout: Layout, size: PaddedSize) -> None:
        """Send the rows of a step, padded to `size`; the header's row count excludes the padding. Every padding row has
        a token as long as there are any, and the last one the rest. The numbers of drafts that the rows ask for follow, then
        with prompts the rows that sample and their last tokens, for `select_samples`, or the chains."""
        real, spare = len(layout.slots), np.zeros(size.rows - len(layout.slots), dtype=np.int64)
        ends = np.minimum(layout.num_tokens + 1 + np.arange(len(spare)), size.tokens)
        ends[-1:] = size.tokens
        columns = [part for column in (layout.slots, layout.starts, layout.write_from) for part in (column, spare)]
        singles = layout.num_single_rows
        parts = [[real, singles, real - singles, 0], layout.query_starts, ends, *columns, layout.drafts, spare]
        if size.has_prompts:
            samples = np.flatnonzero(layout.samples)
            parts += [samples, layout.query_starts[samples + 1] - 1]
        if size.has_chains:
            firsts, starts = layout.chains()
            several, left = int(np.count_nonzero(np.diff(starts) > 1)), size.rows - len(firsts)
            ends = np.minimum(layout.num_tokens + 1 + np.arange(left), size.tokens)
            parts += [[len(firsts), len(firsts) - several, several, 0], starts, ends, firsts, np.zeros(left, np.int64)]
        self._send(parts)

    def compute_padded(self, size: PaddedSize, max_context: int) -> tuple[ForwardBatch, RowTensors]:
        """Return the batch of the rows sent last, with block tables as wide as any step needs. Padding has context 0
        and writes to block 0."""
        rows, tokens, has_prompts, _ = size
        row_tensors, others = self._prepare(rows, tokens, tokens if has_prompts else 1, self._state.offsets.max_blocks)
        batch = ForwardBatch(
            *self._tensors(row_tensors),
            num_single_rows=rows,
            max_single_context=max_context,
            other_groups=others,
            group_of=self._group_of,
            states=self._state_batch(rows),
        )
        if has_prompts:
            batch = replace(
                batch,
                num_single_rows=0,
                query_lens=(tokens, *(0,) * (rows - 1)),
                query_contexts=(max_context,) * rows,
                single_contexts=torch.where(batch.query_starts.diff() == 1, batch.context_lens, 0),
                row_counts=PackedStep(self._packed, rows).row_counts,
            )
        if size.has_chains:
            chains, states = self._padded_chains(rows)
            batch = replace(batch, chains=chains, states=states)
        return batch, row_tensors

    def _padded_chains(self, rows: int) -> tuple[Chains, StateBatch]:
        """Return the chains of the step sent last, and their states. Chains of the padding read and write page 0. All are
        copies, which kernels need for the same reason as in `_state_batch`."""
        packed = PackedStep(self._packed, rows).more(rows, HEADER + 1 + 2 * rows)
        counts, starts, firsts = (part.clone() for part in packed.split((HEADER, rows + 1, rows)))
        is_real, states = torch.arange(rows, device=firsts.device) < counts[0], self._state_batch(rows)
        assert states is not None
        read, write, is_new = (each.index_select(0, firsts) for each in states)
        read, write = (torch.where(is_real[:, None], each, 0) for each in (read, write))
        return Chains(starts, 0, (rows, *(0,) * (rows - 1)), counts), StateBatch(read, write, is_new | ~is_real)

    def select_samples(self, rows: int, num_samples: int, hidden: Tensor, inputs: RowTensors) -> tuple[Samples, Tensor]:
        """Return the inputs of sampling and its hidden states as copies, for the rows that `send_padded` sent last."""
        sampled, last = PackedStep(self._packed, rows).more(rows, 2 * num_samples).long().view(2, num_samples)
        drawn = tuple(tensor.index_select(0, sampled) for tensor in inputs.draw())
        return Samples(inputs.targets.index_select(0, sampled), drawn), hidden.index_select(0, last)

    def before_drafts(self, rows: int, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the slots [rows] of the rows that `send_padded` sent last, the tokens after those at their `positions` [T],
        and how many drafts each row asks for, [rows] int32; 0 for the padding."""
        packed = PackedStep(self._packed, rows)
        tokens = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
        row_of = torch.searchsorted(packed.query_starts[1:], tokens, right=True)
        slots = packed.columns[0]
        following = slots.index_select(0, row_of) * self.width + positions + 1
        return slots, self.tokens.view(-1).index_select(0, following), packed.more(0, rows)

    def _prepare(self, rows: int, tokens: int, longest: int, table_width: int) -> tuple[RowTensors, GroupTensors]:
        """Call `InputOps.prepare` for each attention group; of later groups only the block-related tensors are kept."""
        sizes = rows, tokens, longest, table_width
        first, *rest = self._state.groups
        row_tensors = self._ops.prepare(self._packed, self._state.flat, first, *sizes)
        others = [self._ops.prepare(self._packed, self._state.flat, places, *sizes) for places in rest]
        return row_tensors, tuple((other.kv_cells, other.block_tables) for other in others)

    @property
    def has_states(self) -> bool:
        return self._state.states.shape[2] > 0

    def _state_batch(self, rows: int) -> StateBatch | None:
        """Return the state pages of the block sent last. Padding reads and writes page 0.

        The halves are cloned: for a single row `contiguous` would return a view at any offset, but kernels need tensors
        aligned to 16 bytes."""
        if not self.has_states:
            return None
        packed = PackedStep(self._packed, rows)
        slots, starts, _ = packed.columns
        is_real = torch.arange(rows, device=slots.device) < packed.row_counts[0]
        pages = self._state.states.index_select(0, torch.where(is_real, slots, 0))
        pages = torch.where(is_real[:, None, None], pages, 0)
        read, write = (pages[:, half].clone(memory_format=torch.contiguous_format) for half in range(2))
        return StateBatch(read, write, starts == 0)

    def _tensors(self, inputs: RowTensors) -> BatchTensors:
        starts = PackedStep(self._packed, len(inputs.context_lens)).query_starts
        return inputs.tokens, inputs.positions, inputs.kv_cells, starts, inputs.context_lens, inputs.block_tables

    def _send(self, head: Sequence[np.ndarray | list[int]]) -> None:
        """Send everything in one copy, except for runs that exceed it: those of very long prompts."""
        runs, left = list[tuple[int, np.ndarray]](), self._payload
        for at, values in self._state.take():
            left -= len(values)
            if left < 0:
                self._state.flat[at : at + len(values)].copy_(send(values, self.tokens.device))
            else:
                runs.append((at, values))
        if not head and not runs:
            return
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


Inputs = HostInputs | DeviceInputs


class _Pinned:
    """A block of pinned host memory that a GPU reads asynchronously; it may be rewritten only after `wait`."""

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


def _tensor(array: np.ndarray, dtype: type = np.int64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype))


def _make_batch(
    layout: Layout,
    tensors: BatchTensors,
    output_indices: Tensor | None,
    others: GroupTensors,
    group_of: tuple[int, ...],
    states: StateBatch | None,
) -> ForwardBatch:
    singles, contexts = layout.num_single_rows, layout.context_lens.tolist()
    chains = None
    if states is not None and layout.has_drafts:
        starts = layout.chains()[1]
        counts = np.diff(starts)
        alone = int(np.count_nonzero(counts == 1))
        chains = Chains(send(starts.astype(np.int32), tensors[0].device), alone, tuple(counts[alone:].tolist()))
    return ForwardBatch(
        *tensors,
        output_indices=output_indices,
        num_single_rows=singles,
        query_lens=tuple(layout.counts[singles:].tolist()),
        query_contexts=tuple(contexts[singles:]),
        max_single_context=max(contexts[:singles], default=0),
        other_groups=others,
        group_of=group_of,
        states=states,
        chains=chains,
    )

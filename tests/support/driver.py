"""Turns prompts into Steps by hand, so that executors are tested without the scheduler.

A `Sequence` owns a slot and its blocks. A test decides what each step computes, and so can make chunks of any
size, share blocks, preempt, and mix.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
import numpy as np

from penstock.executor.protocol import Admission, Executor, Pooled, Row, Sampling, Step, StepResult

GREEDY = Sampling(temperature=0.0)
_STEP_IDS = itertools.count(1)  # of all drivers: several may drive one executor, whose steps are in order
Trace = list[tuple[tuple[int, ...], tuple[float, ...]]]  # tokens and their log-probabilities


@dataclass
class Sequence:
    slot: int
    tokens: list[int]
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)  # of the attention groups after the first
    state: list[list[int]] = field(default_factory=list)  # two sets of pages: where the next row reads, and writes
    computed: int = 0  # positions whose keys and values are in the blocks
    sampling: Sampling = GREEDY
    pooling: Pooled | None = None
    adapter: str | None = None
    unsent_blocks: int = 0  # the executor knows the first so many blocks

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]


class Driver:
    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.block_size = executor.info.block_size
        self.free = list(range(1, executor.info.num_blocks))
        self._step_id = 0  # of the last step
        self._next_slot = 0
        self._admissions: list[Admission] = []

    def admit(
        self,
        prompt: list[int],
        sampling: Sampling = GREEDY,
        pooling: Pooled | None = None,
        adapter: str | None = None,
    ) -> Sequence:
        sequence = Sequence(self._next_slot, list(prompt), len(prompt), sampling=sampling, pooling=pooling)
        sequence.adapter = adapter
        self._next_slot += 1
        self._announce(sequence)
        return sequence

    def readmit(self, sequence: Sequence, slot: int | None = None) -> None:
        """Preempt: the blocks go back, the request comes again with what it sampled."""
        # Last in, so that others' stale contents come up soon.
        self.free = [*self.free, *sequence.blocks, *itertools.chain(*sequence.others, *sequence.state)]
        sequence.others, sequence.state = [], []
        sequence.blocks, sequence.computed, sequence.unsent_blocks = [], 0, 0
        sequence.slot = sequence.slot if slot is None else slot
        self._announce(sequence)

    def _announce(self, sequence: Sequence) -> None:
        self._admissions.append(
            Admission(
                slot=sequence.slot,
                request_id=sequence.slot,
                tokens=np.array(sequence.tokens, dtype="<i4").tobytes(),
                num_prompt=sequence.num_prompt,
                sampling=sequence.sampling,
                pooling=sequence.pooling,
                adapter=sequence.adapter,
            )
        )

    def row(self, sequence: Sequence, count: int | None = None, write_from: int = 0, masked: bool = False) -> Row:
        """Return a row of the next `count` positions (None: all); it samples if it reaches the end of the tokens."""
        start = sequence.computed
        count = len(sequence.tokens) - start if count is None else count
        self._extend(sequence, start + count)
        first, sequence.unsent_blocks = sequence.unsent_blocks, len(sequence.blocks)
        sample = start + count == len(sequence.tokens) and sequence.pooling is None
        states_in, states_out = sequence.state or ([], [])
        sequence.state.reverse()
        return Row(
            sequence.slot,
            start,
            count,
            sample,
            first_block=first,
            blocks=tuple(sequence.blocks[first:]),
            write_from=write_from,
            masked=masked,
            groups=tuple((first, tuple(table[first:])) for table in sequence.others),
            states_in=tuple(states_in),
            states_out=tuple(states_out),
        )

    def share(self, owner: Sequence, other: Sequence, num_blocks: int) -> None:
        """Let the other sequence start behind the first blocks of the owner, which both have from now on."""
        self._extend(other, 0)
        tables = zip((owner.blocks, *owner.others), (other.blocks, *other.others), strict=True)
        for given, table in tables:
            table[:] = given[:num_blocks]
        other.computed = num_blocks * self.block_size

    def _extend(self, sequence: Sequence, end: int) -> None:
        """Allocate blocks up to a position. Windows keep all their blocks here."""
        if not sequence.others:
            sequence.others = [[] for group in self.executor.info.groups[1:] if group.kind != "state"]
        pages = self.executor.info.groups[-1].pages
        if pages and not sequence.state:
            sequence.state = [[self.free.pop() for _ in range(pages)] for _ in range(2)]
        for table in (sequence.blocks, *sequence.others):
            while len(table) * self.block_size < end:
                table.append(self.free.pop())

    def step_unchecked(
        self, *parts: tuple[Sequence, Row], masks: Mapping[int, set[int] | None] | None = None
    ) -> StepResult:
        """Run a step. `masks`: the tokens that each masked row may sample; None for a row without a mask."""
        self._step_id = next(_STEP_IDS)
        self.executor.submit(Step(self._step_id, self._admissions, [row for _, row in parts]))
        self._admissions = []
        if masks is not None:
            given = {row: tokens for row, tokens in masks.items() if tokens is not None}
            flags = np.zeros((len(given), -(-self.executor.info.vocab_size // 32) * 32), dtype=bool)
            for place, tokens in enumerate(given.values()):
                flags[place, list(tokens)] = True
            words = np.packbits(flags, axis=1, bitorder="little").view(np.int32)
            self.executor.set_masks(self._step_id, np.array(list(given), np.int32), words)
        return self.executor.collect()

    def step(self, *parts: tuple[Sequence, Row], masks: Mapping[int, set[int] | None] | None = None) -> StepResult:
        result = self.step_unchecked(*parts, masks=masks)
        assert result.step_id == self._step_id and len(result.tokens) == len(parts)
        for (sequence, row), token in zip(parts, result.tokens, strict=True):
            sequence.computed = row.start + row.count
            assert (token >= 0) == row.sample
            if token >= 0:
                sequence.tokens.append(token)
        return result

    def advance(
        self, *sequences: Sequence, chunk: int | None = None, masks: Mapping[int, set[int] | None] | None = None
    ) -> StepResult:
        """Run one step in which every sequence computes up to `chunk` of the positions it has left."""
        parts = []
        for index, sequence in enumerate(sequences):
            left = len(sequence.tokens) - sequence.computed
            masked = masks is not None and index in masks
            row = self.row(sequence, left if chunk is None else min(chunk, left), masked=masked)
            parts.append((sequence, row))
        return self.step(*parts, masks=masks)

    def advance_with_drafts(self, drafts: dict[int, list[int]], *sequences: Sequence) -> list[int]:
        """Run one step in which the sequences at the keys of `drafts` have these; return the gain of each in tokens."""
        rows = [self.row(sequence) for sequence in sequences]
        places: list[list[int]] = [[index] for index in range(len(rows))]
        for index, tokens in drafts.items():
            sequence, first = sequences[index], len(sequences[index].tokens)
            self._extend(sequence, first + len(tokens))
            blocks = tuple(sequence.blocks[rows[index].first_block :])
            sequence.unsent_blocks = len(sequence.blocks)
            groups = tuple(
                (rows[index].first_block, tuple(table[rows[index].first_block :])) for table in sequence.others
            )
            rows[index] = msgspec.structs.replace(
                rows[index], blocks=blocks, first_token=first, tokens=tuple(tokens), groups=groups
            )
            places[index] += range(len(rows), len(rows) + len(tokens))
            rows += [Row(sequence.slot, first + place, 1, True) for place in range(len(tokens))]
        result = self.step_unchecked(*((sequences[0], row) for row in rows))
        gains = []
        for index, (sequence, own) in enumerate(zip(sequences, places, strict=True)):
            sampled, given = [result.tokens[row] for row in own], drafts.get(index, [])
            num_right = next((i for i, (s, d) in enumerate(zip(sampled, given, strict=False)) if s != d), len(given))
            sequence.computed = len(sequence.tokens) + num_right
            sequence.tokens += sampled[: num_right + 1]
            gains.append(num_right + 1)
        return gains

    def one_by_one(self, count: int, prompts: list[list[int]]) -> list[list[int]]:
        """Return `count` tokens for each prompt; each joins a step after the one before."""
        sequences = []
        for prompt in prompts:
            sequences.append(self.admit(prompt))
            self.advance(*sequences, chunk=7)
        return self.generate(*sequences, count=count, chunk=7)

    def trace(self, watched: Sequence, *others: Sequence, count: int, chunk: int | None = None) -> Trace:
        """Step until a request has `count` tokens of output; return the log-probabilities that it was given at each."""
        seen: Trace = []
        while len(watched.output) < count:
            if (found := self.advance(*others, watched, chunk=chunk).logprobs.get(len(others))) is not None:
                seen.append((found.ids, found.values))
        return seen

    def generate(self, *sequences: Sequence, count: int, chunk: int | None = None) -> list[list[int]]:
        """Step until every sequence has `count` tokens of output."""
        while waiting := [s for s in sequences if len(s.output) < count]:
            self.advance(*waiting, chunk=chunk)
        return [s.output[:count] for s in sequences]

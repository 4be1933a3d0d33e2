"""Steps made up ahead of time: requests come and go, their number drifts, and nothing depends on what is sampled.

So the same steps can be played to several executors, and what they sample compared. In some the caller is asked to wait
until nothing is in flight and to look: all requests that ended since the last look are still in their slots then.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.executor.protocol import Admission, ModelInfo, Row, Sampling, Step, Transfers

LOOK_EVERY, COME_EVERY, JUMP_EVERY = 20, 5, 90
ODD = (  # what a draw alone does not do, so that only the first half of such a step is a graph
    Sampling(temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    Sampling(temperature=0.0, frequency_penalty=0.4),
    Sampling(temperature=0.9, seed=6, top_k=50, logprobs=2),
)


class Planned(NamedTuple):
    step: Step
    requests: list[int]  # of each row that samples, in the rows' order
    look: bool


@dataclass
class Live:
    request_id: int
    slot: int
    num_prompt: int
    num_answer: int
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Positions there will be tokens for once all steps so far are over."""
        return max(self.num_prompt, self.computed + 1)

    @property
    def is_over(self) -> bool:
        return self.computed == self.num_prompt + self.num_answer - 1


class Traffic:
    """`slots` and `blocks` of the executor are the traffic's; blocks from `first_reserved` on are not."""

    def __init__(self, info: ModelInfo, slots: int, first_reserved: int, longest: int, seed: int = 0) -> None:
        self._info, self._rng, self._longest = info, random.Random(seed), longest
        self._free_slots, self._free = list(range(slots)), list(range(1, first_reserved))
        self._live: list[Live] = []
        self._over: list[Live] = []  # since the last look
        self.slots: dict[int, tuple[int, int]] = {}  # request → its slot, where its answer begins
        self._most, self._wanted = slots, 1

    def steps(self, count: int, copies: int = 0) -> Iterator[Planned]:
        """`copies`: blocks that every step saves from the reserved ones, and restores into others of them."""
        for index in range(count):
            look = index % LOOK_EVERY == LOOK_EVERY - 1 or index == count - 1
            admissions = self._come(index)
            rows, requests = self._rows()
            yield Planned(Step(index, admissions, rows, self._copies(index, copies)), requests, look)
            if look:
                self._free_slots += [live.slot for live in self._over]
                self._over.clear()

    def _come(self, index: int) -> list[Admission]:
        """Requests come together, so that most steps are of single tokens; how many there should be drifts."""
        if index % JUMP_EVERY == 0:
            self._wanted = self._rng.choice([1, 1, 2, self._most // 2, self._most])
        elif self._rng.random() < 0.3:
            self._wanted = min(self._most, max(1, self._wanted + self._rng.choice([-1, 1])))
        admissions = []
        has_room = index % COME_EVERY == 0 or not self._live
        while has_room and self._free_slots and len(self._live) < self._wanted:
            admissions.append(self._admit(index))
        return admissions

    def _admit(self, index: int) -> Admission:
        rng = self._rng
        num_prompt = rng.randint(1, self._longest // 2)
        live = Live(len(self.slots), self._free_slots.pop(0), num_prompt, rng.randint(2, self._longest // 2))
        self._live.append(live)
        self.slots[live.request_id] = live.slot, num_prompt
        sampling = Sampling(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(2**64), top_k=rng.choice([0, 20]))
        if index // JUMP_EVERY % 4 == 3:
            sampling = rng.choice(ODD)
        tokens = np.array(rng.choices(range(self._info.vocab_size), k=num_prompt), "<i4").tobytes()
        return Admission(
            slot=live.slot, request_id=live.request_id, tokens=tokens, num_prompt=num_prompt, sampling=sampling
        )

    def _rows(self) -> tuple[list[Row], list[int]]:
        """Of as many requests as are wanted, each in its turn; prompts in chunks."""
        rows, requests = [], []
        chosen, self._live = self._live[: self._wanted], self._live[self._wanted :]
        for live in chosen:
            count = min(live.known - live.computed, self._rng.choice([5, self._longest]))
            first = len(live.blocks)
            while len(live.blocks) * self._info.block_size < live.computed + count:
                live.blocks.append(self._free.pop(0))
            sample = live.computed + count == live.known
            rows.append(Row(live.slot, live.computed, count, sample, first, tuple(live.blocks[first:])))
            if sample:
                requests.append(live.request_id)
            live.computed += count
        for live in chosen:
            if live.is_over:  # another may have its blocks with the very next step
                self._free[:0] = live.blocks
                self._over.append(live)
        self._live += [live for live in chosen if not live.is_over]
        return rows, requests

    def _copies(self, index: int, count: int) -> Transfers | None:
        """The first reserved half into host slots; what the step before saved into the other half."""
        if not count:
            return None
        blocks = range(self._info.num_blocks - 2 * count, self._info.num_blocks)
        mine, last = (range(1 + turn * count, 1 + (turn + 1) * count) for turn in (index % 2, 1 - index % 2))
        saves = list(zip(blocks[:count], mine, strict=True))
        restores = list(zip(last, blocks[count:], strict=True)) if index else []
        return Transfers(saves=saves, restores=restores)

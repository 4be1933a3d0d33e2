"""Requests of every kind that come, go and are aborted, as the engine would send them: two steps in flight, blocks that
are handed out again at once, and that are saved to the host and restored from it.

Whatever happens, a request's tokens on the host are those of the device's table, and a greedy one gets what it would
get alone.
"""

import contextlib
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from penstock.executor.protocol import Admission, Row, Sampling, Step, Transfers
from penstock.executor.uniproc import UniprocExecutor

SAMPLINGS = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=2**63 + 5, top_k=20, top_p=0.9),
    Sampling(temperature=0.7, seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    Sampling(temperature=0.0, logprobs=3, frequency_penalty=0.2),
    Sampling(temperature=0.9, seed=6, banned_ids=tuple(range(100)), min_tokens=3, stop_ids=(120, 121)),
    Sampling(temperature=0.0, prompt_logprobs=2, logit_bias=((7, 2.0),)),
]


@dataclass
class Request:
    number: int
    slot: int
    tokens: list[int]  # as far as the host knows them
    num_prompt: int
    num_wanted: int
    sampling: Sampling
    pooling: Literal["last", "mean"] | None = None
    is_masked: bool = False
    is_forced: bool = False  # some of its tokens were given to it
    computed: int = 0  # positions handed to the executor
    num_pending: int = 0  # tokens in flight
    blocks: list[int] = field(default_factory=list)
    num_sent: int = 0  # blocks that the executor knows
    is_over: bool = False
    is_restored_with: int = -1  # the step that brings its first blocks

    @property
    def is_greedy(self) -> bool:
        return self.sampling == SAMPLINGS[0] and self.pooling is None and not (self.is_masked or self.is_forced)

    @property
    def num_ready(self) -> int:
        return len(self.tokens) + self.num_pending


class World:
    def __init__(
        self,
        executor: UniprocExecutor,
        seed: int,
        samplings: list[Sampling] = SAMPLINGS,
        is_mixed: bool = True,
        finishing: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`finishing`: in which a step is finished; another thread does that, where there is one."""
        self._executor, self._samplings, self._is_mixed, self._finishing = executor, samplings, is_mixed, finishing
        self._rng = random.Random(seed)
        info = executor.info
        self._size, self._num_host_slots = info.block_size, info.host_slots
        self._free = list(range(1, info.num_blocks))
        self._free_slots = list(range(executor._runner._inputs.num_slots))
        self._running: list[Request] = []
        self._in_flight: deque[tuple[Step, list[Request]]] = deque()
        self._admissions: list[Admission] = []
        self._prompts = [[self._rng.randrange(160) for _ in range(40)] for _ in range(3)]
        self._host: dict[tuple[int, ...], int] = {}  # tokens up to a block's end → host block
        self._held: dict[int, int] = {}  # blocks that are being saved → the step
        self._let_go: set[int] = set()  # of these, whose request is over
        self._saving: dict[int, tuple[int, ...]] = {}  # host slots on their way to have this content
        self._busy: dict[int, int] = {}  # host slots that a copy uses → the step
        self._step_id = self._num_requests = 0
        self.over: list[Request] = []
        self.num_restored = self.num_saved = self.num_aborted = 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._submit()
            if len(self._in_flight) == 2:
                self._collect()
        while self._in_flight:
            self._collect()
        for request in self._running:
            self._check(request)

    def _submit(self) -> None:
        self._step_id += 1
        self._abort()
        restores = self._admit()
        saves = self._save()
        rows, requests = self._plan()
        transfers = Transfers(saves=saves, restores=restores) if saves or restores else None
        step = Step(self._step_id, self._admissions, rows, transfers)
        self._admissions = []
        self._executor.submit(step)
        masked = [index for index, row in enumerate(rows) if row.masked]
        if masked:
            words = np.full((len(masked), -(-self._executor.info.vocab_size // 32)), 0x0F0F0F0F, np.int32)
            self._executor.set_masks(self._step_id, np.array(masked, np.int32), words)
        self._in_flight.append((step, requests))

    # -- what a step brings --------------------------------------------------------------------------------

    def _abort(self) -> None:
        if self._running and self._rng.random() < 0.08:
            self.num_aborted += 1
            self._end(self._rng.choice(self._running))

    def _admit(self) -> list[tuple[int, int]]:
        if not self._free_slots or self._rng.random() > 0.4:
            return []
        slot = self._free_slots.pop(self._rng.randrange(len(self._free_slots)))
        prompt = self._rng.choice(self._prompts)[: self._rng.randint(2, 40)]
        kind = self._rng.random() if self._is_mixed else 1.0
        request = Request(
            self._num_requests,
            slot,
            list(prompt),
            len(prompt),
            self._rng.randint(1, 25),
            self._rng.choice(self._samplings),
            pooling=None if kind > 0.15 else "mean" if kind > 0.07 else "last",
            is_masked=0.15 < kind < 0.3,
        )
        if request.pooling is not None:
            request.sampling = SAMPLINGS[0]
        self._num_requests += 1
        self._running.append(request)
        self._admissions.append(
            Admission(
                slot=slot,
                request_id=request.number,
                tokens=np.array(prompt, "<i4").tobytes(),
                num_prompt=len(prompt),
                sampling=request.sampling,
                pooling=request.pooling,
            )
        )
        return self._restore(request)

    def _restore(self, request: Request) -> list[tuple[int, int]]:
        """As many leading blocks as the host has; the request's first row comes in the step after."""
        restores: list[tuple[int, int]] = []
        if request.pooling is not None or request.sampling.prompt_logprobs is not None:
            return restores
        for end in range(self._size, request.num_prompt, self._size):
            slot = self._host.get(tuple(request.tokens[:end]), 0)
            if slot == 0:
                break
            restores.append((slot, self._take_block(request)))
            self._busy[slot] = self._step_id
            request.computed, request.is_restored_with = end, self._step_id
        self.num_restored += len(restores)
        return restores

    def _save(self) -> list[tuple[int, int]]:
        """Full blocks, of requests that have handed all their positions to the executor before this step."""
        saves: list[tuple[int, int]] = []
        for request in self._running if self._num_host_slots else []:
            known = min(request.computed, len(request.tokens))
            for index in range(known // self._size):
                key, block = tuple(request.tokens[: (index + 1) * self._size]), request.blocks[index]
                if key in self._host or block in self._held or self._rng.random() < 0.6:
                    continue
                if request.is_restored_with == self._step_id or any(block == held for held, _ in saves):
                    continue
                slot = self._rng.randrange(1, self._num_host_slots)
                if slot not in self._busy:
                    self._host = {k: s for k, s in self._host.items() if s != slot}
                    self._held[block] = self._busy[slot] = self._step_id
                    saves.append((block, slot))
                    self._saving[slot] = key
        self.num_saved += len(saves)
        return saves

    def _plan(self) -> tuple[list[Row], list[Request]]:
        rows: list[Row] = []
        requests: list[Request] = []
        is_single = self._rng.random() < 0.7  # more of these: they are graphs
        for request in self._running:
            left = request.num_ready - request.computed
            if left == 0 or request.is_restored_with == self._step_id or self._rng.random() < 0.15:
                continue
            if (request.is_masked and request.num_pending) or (is_single and left > 1):
                continue
            forced = self._force(request) if left == 1 else ()
            count = self._rng.randint(1, left) + len(forced)
            while len(request.blocks) * self._size < request.computed + count:
                self._take_block(request)
            ends = request.computed + count == request.num_ready
            samples = ends and request.pooling is None
            first, request.num_sent = request.num_sent, len(request.blocks)
            rows.append(
                Row(
                    request.slot,
                    request.computed,
                    count,
                    samples,
                    first_block=first,
                    blocks=tuple(request.blocks[first:]),
                    masked=samples and request.is_masked,
                    first_token=len(request.tokens) - len(forced),
                    tokens=forced,
                )
            )
            requests.append(request)
            request.computed += count
            request.num_pending += samples
        return rows, requests

    def _force(self, request: Request) -> tuple[int, ...]:
        """Tokens that are not sampled, as where a grammar leaves no choice."""
        is_open = request.pooling is None and not request.num_pending and request.computed >= request.num_prompt
        if not is_open or not self._is_mixed or self._rng.random() > 0.1:
            return ()
        request.is_forced = True
        forced = tuple(self._rng.randrange(160) for _ in range(2))
        request.tokens += forced
        return forced

    def _take_block(self, request: Request) -> int:
        request.blocks.append(self._free.pop())
        return request.blocks[-1]

    # -- what comes back -----------------------------------------------------------------------------------

    def _collect(self) -> None:
        step, requests = self._in_flight.popleft()
        with self._finishing():
            result = self._executor.collect()
        assert not result.errors, result.errors
        for index, (row, request, token) in enumerate(zip(step.rows, requests, result.tokens, strict=True)):
            assert (token >= 0) == row.sample
            if request.is_over:
                continue
            if request.pooling is not None:
                if request.computed == request.num_prompt and row.start + row.count == request.num_prompt:
                    assert index in result.embeddings
                    self._end(request)
            elif row.sample:
                assert (index in result.logprobs) == (request.sampling.logprobs is not None)
                request.tokens.append(token)
                request.num_pending -= 1
                if len(request.tokens) - request.num_prompt >= request.num_wanted:
                    self._check(request)
                    self._end(request)
                    self.over.append(request)
        for block, slot in step.transfers.saves if step.transfers else ():
            self._host[self._saving.pop(slot)] = slot
            del self._held[block]
            if block in self._let_go:
                self._let_go.remove(block)
                self._free.append(block)
        self._busy = {slot: number for slot, number in self._busy.items() if number != step.step_id}

    def _check(self, request: Request) -> None:
        """Call it before the slot is another's."""
        table = self._executor._runner._inputs.tokens[request.slot, : len(request.tokens)]
        assert table.cpu().tolist() == request.tokens, f"request {request.number} has other tokens on the device"

    def _end(self, request: Request) -> None:
        request.is_over = True
        self._running.remove(request)
        self._free_slots.append(request.slot)
        for block in reversed(request.blocks):
            (self._let_go.add if block in self._held else self._free.append)(block)

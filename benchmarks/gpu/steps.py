"""Artificial steps sent directly to an executor: every request has its slot and blocks, and nothing is ever freed."""

import time
from collections.abc import Iterator

import numpy as np

from penstock.executor.protocol import Admission, Executor, ExpertUpdate, Row, Sampling, Step

GREEDY = Sampling(temperature=0.0)


class Steps:
    def __init__(self, executor: Executor) -> None:
        self._executor, self._step_id = executor, -1
        self.update: ExpertUpdate | None = None  # the last one that a result contained

    def prefill(self, blocks: np.ndarray, prompts: np.ndarray) -> None:
        """Run whole prompts [requests, tokens] in one step; each has a slot and a row of `blocks`."""
        count = prompts.shape[1]
        self.submit(prompts, [Row(slot, 0, count, True, blocks=tuple(own)) for slot, own in enumerate(blocks.tolist())])
        self.collect()

    def decode(self, rows: int, start: int, count: int) -> Iterator[float]:
        """Run single-token steps of rows that the executor knows, from position `start` on, with the maximum number in
        flight; yield the time at which each was collected."""
        submitted = 0
        for collected in range(count):
            while submitted < count and submitted - collected < self._executor.info.max_in_flight:
                self.submit(None, [Row(slot, start + submitted, 1, True) for slot in range(rows)])
                submitted += 1
            self.collect()
            yield time.perf_counter()

    def submit(self, prompts: np.ndarray | None, rows: list[Row]) -> None:
        """Submit a step. `prompts`: of the requests that this step admits, to the slots from 0 on."""
        admissions = [
            Admission(
                slot=slot,
                request_id=slot,
                tokens=prompt.astype("<i4").tobytes(),
                num_prompt=len(prompt),
                sampling=GREEDY,
            )
            for slot, prompt in enumerate(() if prompts is None else prompts)
        ]
        self._step_id -= 1  # counts down, because the engine's own ids count up
        self._executor.submit(Step(self._step_id, admissions, rows))

    def collect(self) -> None:
        result = self._executor.collect()
        if result.errors:
            raise SystemExit(f"a row failed: {result.errors}")
        self.update = result.experts or self.update

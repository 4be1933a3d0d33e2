"""Measures the host's CPU time per GPU decoding step, in its one thread, with a device that takes no time.

    python benchmarks/bench_host.py [--batches 1 8 32 256] [--steps 2000] [--pairs 5]

Everything from the plan to the outputs is real except the device: the core's loop one step ahead, the scheduler, the
packed copy of the step's inputs, returning the tokens. Replaying a graph does nothing, and the runtime's own calls (a
copy, two graphs, some events) are not included. A step's host time is hidden if it is less than the device's.
"""

import time
from collections import deque
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from gpu.batches import PAGE
from pairs import main, rounded, rounds, table
from tests.support.oracle import OracleExecutor
from tests.support.twins import sampling as sampling_twin
from tests.support.twins import torch_inputs

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.engine_core import EngineCore, settle_garbage
from penstock.engine.messages import Submit
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, Sampling, Step, StepResult
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.inputs import DeviceInputs, PaddedSize
from penstock.executor.step.layout import Layout
from penstock.executor.step.runner import LaunchedStep, ModelRunner

CPU = torch.device("cpu")
VOCAB_SIZE, PROMPT, LENGTH = 1000, 128, 4096
BATCHES = [1, 8, 32, 256]
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, stop_ids=(2,)),
    "drawn": Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1, stop_ids=(2,)),
}


class IdleGraphs:
    """A stand-in for `StepGraphs` that sends a decode step's inputs and computes nothing."""

    def __init__(self, inputs: DeviceInputs, num_slots: int) -> None:
        self._inputs, self._tokens, self._largest = inputs, torch.full((num_slots,), 7), torch.zeros(num_slots)

    def size_for(self, layout: Layout) -> PaddedSize | None:
        rows = len(layout.slots)
        return PaddedSize(rows, rows, False) if layout.num_tokens == rows else None

    def forward(self, size: PaddedSize, layout: Layout, _packed: None) -> None:
        self._inputs.send_padded(layout, size)

    def sample(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[:rows], self._largest[:rows]


class NoModel:
    """A stand-in for the model in prefill steps, which are not measured."""

    experts: tuple[()] = ()

    def forward(self, batch: Any, pages: None) -> torch.Tensor:
        return torch.zeros(len(batch.tokens) if batch.output_indices is None else len(batch.output_indices), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)


class NoDevice:
    def __init__(self, num_slots: int) -> None:
        inputs = DeviceInputs(num_slots, LENGTH, PAGE, 4096, torch_inputs, CPU)
        sampler = Sampler(VOCAB_SIZE, num_slots, CPU, sampling_twin)
        graphs: Any = IdleGraphs(inputs, num_slots)
        model: Any = NoModel()
        pages: Any = None
        self._runner = ModelRunner(model, pages, sampler, inputs, CPU, RankGroup(), graphs=graphs)
        self._in_flight: deque[LaunchedStep] = deque()
        config = ExecutorConfig(
            max_model_len=LENGTH,
            block_size=PAGE,
            kv_cache_bytes=8 * (num_slots * LENGTH + PAGE),
            hf_overrides={"vocab_size": VOCAB_SIZE},
        )
        self.info = msgspec.structs.replace(OracleExecutor(config).info, device="cuda")

    def submit(self, step: Step) -> None:
        self._in_flight.append(self._runner.launch(step))

    def collect(self) -> StepResult:
        return self._runner.finish(self._in_flight.popleft())

    def close(self) -> None:
        self._in_flight.clear()


def started(batch: int, sampling: Sampling) -> EngineCore:
    """Return a core whose requests have completed their prompts."""
    executor: Any = NoDevice(batch)
    config = EngineConfig(executor=ExecutorConfig(max_num_seqs=batch), scheduler=SchedulerConfig(max_num_seqs=batch))
    core = EngineCore(config, executor)
    rng = np.random.default_rng(0)
    for number in range(batch):
        tokens = rng.integers(3, VOCAB_SIZE, PROMPT).astype("<i4").tobytes()
        core.submit(Submit(f"r{number}", tokens, sampling, LENGTH - PROMPT))
    while any(request.num_outputs < 2 for request in core.scheduler.running) or len(core.scheduler.running) < batch:
        core.step()
    settle_garbage()
    return core


def step_us(batch: int, sampling: Sampling, steps: int) -> float:
    core = started(batch, sampling)
    started_s = time.thread_time()
    for _ in range(steps):
        core.step()
    return (time.thread_time() - started_s) / steps * 1e6


def step(batches: list[int] = BATCHES, steps: int = 2000, pairs: int = 5) -> dict[str, Any]:
    if steps > LENGTH - PROMPT - 100:
        raise SystemExit(f"--steps: {steps} given; at most {LENGTH - PROMPT - 100} fit into a request")
    rows: list[dict[str, Any]] = []
    for batch in batches:
        sides = {name: partial(step_us, batch, sampling, steps) for name, sampling in SAMPLINGS.items()}
        for name, runs in rounds(sides, pairs).items():
            median = float(np.median(runs))
            rows.append(
                {"µs a step": f"batch {batch}, {name}", "median": median, "least": min(runs), "most": max(runs)}
            )
    table(rows)
    return {"us": {row["µs a step"]: rounded(row["median"]) for row in rows}}


if __name__ == "__main__":
    main(__doc__, "host", step)

"""What the host does for one decoding step of a GPU: from the plan to the outputs, with a device that takes no time.

Everything is real but the device: the core's loop one step ahead, the scheduler, the packed copy of the step's inputs,
the tokens' way back. Replaying a graph does nothing, and the runtime's own calls (a copy, two graphs, some events) are
not in it. CPU time of the one thread that does it all: a step is hidden where that is less than the device takes.

    python benchmarks/bench_host_step.py [--batches 1 8 32 256] [--steps 2000] [--runs 5] [--profile 256]

A step with prompts is not replayed from a graph: the host launches every kernel of every layer. How long it takes for that
is bench_host_layers.py's subject.
"""

import argparse
import cProfile
import pstats
import statistics
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from pairs import record
from tests.support.twins import sampling as sampling_twin

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.engine_core import EngineCore, settle_garbage
from penstock.engine.messages import Submit
from penstock.executor.kernels import RowTensors, torch_inputs
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, ModelInfo, Sampling, Step, StepResult
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.inputs import DeviceInputs
from penstock.executor.step.layout import Layout
from penstock.executor.step.runner import Launched, ModelRunner

CPU = torch.device("cpu")
VOCAB_SIZE, BLOCK_SIZE, PROMPT, LENGTH = 1000, 16, 128, 4096
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, stop_ids=(2,)),
    "drawn": Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1, stop_ids=(2,)),
}


class IdleGraphs:
    """As `DecodeGraphs`: a step's inputs are sent, and nothing is computed from them."""

    def __init__(self, inputs: DeviceInputs, num_slots: int) -> None:
        self._inputs, self._hidden = inputs, torch.zeros(num_slots, 1)
        self._tokens, self._largest = torch.full((num_slots,), 7), torch.zeros(num_slots)

    def takes(self, layout: Layout) -> bool:
        return layout.num_tokens == len(layout.slots)

    def forward(self, layout: Layout) -> tuple[torch.Tensor, RowTensors | None]:
        self._inputs.send_singles(layout, len(layout.slots))
        return self._hidden, None

    def sample(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tokens[:rows], self._largest[:rows]


class NoModel:
    """For the steps with prompts, which are not measured."""

    def forward(self, batch: Any, pages: None) -> torch.Tensor:
        return torch.zeros(len(batch.tokens) if batch.wanted is None else len(batch.wanted), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)


class NoDevice:
    def __init__(self, num_slots: int) -> None:
        inputs = DeviceInputs(num_slots, LENGTH, BLOCK_SIZE, 4096, torch_inputs, CPU)
        sampler = Sampler(VOCAB_SIZE, num_slots, CPU, sampling_twin)
        graphs: Any = IdleGraphs(inputs, num_slots)
        model: Any = NoModel()
        pages: Any = None
        self._runner = ModelRunner(model, pages, sampler, inputs, CPU, RankGroup(), graphs=graphs)
        self._in_flight: deque[Launched] = deque()
        self.info = ModelInfo(
            architecture="None",
            dtype="none",
            device="cuda",
            vocab_size=VOCAB_SIZE,
            hidden_size=1,
            max_model_len=LENGTH,
            block_size=BLOCK_SIZE,
            num_blocks=num_slots * LENGTH // BLOCK_SIZE + 1,
            block_bytes=0,
            fingerprint=b"none",
            max_in_flight=2,
        )

    def submit(self, step: Step) -> None:
        self._in_flight.append(self._runner.launch(step))

    def collect(self) -> StepResult:
        return self._runner.finish(self._in_flight.popleft())

    def close(self) -> None:
        self._in_flight.clear()


def start(batch: int, sampling: Sampling) -> EngineCore:
    """A core whose requests have their prompts behind them."""
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


def microseconds(batch: int, sampling: Sampling, steps: int) -> float:
    core = start(batch, sampling)
    started_s = time.thread_time()
    for _ in range(steps):
        core.step()
    return (time.thread_time() - started_s) / steps * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 256])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--profile", type=int, metavar="BATCH", help="show where the time of this batch goes, and end")
    args = parser.parse_args()
    if args.steps > LENGTH - PROMPT - 100:
        parser.error(f"--steps: {args.steps} given; at most {LENGTH - PROMPT - 100} fit into a request")
    if args.profile is not None:
        core = start(args.profile, SAMPLINGS["greedy"])
        with cProfile.Profile() as profile:
            for _ in range(args.steps):
                core.step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return
    found: dict[str, dict[str, float]] = {}
    for batch in args.batches:
        found[str(batch)] = {}
        for name, sampling in SAMPLINGS.items():
            runs = [microseconds(batch, sampling, args.steps) for _ in range(args.runs)]
            found[str(batch)][name] = round(statistics.median(runs), 1)
            print(
                f"batch {batch:4}, {name}: {statistics.median(runs):7.1f} µs a step ({min(runs):.1f} to {max(runs):.1f})"
            )
    record("host_step", {"us": found})


if __name__ == "__main__":
    main()

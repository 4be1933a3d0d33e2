"""What the host does for a step of a GPU, with a device that takes no time. CPU time of the one thread that does it all.

    python benchmarks/bench_host.py step   [--batches 1 8 32 256] [--steps 2000] [--pairs 5] [--profile 256]
    python benchmarks/bench_host.py layers [--pairs 15] [--profile 1]

`step`: one decoding step, from the plan to the outputs. Everything is real but the device: the core's loop one step ahead,
the scheduler, the packed copy of the step's inputs, the tokens' way back. Replaying a graph does nothing, and the runtime's
own calls (a copy, two graphs, some events) are not in it. A step is hidden where its time is less than the device takes.

`layers`: a step with prompts, which no graph replays, in 28 layers of Qwen3-0.6B's kind. Everything in `model.forward` is
real but the device (tests/support/idle_gpu.py): torch's allocations, views and products, the launchers' Python, Triton's launcher in C.
The sizes are tiny, which the host does not notice. In turn: launches as they are, and in Triton's own way. The driver's own
part of a launch is not in it, cuBLAS's only as the call of a tiny product.
"""

import dataclasses
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from gpu.batches import PAGE, make_batch
from gpu.shapes import MODELS
from pairs import compare, main, print_profile, rounded, rounds, table
from tests.support import idle_gpu
from tests.support.twins import sampling as sampling_twin

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.engine_core import EngineCore, settle_garbage
from penstock.engine.messages import Submit
from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import RowTensors, linear, torch_inputs
from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import CausalModel, find_architecture
from penstock.executor.models.weights import Weights
from penstock.executor.oracle import OracleExecutor
from penstock.executor.parallel import RankGroup
from penstock.executor.protocol import ExecutorConfig, Sampling, Step, StepResult
from penstock.executor.sampling.sampler import Sampler
from penstock.executor.step.inputs import DeviceInputs
from penstock.executor.step.layout import Layout
from penstock.executor.step.runner import Launched, ModelRunner

CPU = torch.device("cpu")
VOCAB_SIZE, PROMPT, LENGTH = 1000, 128, 4096
BATCHES = [1, 8, 32, 256]
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, stop_ids=(2,)),
    "drawn": Sampling(temperature=0.8, top_p=0.95, top_k=50, seed=1, stop_ids=(2,)),
}
# Small enough for the products to take no longer than a call does.
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512}
LAYER_STEPS = 20
STEP_KINDS = {"prefill": (0, 2), "mixed": (4, 2)}  # rows of one token, and of four


# -- step --------------------------------------------------------------------------------------------------------


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
        inputs = DeviceInputs(num_slots, LENGTH, PAGE, 4096, torch_inputs, CPU)
        sampler = Sampler(VOCAB_SIZE, num_slots, CPU, sampling_twin)
        graphs: Any = IdleGraphs(inputs, num_slots)
        model: Any = NoModel()
        pages: Any = None
        self._runner = ModelRunner(model, pages, sampler, inputs, CPU, RankGroup(), graphs=graphs)
        self._in_flight: deque[Launched] = deque()
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


def step_us(batch: int, sampling: Sampling, steps: int) -> float:
    core = started(batch, sampling)
    started_s = time.thread_time()
    for _ in range(steps):
        core.step()
    return (time.thread_time() - started_s) / steps * 1e6


def step(batches: list[int] = BATCHES, steps: int = 2000, pairs: int = 5, profile: int = 0) -> dict[str, Any] | None:
    if steps > LENGTH - PROMPT - 100:
        raise SystemExit(f"--steps: {steps} given; at most {LENGTH - PROMPT - 100} fit into a request")
    if profile:
        return print_profile(lambda: step_us(profile, SAMPLINGS["greedy"], steps))
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


# -- layers ------------------------------------------------------------------------------------------------------


def built() -> tuple[CausalModel, KvPages]:
    from penstock.executor.kernels.cuda.ops import OPS

    fields = Fields(MODELS["qwen3-0.6b"] | TINY)
    architecture = find_architecture(fields)[1]
    spec = architecture.read_spec(fields)
    weights = Weights(lambda _, shape: torch.zeros(shape), torch.float32, CPU, RankGroup(), lambda _: None, OPS)
    with mock.patch.object(linear, "is_repacked", return_value=False):
        model = architecture.build(spec, weights, OPS, TINY["max_position_embeddings"], CPU)
    kv = torch.zeros(2, model.num_layers, 2, PAGE, model.kv_width)
    return model, [(kv[:, index, 0], kv[:, index, 1]) for index in range(model.num_layers)]


@contextmanager
def tritons_own_way() -> Iterator[None]:
    from penstock.executor.kernels.cuda.dependent import launching
    from penstock.executor.kernels.cuda.launch import Kernel

    def launch(kernel: Kernel, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(kernel._jit[grid], **(launching() if kernel._takes_turns else {}))

    with mock.patch.object(Kernel, "__getitem__", launch):
        yield


@torch.inference_mode()
def forward_ms(model: CausalModel, pages: KvPages, given: ForwardBatch) -> float:
    """The least of some steps: what else runs on the core only adds."""

    def once() -> float:
        started_s = time.thread_time()
        model.forward(given, pages)
        return time.thread_time() - started_s

    return min(once() for _ in range(LAYER_STEPS)) * 1e3


def layers(pairs: int = 15, profile: int = 0) -> dict[str, Any] | None:
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        idle_gpu.install(folder)
        model, pages = built()
        for kind, (singles, prompts) in STEP_KINDS.items():
            given = make_batch([(1, LENGTH)] * singles + [(4, LENGTH)] * prompts, CPU)
            given = dataclasses.replace(given, wanted=torch.zeros(singles + prompts, dtype=torch.int64))
            ours = partial(forward_ms, model, pages, given)

            def theirs(ours: Callable[[], float] = ours) -> float:
                with tritons_own_way():
                    return ours()

            ours()  # compiles
            if profile:
                return print_profile(ours)
            found[kind] = compare(f"{kind} step", {"ours": ours, "Triton's own way": theirs}, pairs, "ms")
    return {"ms": found}


if __name__ == "__main__":
    main(__doc__, "host", step, layers)

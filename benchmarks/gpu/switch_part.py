"""Kernels that are off until a card has compared both ways: models with and without them, steps in turns.

    python -m benchmarks.gpu switch_part '{"device": "cuda", "tiny": false, "dependent": true}'

All sides of a model are open at once in this process, with the same random weights. A line for each kind of step has its
median milliseconds with the switch off and on, and the ratio of both (above 1: faster when on) with its interval. On a CPU
no side has such kernels: all compute the same, and no ratio is reported.
"""

import contextlib
import gc
import statistics
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import torch
from benchmarks import pairs
from benchmarks.gpu.figures import open_device, report, set_launch
from benchmarks.gpu.model_part import Bench, open_model
from benchmarks.gpu.shapes import config_of, model_folder
from tests.support import refusals

from penstock.executor.kernels.stored_formats import BLOCK, Groups
from penstock.executor.kernels.weight import EIGHT_BITS, Weight
from penstock.executor.loading.dummy import DummyWeights

ROUNDS = 8  # from six on, a ratio has an interval
OPTIONS = {"max_num_seqs": 16, "max_num_batched_tokens": 8192, "kv_cache_bytes": 4 << 30}
Switches = dict[str, Any]  # names in executor/kernels/cuda, and their values when on


class RowScales(DummyWeights):
    """Random weights whose projections have FP8 codes and one scale per output."""

    def __call__(self, name: str, shape: tuple[int, ...]) -> Any:
        stored = super().__call__(name, shape)
        return stored if stored.dtype is not EIGHT_BITS else self._coded(stored, shape[1] ** -0.5)

    def _coded(self, codes: torch.Tensor, scale: float) -> Weight:
        return Weight(Groups(8), codes, torch.full((len(codes), 1), scale, dtype=torch.bfloat16))


class FourBits(RowScales):
    """The same with four-bit codes and zeros, in groups."""

    def _coded(self, codes: torch.Tensor, scale: float) -> Weight:
        scales = torch.full((len(codes), max(1, codes.shape[1] // BLOCK)), 0.2 * scale, dtype=torch.float16)
        zeros = torch.full(scales.shape, 8, dtype=torch.uint8)
        return Weight(Groups(4), codes.view(torch.uint8) & 15, scales, zeros)


class Comparison(NamedTuple):
    """A model, the switches that matter for it, and the steps that they change."""

    model: str
    switches: dict[str, Switches]  # by the name of a side
    rows: tuple[int, ...] = ()  # of decoding steps
    prompts: tuple[int, ...] = ()  # tokens of a step
    weights: type[DummyWeights] = DummyWeights
    config: Mapping[str, Any] = MappingProxyType({})  # in place of the model's own settings


# Settings of a model whose projections are codes, and switches that are also on together.
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}}
PLAIN: Switches = {"ops.CudaOps.max_plain_rows": 16}  # FP8 weights take few rows of 16 bits
CODES: Switches = {"few_rows.TAKES_CODES": True}


def main(job: dict[str, Any]) -> None:
    device = open_device(job)
    set_launch(job)
    for comparison in comparisons():
        try:
            compare(comparison, job | {"options": OPTIONS}, has_kernels=device.type == "cuda")
        except Exception as error:  # kernels that fail must not hide the others
            traceback.print_exc()
            problem = f"{type(error).__name__}: {str(error)[:300]}"
            report(f"{comparison.model}, {', '.join(comparison.switches)}", ok=False, problem=problem)
        gc.collect()
        torch.cuda.empty_cache()  # nothing happens without a GPU


def comparisons() -> list[Comparison]:
    return [Comparison(*fields) for fields in refusals.cases(__file__, "switches", **globals())]


def compare(comparison: Comparison, job: dict[str, Any], has_kernels: bool) -> None:
    config = {**config_of(comparison.model, job["tiny"]), **comparison.config}
    weights = mock.patch("penstock.executor.models.load.DummyWeights", comparison.weights)
    with model_folder(config) as folder, weights, contextlib.ExitStack() as opened:
        sides = {}
        for name, switches in {"off": {}, **comparison.switches}.items():
            sides[name] = Side(folder, config, job, switches if has_kernels else {})
            opened.callback(sides[name].executor.close)
        for step, run in steps(comparison, job["tiny"]):
            found = pairs.rounds({name: partial(side.step_ms, run) for name, side in sides.items()}, ROUNDS)
            for name in comparison.switches:
                ratio = pairs.judge(found[name], found["off"], higher_is_better=False)._asdict() if has_kernels else {}
                medians = {"off_ms": statistics.median(found["off"]), "on_ms": statistics.median(found[name])}
                report(f"{comparison.model}, {name}: {step}", "", **medians, **ratio)


def steps(comparison: Comparison, is_tiny: bool) -> Iterator[tuple[str, Callable[[Bench], None]]]:
    context, num_steps = (24, 6) if is_tiny else (1024, 20)
    for rows in comparison.rows[: 1 if is_tiny else None]:
        yield f"decode {rows} at {context}", partial(Bench.decode, batch=rows, context=context, num_steps=num_steps)
    for tokens in (16,) if is_tiny and comparison.prompts else comparison.prompts:
        yield f"prompt of {tokens}", partial(Bench.prefill, rows=1, count=tokens, num_steps=2)


class Side:
    """A model with some switches on: while its executor captures graphs, and in its steps, because long prompts run
    without a graph."""

    def __init__(self, folder: str, config: dict[str, Any], job: dict[str, Any], switches: Switches) -> None:
        self._switches, self._figures = switches, dict[str, float]()
        with switched(switches):
            _, self.executor = open_model(folder, config, job)
            self._bench = Bench(self.executor, config, job, self._note)

    def step_ms(self, run: Callable[[Bench], None]) -> float:
        with switched(self._switches):
            run(self._bench)
        return self._figures["step_ms"]

    def _note(self, _name: str, **figures: float) -> None:
        self._figures = figures


@contextlib.contextmanager
def switched(switches: Switches) -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for name, value in switches.items():
            patches.enter_context(mock.patch(f"penstock.executor.kernels.cuda.{name}", value))
        yield

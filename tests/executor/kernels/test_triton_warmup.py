"""After the start no request compiles or captures anything: every variant of a kernel was launched by the warm-up.

Whole small models call the launchers of the kernels. Nothing is interpreted: a launch is noted and left out, and the twins
compute the numbers, so that there is time for steps of every size.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deploy.compile_kernels import note_variants
from triton.runtime.interpreter import InterpretedFunction

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.executor.kernels import BlockOps, InputOps, Ops, SamplingOps
from penstock.executor.kernels.cuda import adapter_products, step_inputs
from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS, CudaOps
from penstock.executor.kernels.cuda.tiles import sizes
from penstock.executor.models.spec import LatentSpec
from penstock.executor.protocol import ExecutorConfig, Sampling
from penstock.executor.ranks import runner_factory
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_graphs import Recorder, pretend_a_gpu
from tests.support import packed_models, small_models
from tests.support.adapters import Adapter, keep_in_slots
from tests.support.checkpoints import compute_with
from tests.support.draft_models import draft_model
from tests.support.driver import GREEDY, Driver
from tests.support.refusals import cases, hardest
from tests.support.simulation import Simulation, submit
from tests.support.twins import changed, operations, torch_inputs, torch_ops
from tests.support.twins import eight_bits as eight_bits_twin
from tests.support.twins import sampling as sampling_twin
from tests.support.twins.experts import fused_experts
from tests.support.twins.lora import add_lora as lora_twin
from tests.support.variants import forget_variants, variants

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are left out, which only the interpreter can"
)
TWINS = changed(torch_ops, blocks=eight_bits_twin, fused_experts=fused_experts)
ROWS, TOKENS, LONGEST = 20, 256, 256
OPTIONS: dict[str, Any] = dict(cases(__file__, "options of requests"))


@pytest.fixture(autouse=True)
def only_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave every launch out; support/variants.py notes it if it is one of a `kernel`, as all must be."""
    launched: set[str] = set()
    monkeypatch.setattr(InterpretedFunction, "run", lambda function, *_, **__: launched.add(function.fn.__name__))
    forget_variants()
    yield
    assert launched == {variant.kernel for variant in variants()}


def beside(kind: Any, ours: Any, twins: Any) -> Any:
    """Return operations that call ours, and answer with the twins' results."""

    def both(name: str) -> Any:
        launcher, twin = getattr(ours, name), getattr(twins, name)
        if name == "blocks":
            return beside(BlockOps, launcher, twin)
        if not callable(launcher):
            return launcher

        def call(*arguments: Any, **keywords: Any) -> Any:
            launcher(*arguments, **keywords)
            output = twin(*arguments, **keywords)
            # A kernel's outputs are contiguous; a twin may return its argument, which is a view.
            return output.contiguous() if name == "rope_and_store" else output

        return call

    return changed(ours, **{name: both(name) for name in operations(kind)})


def open_on_kernels(
    monkeypatch: pytest.MonkeyPatch, folder: Path, recorder: Recorder, **options: Any
) -> UniprocExecutor:
    """Open a model whose operations, drawing and inputs launch kernels."""
    ops, inputs = beside(Ops, OPS, TWINS), beside(InputOps, step_inputs, torch_inputs)
    sampling = beside(SamplingOps, SAMPLING_OPS, sampling_twin)
    pretend_a_gpu(monkeypatch, lambda: recorder, (32, TOKENS))
    monkeypatch.setattr(runner_factory, "select_input_ops", lambda _: inputs)
    monkeypatch.setattr(runner_factory, "select_sampling_ops", lambda _: sampling)
    compute_with(monkeypatch, ops)
    return UniprocExecutor(ExecutorConfig(model=str(folder), kv_cache_bytes=2**24, block_size=4, **options))


def any_sampling(rng: np.random.Generator) -> Sampling:
    """Return some of the options of a request, each with even odds."""
    every = OPTIONS | {"logprobs": int(rng.integers(-1, 4)), "prompt_logprobs": int(rng.integers(0, 3))}
    some = {name: value for name, value in every.items() if rng.random() < 0.3}
    stops: dict[str, Any] = {"min_tokens": 3, "stop_ids": (7,)} if rng.random() < 0.2 else {}
    return Sampling(temperature=float(rng.choice([0.0, 0.8])), seed=int(rng.integers(99)), **some, **stops)


def run_prompts(executor: UniprocExecutor, lengths: Iterable[int], adapter: str | None = None) -> None:
    """Compute a prompt of each length, and one more token."""
    world = Simulation(executor, SchedulerConfig(max_num_seqs=1, enable_prefix_caching=False))
    for length in lengths:
        world.submit(submit(f"p{length}", [7] * length, min(2, LONGEST - length), adapter=adapter))
        world.run()


def run_traffic(
    executor: UniprocExecutor,
    rng: np.random.Generator,
    num_rows: int,
    adapters: tuple[str | None, ...] = (None,),
    drafts: SpeculativeConfig | None = None,
) -> None:
    """Let requests of every kind come at once and end one by one, then come one by one and share small steps, some behind
    a cached prefix; then run rows with masks."""
    texts = rng.integers(0, 160, (3, LONGEST)).tolist()
    for max_tokens, most_steps in ((executor.info.max_num_batched_tokens, 1), (40, 3)):
        limits: dict[str, Any] = {"max_num_seqs": num_rows, "max_num_batched_tokens": max_tokens}
        world = Simulation(executor, SchedulerConfig(**limits, speculative_config=drafts))
        for number in range(num_rows + 2):
            prompt = texts[rng.integers(3)][: int(rng.choice([1, 2, 5, 40, 180]))]
            options: dict[str, Any] = {"sampling": any_sampling(rng), "adapter": adapters[rng.integers(len(adapters))]}
            if rng.random() < 0.3:
                options |= {"sampling": GREEDY, "pooling": str(rng.choice(["last", "mean"]))}
            world.submit(submit(f"r{number}", prompt, int(rng.integers(1, 8)), **options))
            for _ in range(rng.integers(most_steps)):
                world.step()
        world.run()
    driver = Driver(executor)
    masked = [driver.admit([1, 2, 3], sampling) for sampling in (GREEDY, GREEDY, any_sampling(rng))]
    driver.advance(*masked, masks={0: {3, 4, 8}, 2: {3, 4, 8}})
    driver.advance(*masked, masks={0: {3, 4, 8}})


def in_eight_bits(case: str) -> Path:
    return packed_models.folders(case)[0]


def with_draft_layer(case: str) -> Path:
    return draft_model(case, Path(tempfile.mkdtemp()) / case).path


RECURRENT = ("lfm2", "qwen3.5", "granite4-mamba")
CASES: dict[str, Any] = {
    title: case for title, *case in cases(__file__, "models on kernels", plain=small_models.folder, **globals())
}


# Attention, recurrent layers and a draft layer are fast, and experts below: the slow suite has the rest.
@pytest.mark.parametrize("case", hardest(CASES, "qwen3.5 with drafts"))
def test_no_request_compiles_or_captures_anything(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    folder, name, options = CASES[case]
    lengths = [near for size in sizes(TOKENS - 2) for near in (size - 1, size, size + 1) if near]
    if name in RECURRENT:  # their twins go from token to token, and nothing of theirs is chosen by a size
        lengths = [1, 2, 17, 65]
    monkeypatch.setattr(LatentSpec, "is_expanded", lambda self, count: count > 20)
    if case.endswith("few rows in 16"):
        monkeypatch.setattr(CudaOps, "max_plain_rows", 16)
    monkeypatch.setattr("penstock.executor.kernels.cuda.expert_products.USES_GROUPED_MM", "grouped" in case)
    recorder, enforce_eager = Recorder(), case == "qwen3"
    limits = {"dtype": "bfloat16", "max_num_seqs": ROWS, "max_num_batched_tokens": TOKENS, "max_model_len": LONGEST}
    options = limits | options | {"enforce_eager": enforce_eager}
    executor = open_on_kernels(monkeypatch, folder(name), recorder, **options)
    num_graphs, num_variants = len(recorder.graphs), len(variants())
    assert num_variants and (num_graphs == 0) == enforce_eager
    run_prompts(executor, lengths)
    drafts = SpeculativeConfig(method="mtp") if "draft_tokens" in options else None
    run_traffic(executor, np.random.default_rng(0), ROWS, drafts=drafts)
    assert variants()[num_variants:] == [] and len(recorder.graphs) == num_graphs


@pytest.mark.parametrize("case", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3.5 with drafts"])
def test_the_kernels_that_are_compiled_without_a_gpu_are_those_of_a_start(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    folder, name, options = CASES[case]
    limits: dict[str, Any] = {"dtype": "bfloat16", "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64}
    path, every = folder(name), limits | options
    noted = note_variants(ExecutorConfig(model=str(path), kv_cache_bytes=2**24, block_size=4, **every))
    open_on_kernels(monkeypatch, path, Recorder(), **every)
    launched = {(variant.kernel, *variant[2:], *variant.options.items()) for variant in variants()}
    assert {(variant.kernel.name, *variant[1:3], *variant.options) for variant in noted} == launched


@pytest.mark.parametrize("case", [pytest.param("qwen3", marks=pytest.mark.slow), "qwen3-moe"])
def test_requests_with_adapters_compile_nothing(monkeypatch: pytest.MonkeyPatch, case: str, tmp_path: Path) -> None:
    """With adapters other kernels compute the products that are fused without them."""

    def add(*arguments: Any) -> None:
        adapter_products.add_lora(*arguments)
        lora_twin(*arguments)

    keep_in_slots(monkeypatch)
    monkeypatch.setattr("penstock.executor.kernels.lora._load_kernel", lambda: add)
    limits = {"dtype": "bfloat16", "max_num_seqs": 6, "max_num_batched_tokens": 64, "max_model_len": LONGEST}
    options = limits | {"enforce_eager": True, "enable_lora": True, "max_loras": 2}
    executor = open_on_kernels(monkeypatch, small_models.folder(case), Recorder(), **options)
    warm = variants()
    path = Adapter(case, tmp_path, 0).path
    key = executor.load_adapter(str(path)).key
    run_prompts(executor, (1, 2, 17, 33, 64), key)
    run_traffic(executor, np.random.default_rng(0), 6, (key, None))
    assert {"_inner", "_outer"} <= {variant.kernel for variant in warm}
    assert variants()[len(warm) :] == []

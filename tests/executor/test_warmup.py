"""The steps before the first request: their sizes, their log lines, and that they leave nothing behind but compiled kernels."""

import gc
import inspect
import itertools
import weakref
from typing import Any

import pytest
import torch

from penstock.executor.kernels.cuda import tiles
from penstock.executor.protocol import Sampling
from penstock.executor.ranks.runner_factory import RunnerFactory
from penstock.executor.step.runner import ModelRunner
from penstock.executor.step.warmup import plan_steps
from penstock.executor.uniproc import UniprocExecutor
from tests.executor.test_graphs import PROMPTS, Recorder, pretend_a_gpu
from tests.support.checkpoints import config_of
from tests.support.driver import Driver
from tests.support.refusals import cases


def open_warm(lines: list[str] | None = None, **options: Any) -> UniprocExecutor:
    limits = {"kv_cache_bytes": 2**20, "block_size": 4, "max_num_seqs": 3, **options}
    return UniprocExecutor(config_of("qwen3", **limits), (lines if lines is not None else []).append)


@pytest.mark.parametrize("limits", [(1, 1, 1), (1, 1, 50), (1, 64, 3), (5, 64, 3), (7, 3, 50), (256, 2048, 4096)])
def test_no_step_is_larger_than_one_that_may_come_and_some_are_as_large(limits: tuple[int, int, int]) -> None:
    max_rows, max_tokens, longest = limits
    planned = plan_steps(*limits)
    for parts in planned:
        assert 1 <= len(parts) <= max_rows
        assert sum(part.num_tokens for part in parts) <= max_tokens
        assert all(1 <= part.num_tokens <= part.context <= longest for part in parts)
    assert max(sum(part.num_tokens for part in parts) for parts in planned) == min(max_tokens, max_rows * longest)
    assert max(len(parts) for parts in planned) == min(max_rows, max_tokens)
    assert max(part.context for parts in planned for part in parts) == longest


# The other arguments of the choices of tiles, with values of models that people serve.
VALUES: dict[str, tuple[int, ...]] = dict(cases(__file__, "arguments of tiles"))
SIZES = ("rows", "tokens", "entries", "programs")
LIMITS = (1, 2, 100, 1000, 8192)


@pytest.mark.parametrize("stride", [31, pytest.param(1, marks=pytest.mark.nightly)])
def test_sizes_meet_every_choice_of_tiles(stride: int) -> None:
    """Experts have several entries for a token, and a product several programs for a row.

    With a stride, most sizes above 100 are left out that are not beside a power of two."""
    near = {size + offset for limit in LIMITS for size in tiles.sizes(limit) for offset in (-1, 0, 1)}
    tokens = [count for count in range(1, LIMITS[-1] + 1) if count <= 100 or count % stride == 0 or count in near]
    checked = []
    for name, choice in vars(tiles).items():
        parameters = list(inspect.signature(choice).parameters) if inspect.isfunction(choice) else []
        if not parameters or parameters[0] not in SIZES:
            continue
        checked.append(name)
        for rest in itertools.product(*(VALUES[other] for other in parameters[1:])):
            chosen: dict[int, object] = {}  # by size: most are asked for several times
            for per_row in (1, 2, 4, 6, 8):
                choices: set[object] = set()
                for first, limit in itertools.pairwise((0, *LIMITS)):
                    for count in (count for count in tokens if first < count <= limit):
                        size = per_row * count
                        if size not in chosen:
                            chosen[size] = choice(size, *rest)
                        choices.add(chosen[size])
                    assert {chosen[size * per_row] for size in tiles.sizes(limit)} == choices, (name, rest, per_row)
    assert "expert_tile" in checked and "coded_tile" in checked


def test_nothing_is_left_of_what_was_warmed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the warm-up is the cache's. Graphs are captured with rows that are padding: these write to block 0."""
    pretend_a_gpu(monkeypatch, Recorder)
    opened: list[weakref.ref[ModelRunner]] = []
    open_runner = RunnerFactory.open

    def note(*arguments: Any) -> ModelRunner:
        opened.append(weakref.ref(runner := open_runner(*arguments)))
        return runner

    monkeypatch.setattr(RunnerFactory, "open", note)
    executor = open_warm()
    gc.collect()
    assert [runner() for runner in opened] == [None, executor._rank.runner]
    assert not executor._rank.kv[1:].any()


def test_the_start_logs_its_progress_and_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch, Recorder)
    lines: list[str] = []
    open_warm(lines)
    total = len(plan_steps(3, 2048, 256))
    log = [line for line in lines if "Warm" in line or "raph" in line or "Kernels" in line]
    assert log[0].startswith("Warming up")
    assert log[1].startswith("Warmed up by ") and log[4] == f"Warmed up by {total} of {total} steps"
    assert log[5].startswith("Kernels compiled and run in ") and log[5].endswith(" s")
    assert log[-2] == "Captured the graphs of 3 of 3 sizes of steps"
    assert log[-1].startswith("Graphs captured in ") and log[-1].endswith("; they take 0 MiB")


def test_a_cpu_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.executor.ranks.rank_builder.warm_up", lambda *_: pytest.fail("warmed up"))
    lines: list[str] = []
    assert "activations" not in open_warm(lines).info.memory
    assert not [line for line in lines if "arm" in line or "raph" in line]


def test_a_step_is_as_large_as_the_device_suits_and_has_room_for_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def step_tokens(**options: Any) -> int:
        return open_warm(max_model_len=16, **options).info.max_num_batched_tokens

    assert (step_tokens(), step_tokens(max_num_seqs=3000), step_tokens(max_num_batched_tokens=40)) == (2048, 3000, 40)
    pretend_a_gpu(monkeypatch, Recorder)
    assert step_tokens(enforce_eager=True) == 8192


def test_a_model_whose_logits_are_not_finite_starts_and_fails_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_gpu(monkeypatch, Recorder)
    monkeypatch.setattr(
        "penstock.executor.models.decoder.Decoder.logits",
        lambda self, hidden: torch.full((len(hidden), 160), torch.nan),
    )
    driver = Driver(open_warm())
    sequence = driver.admit(PROMPTS[0], Sampling(temperature=0.8, seed=6, prompt_logprobs=1))
    result = driver.step_unchecked((sequence, driver.row(sequence)))
    assert result.tokens == [-1] and "not finite" in result.errors[0]

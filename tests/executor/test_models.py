"""Models against transformers: the same greedy tokens however a model is stored, computed, shared out and scheduled.

One table. Every small model is computed alone; models.txt adds plain operations, ranks and the scheduler, `stored_rows` the models as
checkpoints store them. Weights that a CPU or a GPU computes with stay codes, others are dequantized when they are loaded;
the memory table of a model says which. The rows that are not the hardest of their kind are slow.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
import torch

from penstock.engine.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.core.drafts import Drafter
from penstock.engine.core.request import Request
from penstock.executor.code_types import has_vectors
from penstock.executor.models.spec import LatentSpec
from penstock.executor.ranks import runner_factory
from tests.executor.test_runner import drafts_of
from tests.support import gguf_files, packed_models, small_models
from tests.support.checkpoints import (
    compute_codes_as_a_gpu,
    compute_with,
    compute_without_vectors,
    config_of,
    executor_of,
    prompts,
    running,
)
from tests.support.coded import FILE_TYPES
from tests.support.driver import Driver
from tests.support.refusals import cases
from tests.support.simulation import Simulation, submit
from tests.support.small_models import CASES, RECURRENT
from tests.support.stored_models import greedy, stored
from tests.support.twins import changed, experts, torch_inputs, torch_ops

CODES, NUMBERS, BYTES = "weights as codes", "coded weights as float32", "FP8 weights as float32"
DIVERSE = ["gemma2", "gemma4", "gemma4-moe", "gpt-oss", "opt", "smollm3", "minimax-m2", "qwen3.5", "nemotron-h"]
DIVERSE += ["nemotron-h-latent", "deepseek-v3", "deepseek-v2-yarn"]
HARDEST = frozenset(Path(__file__).with_name("stored_models_fast.txt").read_text().split())  # by the rows' ids
LINES = [line.partition("#")[0].split() for line in Path(__file__).with_name("models.txt").read_text().splitlines()]


class Row(NamedTuple):
    name: str  # of stored_models.py
    way: str = "cpu"  # or "torch": with plain operations; "gpu", "gpu of experts": with codes, by twins of kernels;
    # "portable": as on a CPU without vector instructions of ours
    num_tokens: int = 24
    ranks: int = 1
    kept: str | None = None  # the entry of the memory table that coded weights are in
    dtype: str = "float32"
    by_experts: bool = False  # which ranks share out whole

    @property
    def is_stored(self) -> bool:
        return self.name not in CASES | RECURRENT

    def __str__(self) -> str:
        return f"{self.name}-{self.way}-{self.ranks if self.way == 'ranks' and not self.is_stored else self.dtype}".replace(
            " ", "-"
        )


def stored_rows() -> Iterator[Row]:
    for name, case in gguf_files.CASES.items():
        if case.kinds is FILE_TYPES:
            yield Row(f"gguf/{name}", "cpu", 16, 1, CODES, "auto")
            yield Row(f"gguf/{name}", "cpu", 16, 1, NUMBERS)
        elif case.kinds:  # scales of the K types are rounded to 16 bits, which after more tokens tips a near tie
            yield Row(f"gguf/{name}", "gpu", 8, 1, CODES)
        else:
            yield Row(f"gguf/{name}", "cpu", 20)
    for name, coded in packed_models.CASES.items():
        kept = NUMBERS if coded.is_ordered else CODES
        yield Row(name, "cpu", 12, 1, *((BYTES, "float32") if "floats" in name else (kept, "auto")))
        yield Row(name, "gpu", 12, 1, kept)
    for name in packed_models.BLOCKS:
        yield Row(f"blocks/{name}", "cpu", 12, 1, BYTES)
    yield from cases(__file__, "stored models", Row=Row, CODES=CODES, NUMBERS=NUMBERS, BYTES=BYTES)


def marked() -> Iterator[Any]:
    rows = [(Row(name), name in DIVERSE) for name in CASES | RECURRENT]
    rows += [(Row(name, way, 16), speed == "fast") for speed, way, name in (line for line in LINES if len(line) == 3)]
    for speed, _, name, ranks, *by_experts in (line for line in LINES if line[1:2] == ["ranks"]):
        rows.append((Row(name, "ranks", 12, int(ranks), by_experts=bool(by_experts)), speed == "fast"))
    assert {str(row) for row in stored_rows()} >= HARDEST
    rows += [(row, str(row) in HARDEST) for row in stored_rows()]
    for row, is_fast in rows:
        if row.kept == CODES and row.way in ("cpu", "ranks") and not has_vectors():
            row = row._replace(kept=NUMBERS)
        yield pytest.param(row, id=str(row), marks=() if is_fast else pytest.mark.slow)


@contextmanager
def opened(row: Row, request: pytest.FixtureRequest) -> Iterator[Any]:
    patch, path = request.getfixturevalue("monkeypatch"), stored(row.name)[0]
    if row.way == "ranks":
        request.getfixturevalue("forked_ranks")
        with running(config_of(path, row.ranks, dtype=row.dtype, enable_expert_parallel=row.by_experts)) as ranks:
            yield ranks
        return
    if row.way == "torch":
        compute_with(patch, torch_ops)
        patch.setattr(LatentSpec, "is_expanded", lambda self, count: count > 4)
    elif row.way == "portable":
        compute_without_vectors(patch)
    elif row.way == "gpu":
        compute_codes_as_a_gpu(patch)
    elif row.way == "gpu of experts":  # its grouped products take the codes of all experts in one tensor
        compute_with(patch, changed(torch_ops, fused_experts=experts.fused_experts))
        patch.setattr("penstock.executor.models.load.kept_codes", lambda *_: "MXFP4")
    executor = executor_of(path, dtype=row.dtype)
    if row.way.startswith("gpu"):
        assert {NUMBERS, BYTES} & executor.info.memory.keys() == {NUMBERS} & {row.kept}
        assert all(layer.is_fused for layer in executor._rank.loaded.model.experts)
    elif row.kept is not None:
        assert executor.info.dtype == "float32"
        assert (CODES in executor.info.memory) == (row.kept == CODES)
    executor._rank.kv.fill_(float("nan"))
    yield executor


# The first and last tokens of the parts that two or four ranks have of a vocabulary of 160.
EDGES = [0, 39, 40, 79, 80, 119, 120, 159]


@pytest.mark.parametrize("row", [*marked()])
def test_tokens_are_those_of_transformers_on_the_same_numbers(row: Row, request: pytest.FixtureRequest) -> None:
    """A prompt by itself; then several that start one after the other, so that chunks, decodes and drafts share steps."""
    recorded = request.getfixturevalue("recorded") if row.way == "cpu" and not row.is_stored else None
    if row.is_stored:
        given = prompts(3, seed=3)
    else:
        given = [EDGES, *prompts(3, seed=3)] if row.way == "ranks" else prompts(1, low=41, high=41) + prompts(6, seed=1)
    with opened(row, request) as executor:
        given = [[token % executor.info.vocab_size for token in prompt] for prompt in given]
        expected = [greedy(row.name, prompt, row.num_tokens) for prompt in given]
        assert {CODES, NUMBERS, BYTES} & executor.info.memory.keys() >= ({row.kept} if row.kept else set())
        assert row.kept is None or max(len(set(tokens)) for tokens in expected) > 3
        driver = Driver(executor)
        assert driver.generate(driver.admit(given[0]), count=row.num_tokens, chunk=7) == expected[:1]
        if recorded is not None:
            ours, (_, logits) = torch.cat(recorded), small_models.greedy(row.name, given[0], row.num_tokens)
            assert (ours - logits).abs().max() <= 1e-4 * logits.abs().max()
        sequences = []
        for prompt in given:
            sequences.append(driver.admit(prompt))
            driver.advance(*reversed(sequences), chunk=5)
        if not executor.info.groups[-1].pages:  # a wrong draft has no way back in a state
            driver.generate(*sequences, count=1, chunk=5)
            known = len(sequences[0].output)
            right = expected[0][known : known + 2]
            driver.advance_with_drafts({0: right, len(sequences) - 1: [1, 2]}, *sequences)
            assert len(sequences[0].output) == known + 3
        assert driver.generate(*sequences, count=row.num_tokens, chunk=5) == expected


COUNT, AMPLE = 24, 300
WAITING = ("olmo3",)  # its requests are admitted only when all pages that they can ever need are free


def scheduled() -> list[Any]:
    rows = [line for line in LINES if line[1:2] == ["scheduled"]]
    found = []
    for speed, _, name, spare, *options in rows:
        marks = () if speed == "fast" else pytest.mark.slow
        found.append(pytest.param(name, int(spare), {*options}, id="-".join([name, spare, *options]), marks=marks))
    return found


@contextmanager
def with_pool(case: str, num_spare: int, ranks: int) -> Iterator[Any]:
    """Open an executor whose pool has this many pages beside those of the longest request."""
    limits = {"block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 12, "max_model_len": 80}
    info = executor_of(case, **limits).info
    num_blocks = 1 + sum(group.most_pages(80, 12, 4) for group in info.groups) + num_spare
    if ranks > 1:
        with running(config_of(case, ranks, **limits, kv_cache_bytes=num_blocks * info.block_bytes)) as executor:
            yield executor
        return
    alone = executor_of(case, **limits, kv_cache_bytes=num_blocks * info.block_bytes)
    alone._rank.kv.fill_(float("nan"))
    yield alone


@pytest.mark.parametrize(("case", "num_spare", "options"), scheduled())
def test_requests_get_transformers_tokens_whatever_happens_to_their_blocks(
    case: str, num_spare: int, options: set[str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Chunked, batched, preempted and cached requests. Stale blocks are NaN at first, then another request's or group's."""
    rng = random.Random(5)
    shared = [rng.randrange(160) for _ in range(40)]
    given = [shared[: rng.choice([8, 21, 36, 40])] + [rng.randrange(160) for _ in range(5)] for _ in range(8)]
    expected = [greedy(case, prompt, COUNT) for prompt in given]

    def guess(_drafter: Drafter, asking: Request, room: int) -> tuple[int, ...]:
        most = max(0, min(room, asking.max_tokens - asking.num_outputs - 1))
        number = int(asking.message.request_id[1:])
        first = asking.num_outputs + (COUNT // 2 if number >= 2 * len(given) else 0)
        return tuple(drafts_of(expected[number % len(given)], first, rng)[:most])

    if "known" in options:
        monkeypatch.setattr(Drafter, "_expected", guess)
        monkeypatch.setattr("penstock.engine.core.drafts.LEAST_TRUST", 3)
    if "device" in options:
        monkeypatch.setattr(runner_factory, "select_input_ops", lambda _: torch_inputs)
    has_drafts = bool(options & {"known", "ngram"})
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=4) if has_drafts else None
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=12, speculative_config=speculation)
    ranks = next((int(each.removeprefix("ranks=")) for each in options if each.startswith("ranks=")), 1)
    if ranks > 1:
        request.getfixturevalue("forked_ranks")
    with with_pool(case, num_spare, ranks) as executor:
        submitted = Mock(side_effect=executor.submit)
        monkeypatch.setattr(executor, "submit", submitted)
        simulation = Simulation(executor, limits)
        for number, prompt in enumerate([*given, *given]):  # the second time much of it is cached
            simulation.submit(submit(f"r{number}", prompt, COUNT))
            if "known" in options and number % 2:  # while requests wait there are no drafts
                simulation.run()
        simulation.run()
        for number, (prompt, tokens) in enumerate(zip(given, expected, strict=True)):  # a conversation goes on
            simulation.submit(submit(f"r{16 + number}", [*prompt, *tokens[: COUNT // 2]], COUNT // 2))
        simulation.run()
    for number, tokens in enumerate([*expected, *expected, *(tokens[COUNT // 2 :] for tokens in expected)]):
        assert simulation.tokens(f"r{number}") == tokens, number
    stats = simulation.scheduler.stats()
    assert stats.prefix_hits > 0 and stats.num_used_blocks == 0
    assert stats.num_preemptions > 0 or has_drafts or case in WAITING
    if num_spare == AMPLE:
        cached = [simulation.num_cached(f"r{number}") for number in range(8, 24)]
        assert sum(cached) >= sum(map(len, given)), cached  # half of what has come for the second time
    if "known" in options:  # states go back behind a wrong draft, and rows compute what was right again
        parts = [part for call in submitted.call_args_list for part in call.args[0].rows]
        assert any(part.tokens and part.count == 1 + len(part.tokens) for part in parts)
        assert stats.accepted_tokens > 5

"""Everything at once over the real executor: each answer is what its request gets alone, without a cache.

A world is a core over a small random model with a pool so tiny that preemption never stops: grammars over tokenizers
of every kind, drafts, log-probabilities, embeddings, penalties, stops, choices, salts, priorities, aborts at any moment,
tiers and resets. A seed is a world, as far as that goes with threads that compile and disks that write. `-m nightly` runs
for PENSTOCK_FUZZ_S seconds (60) from the seed PENSTOCK_FUZZ_SEED (0) on.
"""

import functools
import itertools
import math
import os
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple
from unittest.mock import Mock

import pytest

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.front.answer import Choice, Update, joined
from penstock.engine.front.submit import begin_answer
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.source import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.messages import Output, Submit
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import Executor, ExecutorConfig
from penstock.executors import open_executor
from tests.engine.grammar.test_tokenizer_families import CHOICES, FAMILIES
from tests.support.grammar_rig import FORMS
from tests.support.simulation import Simulation, random_drafts
from tests.support.small_models import SIZES, random_model

VOCAB_SIZE = 400  # more than any of the tokenizers has
MAX_MODEL_LEN, MAX_SEQS = 96, 8
SEED, SECONDS = (int(os.environ.get(f"PENSTOCK_FUZZ_{name}", default)) for name, default in (("SEED", 0), ("S", 60)))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-wide": ("LlamaConfig", {"intermediate_size": 1536}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 11}),
}


@functools.cache
def root() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="penstock-fuzz-")


@functools.cache
def folder(name: str) -> Path:
    kind, fields = MODELS[name]
    path = Path(root().name) / name
    random_model(kind, {**SIZES, "vocab_size": VOCAB_SIZE, **fields}).save_pretrained(path)
    return path


@functools.cache
def tools(family: str) -> tuple[Tokenizer, Compiler]:
    tokenizer = Tokenizer(FAMILIES[family](), eos_ids=frozenset({2}))
    return tokenizer, Compiler(lambda: GrammarVocabulary(tokenizer, VOCAB_SIZE))


@contextmanager
def executors(rng: random.Random, ranks: int) -> Iterator[tuple[ExecutorConfig, Executor]]:
    """Open an executor with as many blocks as the longest request needs, or a few more; with tiers or without."""
    block_size = rng.choice([4, 8])
    num_blocks = MAX_MODEL_LEN // block_size + rng.choice([1, 2, 3, 8])
    block_bytes = 2 * 3 * 2 * 16 * 4 * block_size  # keys and values of three layers with two heads of 16 in float32
    with TemporaryDirectory() as disk:
        tiers: dict[str, Any] = rng.choice(
            [
                {},
                {"kv_host_bytes": 16 * ranks * block_bytes},
                {"kv_host_bytes": 8 * ranks * block_bytes, "kv_disk_path": disk, "kv_disk_bytes": 1 << 21},
            ]
        )
        config = ExecutorConfig(
            model=str(folder(rng.choice(list(MODELS)))),
            dtype="float32",
            device="cpu",
            max_model_len=MAX_MODEL_LEN,
            block_size=block_size,
            kv_cache_bytes=num_blocks * block_bytes // ranks,
            max_num_seqs=MAX_SEQS,
            max_num_batched_tokens=128,
            tensor_parallel_size=ranks,
            **tiers,
        )
        executor = open_executor(config)
        try:
            yield config, executor
        finally:
            executor.close()


class Request(NamedTuple):
    """One choice of a client's request."""

    message: Submit
    params: SamplingParams
    abort_after: int | None = None  # tokens


class World(Simulation):
    """An engine core over a real executor, with the front end's state of each choice, whose stop strings may end it."""

    def __init__(self, executor: Executor, config: ExecutorConfig, family: str, **options: Any) -> None:
        self.tokenizer, compiler = tools(family)
        scheduler = SchedulerConfig(**{"max_num_seqs": MAX_SEQS, "max_num_batched_tokens": 128, **options})
        super().__init__(executor, scheduler)
        self.core = EngineCore(EngineConfig(executor=config, scheduler=scheduler), executor, compiler)
        self.scheduler = self.core.scheduler
        self._requests: dict[str, Request] = {}
        self._choices: dict[str, Choice] = {}
        self._updates: dict[str, list[Update]] = {}

    def admit(self, request: Request) -> None:
        name = request.message.request_id
        self._requests[name], self._updates[name] = request, []
        stream = None if request.message.pooling else self.tokenizer.stream(True, False)
        self._choices[name] = Choice(0, request.params, stream)
        self.outputs[name] = []
        self.core.submit(request.message)

    def abort(self, name: str) -> None:
        self.keep(self.core.abort(name))

    def step(self, check: bool = True) -> None:
        self.keep(*self.core.step())
        self.scheduler.check()

    def run(self, check: bool = True, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.core.has_work():
                break
            self.step()
        assert not self.core.has_work(), "requests that never end"
        self.core.settle()
        pool = self.scheduler.pool
        assert self.core.is_settled and pool.num_free == pool.num_usable, "something is left behind"
        self.scheduler.check()

    def answer(self, name: str) -> Update | None:
        return joined(self._updates[name]) if self._updates[name] else None

    def first(self, name: str, field: str) -> Any:
        return next((value for output in self.outputs[name] if (value := getattr(output, field)) is not None), None)

    def keep(self, *outputs: Output | None) -> None:
        for output in filter(None, outputs):
            super().keep(output)
            name = output.request_id
            choice, limit = self._choices[name], self._requests[name].abort_after
            self._updates[name].append(choice.push(output))
            is_enough = limit is not None and len(self.tokens(name)) >= limit
            if (not choice.is_running or is_enough) and self.end(name) is None:
                self.abort(name)


def random_params(rng: random.Random, tokenizer: Tokenizer) -> SamplingParams:
    def ids(count: int) -> list[int]:
        return rng.sample(range(VOCAB_SIZE), count)

    options: dict[str, Any] = {"seed": rng.randrange(2**64), "max_tokens": rng.choice([1, 8, 40, 40, None])}
    options["temperature"] = rng.choice([0.0, 0.0, 0.3, 0.8, 1.5])
    few = ids(rng.choice([1, 2, 3]))
    for share, fields in (
        (0.3, {"top_p": rng.choice([0.3, 0.9])}),
        (0.2, {"top_k": rng.choice([1, 3, 200])}),
        (0.2, {"min_p": 0.05}),
        (0.2, {"repetition_penalty": rng.choice([0.7, 1.3])}),
        (0.2, {"frequency_penalty": 0.7, "presence_penalty": -0.4}),
        (0.2, {"logit_bias": {token: rng.uniform(-9, 9) for token in ids(5)}}),
        (0.2, {"allowed_token_ids": few}),  # they repeat, and drafts are right
        (0.2, {"banned_token_ids": ids(rng.choice([1, 300]))}),
        (0.3, {"stop_token_ids": few if rng.random() < 0.3 else ids(20)}),
        (0.2, {"min_tokens": min(rng.choice([1, 5, 30]), options["max_tokens"] or 30)}),
        (0.2, {"stop": [rng.choice(["e", " t", "\n", "hello"])], "include_stop_str_in_output": rng.random() < 0.5}),
        (0.2, {"logprobs": rng.choice([0, 3, 20])}),
        (0.15, {"prompt_logprobs": rng.choice([0, 2])}),
        (0.2, {"ignore_eos": True}),
        (0.2, {"n": rng.randint(2, 4)}),
        (0.35, {"structured_outputs": rng.choice([*(form for form, _ in FORMS), *map(choices, CHOICES)])}),
    ):
        if rng.random() < share:
            options |= fields
    params = SamplingParams(**options)
    params.check(VOCAB_SIZE)
    return params


def choices(texts: list[str]) -> StructuredOutputs:
    return StructuredOutputs(choice=texts)


def random_request(rng: random.Random, number: int, world: World) -> list[Request]:
    shared = random.Random(rng.randrange(3)).choices(range(VOCAB_SIZE), k=MAX_MODEL_LEN)
    length = rng.choice(
        [rng.randint(1, 9), rng.randint(1, 30), 8 * rng.randint(1, 4), rng.randint(1, MAX_MODEL_LEN - 1)]
    )
    keep = rng.choice([0, length, rng.randint(0, length)])
    prompt = shared[:keep] + rng.choices(range(VOCAB_SIZE), k=length - keep)
    if rng.random() < 0.3:  # a text that repeats itself
        prompt = (prompt[: rng.randint(1, 5)] * length)[:length]
    params = random_params(rng, world.tokenizer)
    pooling: Literal["last", "mean"] | None = rng.choice([None] * 8 + ["last", "mean"])
    if pooling is not None:
        params = SamplingParams()
    grammar = None if params.structured_outputs is None else grammar_source(params.structured_outputs)
    answer = begin_answer(
        f"r{number}",
        prompt,
        params,
        world.core.info,
        world.tokenizer,
        Mock(),
        priority=rng.choice([0, 0, 1, -1]),
        cache_salt=rng.choice([None, None, "a"]),
        pooling=pooling,
        grammar=grammar,
    )
    return [Request(message, params, rng.choice([None, None, None, rng.randint(0, 9)])) for message in answer.messages]


def live(rng: random.Random, config: ExecutorConfig, executor: Executor, counts: Counter[str], where: str) -> None:
    """Run one world from its first request to its last, then each request alone."""
    family = rng.choice(list(FAMILIES))
    world = World(
        executor,
        config,
        family,
        max_num_seqs=rng.choice([2, MAX_SEQS]),
        max_num_batched_tokens=rng.choice([8, 24, 128]),
        enable_prefix_caching=rng.random() < 0.9,
        patience_s=rng.choice([0.01, 30.0]),
        speculative_config=random_drafts(rng) if rng.random() < 0.6 else None,
    )
    requests: dict[str, Request] = {}
    for number in range(rng.randint(5, 20)):
        for request in random_request(rng, number, world):
            requests[request.message.request_id] = request
            world.admit(request)
        for _ in range(rng.choice([0, 0, 1, 3, 10])):
            world.step()
        if rng.random() < 0.2:
            world.abort(rng.choice(list(requests)))
        if rng.random() < 0.05:
            world.core.reset_prefix_cache()
    world.run()
    counts["preemptions"] += world.core.stats().num_preemptions
    counts["hits"] += world.core.stats().prefix_hits
    counts["drafts"] += world.core.stats().accepted_tokens
    counts["forced"] += world.core.stats().forced_tokens
    if rng.random() < 0.5:
        assert world.core.reset_prefix_cache()
    single = World(executor, config, family, enable_prefix_caching=False)
    for name, request in requests.items():
        single.admit(request._replace(abort_after=None))
        single.run()
        compare(name, world, single, f"{where}, {name}: {request.params}")
        counts[str(world.end(name))] += 1


def compare(name: str, world: World, single: World, where: str) -> None:
    got, whole, end, expected_end = world.tokens(name), single.tokens(name), world.last(name), single.last(name)
    if end.finish_reason == "abort":
        if expected_end.finish_reason != "abort":
            assert got == whole[: len(got)], where
        elif min(len(got), len(whole)):  # a stop string: how far the core came meanwhile does not matter
            assert all(a == b for a, b in zip(got, whole, strict=False)), where
    else:
        assert got == whole or expected_end.finish_reason == "abort", where
        if expected_end.finish_reason != "abort":
            fields = ("finish_reason", "stop_token", "error", "embedding", "is_refusal")
            assert [getattr(end, field) for field in fields] == [getattr(expected_end, field) for field in fields], (
                where
            )
        assert world.answer(name) == single.answer(name), where
    if got:
        assert world.first(name, "prompt_logprobs") == single.first(name, "prompt_logprobs"), where
    logprobs, expected_logprobs = (
        [entry for output in each.outputs[name] for entry in output.logprobs or ()] for each in (world, single)
    )
    assert logprobs == expected_logprobs[: len(logprobs)] or len(logprobs) > len(expected_logprobs), where


def fuzz(ranks: int, seeds: Iterable[int], lives: int, seconds: float = math.inf) -> Counter[str]:
    """Run some `lives`, worlds over one executor one after the other; each finds there what the one before has left."""
    counts: Counter[str] = Counter()
    ends_s = time.monotonic() + seconds
    for seed in seeds:
        with executors(random.Random(seed), ranks) as (config, executor):
            for life in range(lives):
                live(random.Random(f"{seed} {life}"), config, executor, counts, f"seed {seed}, life {life}")
                counts["worlds"] += 1
                if time.monotonic() > ends_s:
                    return counts
    return counts


def test_a_few_mixed_requests_are_answered_as_alone() -> None:
    counts = fuzz(1, [0], lives=2)
    assert counts["stop"] and counts["length"]


@pytest.mark.nightly
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_mixed_request_is_answered_as_alone(ranks: int) -> None:
    counts = fuzz(ranks, itertools.count(SEED), lives=6 * ranks, seconds=SECONDS / 2)
    print(dict(counts))
    assert counts["stop"] and counts["length"]

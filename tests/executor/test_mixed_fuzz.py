"""Random requests of every kind at once over a real model: each answer is what its request gets alone, without a cache.

The pool of blocks is so tiny that preemption never stops. Requests have grammars over tokenizers of every kind, stop
strings, log-probabilities, penalties, choices and salts; the engine has drafts, tiers and resets. A seed draws an engine
and its requests. `-m nightly` runs for PENSTOCK_FUZZ_S seconds (60, at most 6000) from the seed PENSTOCK_FUZZ_SEED (2) on.
"""

import functools
import itertools
import os
import random
import time
from collections import Counter
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest

from penstock import LLM, RequestsFailed
from penstock.engine.front.submit import Pooling
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from tests.engine.grammar.test_schema import CHOICES
from tests.support.grammar_rig import FORMS
from tests.support.refusals import cases
from tests.support.simulation import random_drafts
from tests.support.small_models import SIZES, place_for, random_model
from tests.support.text_samples import FAMILIES

VOCAB_SIZE = 400  # more than any of the tokenizers has
MAX_MODEL_LEN, MAX_SEQS = 96, 8
SEED, SECONDS = (int(os.environ.get(f"PENSTOCK_FUZZ_{name}", default)) for name, default in (("SEED", 2), ("S", 60)))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-wide": ("LlamaConfig", {"intermediate_size": 1536}),
    "mistral-sliding": ("MistralConfig", {"sliding_window": 11}),
}
GRAMMARS = [*(form for form, _ in FORMS), *(StructuredOutputs(choice=texts) for texts in CHOICES)]
COUNTED = ("num_preemptions", "prefix_hits", "accepted_tokens", "forced_tokens")


@functools.cache
def folder(name: str, family: str) -> str:
    kind, fields = MODELS[name]
    path = place_for(f"fuzz {name} {family}")
    random_model(kind, {**SIZES, "vocab_size": VOCAB_SIZE, **fields}).save_pretrained(path)
    FAMILIES[family]().save(str(path / "tokenizer.json"))
    return str(path)


def crowded(rng: random.Random, ranks: int, disk: str) -> dict[str, Any]:
    """Return options with as many blocks as the longest request needs, or a few more; with tiers or without."""
    block_size = rng.choice([4, 8])
    num_blocks = MAX_MODEL_LEN // block_size + rng.choice([1, 2, 3, 8])
    block_bytes = 2 * 3 * 2 * 16 * 4 * block_size  # keys and values of three layers with two heads of 16 in float32
    tiers: dict[str, Any] = rng.choice(
        [
            {},
            {"kv_host_bytes": 16 * ranks * block_bytes},
            {"kv_host_bytes": 8 * ranks * block_bytes, "kv_disk_path": disk, "kv_disk_bytes": 1 << 21},
        ]
    )
    return {
        "block_size": block_size,
        "kv_cache_bytes": num_blocks * block_bytes // ranks,
        "max_num_seqs": rng.choice([2, MAX_SEQS]),
        "max_num_batched_tokens": rng.choice([8, 24, 128]),
        "enable_prefix_caching": bool(tiers) or rng.random() < 0.9,
        "patience_s": rng.choice([0.01, 30.0]),
        "speculative_config": msgspec.to_builtins(random_drafts(rng, False)) if rng.random() < 0.6 else None,
        **tiers,
    }


def random_params(rng: random.Random) -> SamplingParams:
    def ids(count: int) -> list[int]:
        return rng.sample(range(VOCAB_SIZE), count)

    options: dict[str, Any] = {"seed": rng.randrange(2**64), "max_tokens": rng.choice([1, 8, 40, 40, None])}
    options["temperature"] = rng.choice([0.0, 0.0, 0.3, 0.8, 1.5])
    few, most = ids(rng.choice([1, 2, 3])), options["max_tokens"]
    for share, fields in cases(__file__, "shares of options", **globals(), rng=rng, ids=ids, few=few, most=most):
        if rng.random() < share:
            options |= fields
    return SamplingParams(**options)


def random_prompt(rng: random.Random) -> dict[str, Any]:
    shared = random.Random(rng.randrange(3)).choices(range(VOCAB_SIZE), k=MAX_MODEL_LEN)
    length = rng.choice(
        [rng.randint(1, 9), rng.randint(1, 30), 8 * rng.randint(1, 4), rng.randint(1, MAX_MODEL_LEN - 1)]
    )
    keep = rng.choice([0, length, rng.randint(0, length)])
    prompt = shared[:keep] + rng.choices(range(VOCAB_SIZE), k=length - keep)
    if rng.random() < 0.3:  # a text that repeats itself
        prompt = (prompt[: rng.randint(1, 5)] * length)[:length]
    return {"prompt_token_ids": prompt, "cache_salt": rng.choice([None, None, "a"])}


def answers(llm: LLM, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> list[Any]:
    """Return the choices of each request and the log-probabilities of its prompt, or the error that ended it."""
    try:
        results, errors = llm.generate(prompts, params, use_tqdm=False), [None] * len(prompts)
    except RequestsFailed as failed:
        results, errors = failed.results, failed.errors  # type: ignore[assignment]
    pairs = zip(results, errors, strict=True)
    return [error or (result.outputs, result.prompt_logprobs) for result, error in pairs]


def run_engine(seed: int, ranks: int) -> Counter[str]:
    """Run some calls of one engine, and each request once more alone; every call finds what the one before has left."""
    rng, counts = random.Random(seed), Counter[str]()
    path = folder(rng.choice(list(MODELS)), rng.choice(list(FAMILIES)))
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": MAX_MODEL_LEN}
    options["tensor_parallel_size"] = ranks
    with (
        TemporaryDirectory() as disk,
        LLM(path, **options, **crowded(rng, ranks, disk)) as llm,
        LLM(path, **options, kv_cache_bytes=2**20, enable_prefix_caching=False) as single,
    ):
        for call in range(rng.randint(2, 4)):
            prompts = [random_prompt(rng) for _ in range(rng.randint(5, 12))]
            params = [random_params(rng) for _ in prompts]
            for got, prompt, each in zip(answers(llm, prompts, params), prompts, params, strict=True):
                assert [got] == answers(single, [prompt], [each]), f"seed {seed}, call {call}: {prompt}, {each}"
                counts.update(["error"] if isinstance(got, str) else [choice.finish_reason for choice in got[0]])
            pooling: Pooling = rng.choice(["last", "mean"])
            embeddings = llm.embed(prompts, pooling, use_tqdm=False)
            for embedding, prompt in zip(embeddings, prompts, strict=True):
                assert [embedding.outputs] == [each.outputs for each in single.embed(prompt, pooling, use_tqdm=False)]
            assert rng.random() < 0.5 or llm.reset_prefix_cache()
        metrics = llm.get_metrics()
    return counts + Counter({name: int(metrics[name]) for name in COUNTED} | {"engines": 1})


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("ranks", [0, *(pytest.param(ranks, marks=pytest.mark.nightly) for ranks in (1, 2))])
def test_mixed_requests_are_answered_as_alone(ranks: int) -> None:
    """One engine; and by night as many as there is time for, of one rank and of two."""
    counts, ends_s = run_engine(SEED, max(1, ranks)), time.monotonic() + SECONDS / 2
    assert counts["stop"] and counts["length"]
    for seed in itertools.count(SEED + 1):
        if ranks == 0 or time.monotonic() > ends_s:
            break
        counts += run_engine(seed, ranks)
    print(dict(counts))
    assert ranks == 0 or all(counts[name] for name in COUNTED)

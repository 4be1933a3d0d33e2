"""Answers that follow a grammar or repeat themselves: what the ways to them gain and cost, as ratios of one table.

    python benchmarks/bench_answers.py masks       [--pairs 6] [--requests 256] [--output-len 24]
    python benchmarks/bench_answers.py structured  [--pairs 6] [--requests 32] [--output-len 128]
    python benchmarks/bench_answers.py jump        [--pairs 6] [--batches 1 8 32]
    python benchmarks/bench_answers.py drafts      [--pairs 6] [--batches 1 8 32]

`masks`: two ranks, a model of one layer over a vocabulary of 152,064, every answer after a regular expression; masks out
of band in the ring beside masks inside the pickle. `structured`: a server on the default model under `penstock bench
serve`, 80 % of the requests after a JSON schema beside none, at the same length; within 5 % is the aim. `jump`: the
default model after a schema, jumping over what the grammar forces beside sampling it. `drafts`: it copies, summarises
and writes stories, with drafts and without. The answers of both sides must be the same, but for `structured`.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from pairs import compare, main, serving

from penstock import LLM, SamplingParams
from penstock.engine.commands.bench import serving as load
from penstock.engine.core.drafts import Drafter
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.ring.queue import MessageQueue

NEVER = 1 << 40
BATCHES = [1, 8, 32]
WIDE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 152064,
    "tie_word_embeddings": True,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "population_estimate": {"type": "integer", "minimum": 0, "maximum": 99999},
        "is_capital_city": {"type": "boolean"},
        "continent": {"enum": ["Africa", "Antarctica", "Asia", "Europe", "North America"]},
        "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}, "maxItems": 3},
    },
    "required": ["first_name", "population_estimate", "is_capital_city", "continent", "tags"],
    "additionalProperties": False,
}
TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
QUESTIONS = {
    "copy": "Repeat this text word for word:\n\n{text}",
    "summarise": "{text}\n\nSummarise this text in its own words.",
    "story": "Write a story about the number {number}.",
}
Asked = list[tuple[str, SamplingParams]]
Answers = list[list[int]]


class Timed:
    """Seconds of a call that answers; that all its answers are the same."""

    def __init__(self, call: Callable[..., Answers]) -> None:
        self._call = call
        self.answers: Answers | None = None

    def __call__(self, *given: Any) -> float:
        started_s = time.perf_counter()
        answers = self._call(*given)
        elapsed_s = time.perf_counter() - started_s
        assert self.answers in (None, answers), "an answer has changed"
        self.answers = answers
        return elapsed_s


def ids(results: list[Any]) -> Answers:
    return [result.outputs[0].token_ids for result in results]


# -- masks -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def two_ranks(requests: int, **ring: int) -> Iterator[LLM]:
    options = {"max_model_len": 256, "max_num_seqs": requests, "kv_cache_bytes": 2**26, "hf_overrides": WIDE}
    with mock.patch.object(MessageQueue, "create", partial(MessageQueue.create, **ring)):
        llm = LLM(device="cpu", executor="multiproc", tensor_parallel_size=2, load_format="dummy", **options)  # type: ignore[arg-type]
    with llm:
        yield llm


def masks(pairs: int = 6, requests: int = 256, output_len: int = 24) -> dict[str, Any]:
    options = {
        "max_tokens": output_len,
        "ignore_eos": True,
        "structured_outputs": StructuredOutputs(regex="([a-z]+ )*"),
    }
    params = [SamplingParams(temperature=1.0, seed=seed, **options) for seed in range(requests)]  # type: ignore[arg-type]
    run = Timed(lambda llm: ids(llm.generate(["once"] * requests, params, use_tqdm=False)))
    with two_ranks(requests) as after, two_ranks(requests, out_of_band_bytes=NEVER) as before:
        run(after), run(before)
        sides = {"out of band": lambda: requests / run(after), "in the pickle": lambda: requests / run(before)}
        return {"requests": compare("constrained answers from two ranks", sides, pairs, "requests/s")}


# -- structured --------------------------------------------------------------------------------------------------


def structured(pairs: int = 6, requests: int = 32, output_len: int = 128) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    load.add_arguments(parser)

    def rate(port: int, share: float) -> float:
        words = f"--base-url http://127.0.0.1:{port} --num-prompts {requests} --num-warmups 16 --max-concurrency 16"
        words += f" --random-input-len 64 --random-output-len {output_len} --structured-ratio {share} --temperature 1"
        result = asyncio.run(load.measure(parser.parse_args([*words.split(), "--disable-tqdm"])))
        assert result["failed"] == 0 and result["total_output_tokens"] == requests * output_len
        return float(result["output_throughput"])

    command = (sys.executable, "-m", "penstock.cli", "serve", "--port", "0", "--executor", "uniproc")
    with serving(*command) as (port, _):
        sides = {"structured": lambda: rate(port, 0.8), "free": lambda: rate(port, 0.0)}
        return {"tokens": compare("80 % structured beside none", sides, pairs, "tokens/s")}


# -- jump and drafts: the default model with a method of its core and without --------------------------------------


def jump(pairs: int = 6, batches: list[int] = BATCHES) -> dict[str, Any]:
    options = {"temperature": 0.8, "max_tokens": 200, "structured_outputs": StructuredOutputs(json=SCHEMA)}

    def asked(batch: int) -> Asked:
        return [("Describe a city as JSON.", SamplingParams(seed=seed, **options)) for seed in range(batch)]  # type: ignore[arg-type]

    without: Any = mock.patch.object(Matcher, "forced", lambda self: [])
    work = {f"after a schema, batch {batch}": asked(batch) for batch in batches}
    return with_and_without("jumping", work, pairs, without)


def drafts(pairs: int = 6, batches: list[int] = BATCHES, drafts: int = 4) -> dict[str, Any]:
    paragraphs = [part.replace("\n", " ") for part in TEXT.read_text().split("\n\n") if 300 < len(part) < 900]

    def asked(kind: str, batch: int) -> Asked:
        found = []
        for number in range(batch):
            text = QUESTIONS[kind].format(text=paragraphs[number % len(paragraphs)], number=number)
            temperature = 1.0 if kind == "story" else 0.0
            found.append((text, SamplingParams(temperature=temperature, seed=number, max_tokens=160)))
        return found

    without = mock.patch.object(Drafter, "look", lambda *_: None)
    work = {f"{kind}, batch {batch}": asked(kind, batch) for kind in QUESTIONS for batch in batches}
    speculative = {"method": "ngram", "num_speculative_tokens": drafts}
    return with_and_without("drafts", work, pairs, without, speculative_config=speculative)


def with_and_without(what: str, work: dict[str, Asked], pairs: int, without: Any, **options: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=128, **options) as llm:
        for name, asked in work.items():
            messages = [[{"role": "user", "content": question}] for question, _ in asked]
            params = [each for _, each in asked]
            run = Timed(lambda m=messages, p=params: ids(llm.chat(m, p, use_tqdm=False)))

            def bare(run: Timed = run) -> float:
                with without:
                    return run()

            before = counters(llm)
            run()
            sent = {key: value - before[key] for key, value in counters(llm).items()}
            found = compare(name, {f"with {what}": run, "without": bare}, pairs, "s")
            assert run.answers is not None
            figures[name] = found | {"tokens": sum(map(len, run.answers))} | sent
            print(f"  {figures[name]['tokens']} tokens; {sent}", flush=True)
    return figures


def counters(llm: LLM) -> dict[str, int]:
    stats = llm.get_metrics()
    return {name: int(stats[name]) for name in ("forced_tokens", "draft_tokens", "accepted_tokens")}


if __name__ == "__main__":
    main(__doc__, "answers", masks, structured, jump, drafts)

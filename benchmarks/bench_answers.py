"""Measures what jumping over forced tokens and drafts gain on the default model or another, as ratios.

    python benchmarks/bench_answers.py jump        [--pairs 6] [--batches 1 8 32]
    python benchmarks/bench_answers.py drafts      [--pairs 6] [--batches 1 8 32] [--method mtp --model MODEL --drafts 2]

`jump`: answers that follow a JSON schema, with tokens forced by the grammar added at once, compared with sampling all.
`drafts`: the model copies, summarises and writes stories, with and without drafts. Both sides must give equal answers.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from pairs import compare, main

from penstock import LLM, SamplingParams
from penstock.engine.core.drafts import Drafter
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.sampling_params import StructuredOutputs

BATCHES = [1, 8, 32]
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
# A test enters them, because a renamed method is noticed only then.
WITHOUT_JUMPING: Any = mock.patch.object(Matcher, "forced", lambda self: [])
WITHOUT_DRAFTS: Any = mock.patch.multiple(Drafter, choose_drafts=lambda *_: None, _ask=lambda *_: None)
Asked = list[tuple[str, SamplingParams]]
Answers = list[list[int]]


def ids(results: list[Any]) -> Answers:
    return [result.outputs[0].token_ids for result in results]


# -- jump and drafts: the default model with and without a method of its core ---------------------------------------


def jump(pairs: int = 6, batches: list[int] = BATCHES) -> dict[str, Any]:
    options = {"temperature": 0.8, "max_tokens": 200, "structured_outputs": StructuredOutputs(json=SCHEMA)}

    def questions(batch: int) -> Asked:
        return [("Describe a city as JSON.", SamplingParams(seed=seed, **options)) for seed in range(batch)]  # type: ignore[arg-type]

    work = {f"after a schema, batch {batch}": questions(batch) for batch in batches}
    return with_and_without("jumping", work, pairs, WITHOUT_JUMPING)


def drafts(
    pairs: int = 6, batches: list[int] = BATCHES, drafts: int = 4, method: str = "ngram", model: str = ""
) -> dict[str, Any]:
    paragraphs = [part.replace("\n", " ") for part in TEXT.read_text().split("\n\n") if 300 < len(part) < 900]

    def questions(kind: str, batch: int) -> Asked:
        chats = []
        for number in range(batch):
            text = QUESTIONS[kind].format(text=paragraphs[number % len(paragraphs)], number=number)
            temperature = 1.0 if kind == "story" else 0.0
            chats.append((text, SamplingParams(temperature=temperature, seed=number, max_tokens=160)))
        return chats

    work = {f"{kind}, batch {batch}": questions(kind, batch) for kind in QUESTIONS for batch in batches}
    options: dict[str, Any] = {"speculative_config": {"method": method, "num_speculative_tokens": drafts}}
    return with_and_without("drafts", work, pairs, WITHOUT_DRAFTS, **options, **({"model": model} if model else {}))


def with_and_without(option: str, work: dict[str, Asked], pairs: int, without: Any, **options: Any) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=128, **options) as llm:
        for name, questions in work.items():
            messages = [[{"role": "user", "content": question}] for question, _ in questions]
            params = [each for _, each in questions]
            before = counters(llm)
            expected = ids(llm.chat(messages, params, use_tqdm=False))
            sent = {key: value - before[key] for key, value in counters(llm).items()}

            def seconds(m: Any = messages, p: Any = params, expected: Answers = expected) -> float:
                started_s = time.perf_counter()
                results = llm.chat(m, p, use_tqdm=False)
                elapsed_s = time.perf_counter() - started_s
                assert ids(results) == expected, "an answer has changed"
                return elapsed_s

            def bare(seconds: Callable[[], float] = seconds) -> float:
                with without:
                    return seconds()

            compared = compare(name, {f"with {option}": seconds, "without": bare}, pairs, "s")
            figures[name] = compared | {"tokens": sum(map(len, expected))} | sent
            print(f"  {figures[name]['tokens']} tokens; {sent}", flush=True)
    return figures


def counters(llm: LLM) -> dict[str, int]:
    stats = llm.get_metrics()
    return {name: int(stats[name]) for name in ("forced_tokens", "draft_tokens", "accepted_tokens")}


if __name__ == "__main__":
    main(__doc__, "answers", jump, drafts)

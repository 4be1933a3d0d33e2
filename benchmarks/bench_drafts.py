"""What drafts gain where an answer repeats its question, and what they cost where it does not.

The default model in this process, by turns with the same seeds; the answers must be the same. The median ratio of the
times for every kind of work and batch size, how many drafts were right, and one JSON line.

    python benchmarks/bench_drafts.py [--pairs 6] [--batches 1 8 32] [--drafts 4]
"""

import argparse
import time
from pathlib import Path
from typing import Any

from pairs import alternate, judge, record

from penstock import LLM, SamplingParams
from penstock.engine.core.drafts import Drafter

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
MAX_TOKENS = 160


def questions(kind: str, count: int) -> list[tuple[str, SamplingParams]]:
    paragraphs = [part.replace("\n", " ") for part in TEXT.read_text().split("\n\n") if 300 < len(part) < 900]
    asked = []
    greedy = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    for number in range(count):
        text = paragraphs[number % len(paragraphs)]
        if kind == "copy":
            asked.append((f"Repeat this text word for word:\n\n{text}", greedy))
        elif kind == "summarise":
            asked.append((f"{text}\n\nSummarise this text in its own words.", greedy))
        else:
            hot = SamplingParams(temperature=1.0, seed=number, max_tokens=MAX_TOKENS)
            asked.append((f"Write a story about the number {number}.", hot))
    return asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", default=["copy", "summarise", "story"])
    parser.add_argument("--drafts", type=int, default=4)
    args = parser.parse_args()
    look = Drafter.look
    answers: list[list[list[int]]] = []

    def run(llm: LLM, asked: list[tuple[str, SamplingParams]], has_drafts: bool) -> float:
        Drafter.look = look if has_drafts else lambda *_: None  # type: ignore[method-assign]
        messages = [[{"role": "user", "content": question}] for question, _ in asked]
        started_s = time.perf_counter()
        results = llm.chat(messages, [params for _, params in asked], use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        answers.append([result.outputs[0].token_ids for result in results])
        return elapsed_s

    found: dict[str, Any] = {}
    speculative = {"method": "ngram", "num_speculative_tokens": args.drafts}
    with LLM(
        device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=128, speculative_config=speculative
    ) as llm:
        for kind in args.kinds:
            for batch in args.batches:
                asked = questions(kind, batch)
                before = counters(llm)
                run(llm, asked, True)
                sent, right = (now - then for now, then in zip(counters(llm), before, strict=True))
                answers.clear()
                pairs = alternate(lambda: run(llm, asked, True), lambda: run(llm, asked, False), args.pairs)  # noqa: B023
                assert all(answer == answers[0] for answer in answers), "drafts have changed an answer"
                verdict = judge(pairs, higher_is_better=False)
                num_tokens = sum(map(len, answers[0]))
                shares = f"{sent} drafts for {num_tokens} tokens, {right} right"
                print(f"{kind}, batch {batch}: with drafts {verdict} as fast, {shares}", flush=True)
                found[f"{kind} {batch}"] = {
                    "ratio": round(verdict.ratio, 3),
                    "interval": [verdict.low, verdict.high],
                    "tokens": num_tokens,
                    "drafts": sent,
                    "right": right,
                }
    record("drafts", {"num_speculative_tokens": args.drafts, "work": found})


def counters(llm: LLM) -> tuple[int, int]:
    stats = llm.get_metrics()
    return int(stats["draft_tokens"]), int(stats["accepted_tokens"])


if __name__ == "__main__":
    main()

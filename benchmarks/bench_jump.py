"""What is gained where a grammar forces tokens: answers after a JSON schema, with jumping over them and without.

The default model in this process, by turns with the same seeds; the answers must be the same. The median ratio of the
times for every batch size, and one JSON line.

    python benchmarks/bench_jump.py [--pairs 6] [--batches 1 8 32]
"""

import argparse
import time

from pairs import alternate, judge, record

from penstock import LLM, SamplingParams
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.sampling_params import StructuredOutputs

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
QUESTION = [{"role": "user", "content": "Describe a city as JSON."}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    forced = Matcher.forced
    answers: list[list[list[int]]] = []

    def run(llm: LLM, batch: int, jumps: bool) -> float:
        params = [
            SamplingParams(
                temperature=0.8, seed=seed, max_tokens=200, structured_outputs=StructuredOutputs(json=SCHEMA)
            )
            for seed in range(batch)
        ]
        Matcher.forced = forced if jumps else lambda self: []  # type: ignore[method-assign]
        started_s = time.perf_counter()
        results = llm.chat([QUESTION] * batch, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        answers.append([result.outputs[0].token_ids for result in results])
        return elapsed_s

    found = {}
    with LLM(device="cpu", max_model_len=1024, kv_cache_bytes=2**28, max_num_seqs=64) as llm:
        for batch in args.batches:
            run(llm, batch, True)
            answers.clear()
            pairs = alternate(lambda: run(llm, batch, True), lambda: run(llm, batch, False), args.pairs)  # noqa: B023
            assert all(answer == answers[0] for answer in answers), "jumping has changed an answer"
            verdict = judge(pairs, higher_is_better=False)
            print(f"batch {batch}: jumping {verdict} as fast, {sum(map(len, answers[0]))} tokens", flush=True)
            found[str(batch)] = {"ratio": round(verdict.ratio, 3), "interval": [verdict.low, verdict.high]}
    record("jump", {"batches": found})


if __name__ == "__main__":
    main()

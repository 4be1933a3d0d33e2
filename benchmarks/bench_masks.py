"""What it is worth that grammar masks travel out of band: constrained answers from two ranks, either way.

A model of one layer over a vocabulary of 152,064 on two ranks, made-up weights, the default model's tokenizer; every
answer follows a regular expression, so each step sends its ranks a mask of 19 KB for every row. By turns with masks in
the ring's frames and with masks inside the pickle; the answers must be the same. The median ratio of the requests per
second, and one JSON line.

    python benchmarks/bench_masks.py [--pairs 6] [--requests 256] [--output-len 24]
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from functools import partial

from pairs import alternate, judge, record

from penstock import LLM, SamplingParams
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.ranks import multiproc
from penstock.executor.ring.queue import MessageQueue

NEVER = 1 << 40
SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 152064,
    "tie_word_embeddings": True,
}


@contextlib.contextmanager
def two_ranks(requests: int, **ring: int) -> Iterator[LLM]:
    create = MessageQueue.create
    multiproc.MessageQueue.create = partial(create, **ring)  # type: ignore[method-assign]
    try:
        llm = LLM(
            device="cpu",
            executor="multiproc",
            tensor_parallel_size=2,
            load_format="dummy",
            hf_overrides=SHAPE,
            max_model_len=256,
            max_num_seqs=requests,
            kv_cache_bytes=2**26,
        )
    finally:
        multiproc.MessageQueue.create = create  # type: ignore[method-assign]
    with llm:
        yield llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=24)
    args = parser.parse_args()
    grammar = StructuredOutputs(regex="([a-z]+ )*")
    answers: list[list[list[int]]] = []

    def run(llm: LLM) -> float:
        params = [
            SamplingParams(
                temperature=1.0, seed=seed, max_tokens=args.output_len, ignore_eos=True, structured_outputs=grammar
            )
            for seed in range(args.requests)
        ]
        started_s = time.perf_counter()
        results = llm.generate(["once"] * args.requests, params, use_tqdm=False)
        elapsed_s = time.perf_counter() - started_s
        answers.append([result.outputs[0].token_ids for result in results])
        return args.requests / elapsed_s

    with two_ranks(args.requests) as after, two_ranks(args.requests, out_of_band_bytes=NEVER) as before:
        for llm in (after, before):
            run(llm)
        pairs = alternate(lambda: run(after), lambda: run(before), args.pairs)
    assert all(answer == answers[0] for answer in answers), "the way of a mask has changed an answer"
    verdict = judge(pairs, higher_is_better=True)
    print(f"out of band beside inside the pickle: {verdict}")
    record(
        "masks",
        {
            "ratio": round(verdict.ratio, 3),
            "interval": [verdict.low, verdict.high],
            "out_of_band_req_s": [round(pair.ours, 1) for pair in pairs],
            "in_band_req_s": [round(pair.theirs, 1) for pair in pairs],
        },
    )


if __name__ == "__main__":
    main()

"""What sampling one token per row costs, beside the obvious way: sort the vocabulary, softmax, cumsum, multinomial.

Both run in turn on the same logits; a figure is the least of several calls, in microseconds a step. The obvious
way knows temperature, top-k and top-p only, draws from one generator for the whole batch, and is not used anywhere.

    python benchmarks/bench_sampler.py [--rows 1 16 256] [--vocab 49152 151936] [--threads 2] [--seconds 1.0]
"""

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from penstock.executor.outbox import Outbox
from penstock.executor.protocol import Sampling
from penstock.executor.sampling.sampler import Sampler

CASES = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.8),
    "top-k 20, top-p 0.8": Sampling(temperature=0.7, top_k=20, top_p=0.8),
    "top-p 0.95": Sampling(top_p=0.95),
    "penalties": Sampling(temperature=0.8, repetition_penalty=1.1, frequency_penalty=0.2),
    "logprobs 5": Sampling(temperature=0.0, logprobs=5),
}


def obvious(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    if sampling.temperature == 0:
        return logits.argmax(-1)
    values, ids = (logits / sampling.temperature).sort(-1, descending=True)
    if sampling.top_k:
        values = values.masked_fill(values < values[:, sampling.top_k - 1, None], -torch.inf)
    probabilities = values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0)
    return ids.gather(1, probabilities.multinomial(1))[:, 0]


def sampler_step(logits: torch.Tensor, sampling: Sampling) -> Callable[[], object]:
    """A decode step for requests that all have 10 prompt tokens and 10 sampled ones."""
    num_rows, vocab = logits.shape
    sampler = Sampler(vocab, num_rows, torch.device("cpu"))
    for slot in range(num_rows):
        sampler.admit(slot, sampling, np.arange(20, dtype=np.int32), 10)

    def step() -> None:
        sampled = sampler.start(logits, list(range(num_rows)), [20] * num_rows)
        sampled.post(outbox)
        sampled.wait()

    outbox = Outbox(logits.device)
    return step


def measure(seconds: float, *calls: Callable[[], object]) -> list[float]:
    """The least time of each call in µs; they take turns, so that a busy machine is busy for all."""
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    while best[0] == float("inf") or time.perf_counter() < end:
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[index] = min(best[index], (time.perf_counter() - start) * 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = []
    print(f"{'vocabulary':>10} {'rows':>5}  {'case':20} {'sampler µs':>11} {'sorting µs':>11} {'ratio':>6}")
    for vocab in options.vocab:
        for rows in options.rows:
            # Shaped like a language model's: a few tokens far above a broad bell.
            rng = torch.Generator().manual_seed(0)
            logits = torch.randn(rows, vocab, generator=rng) * 2
            logits[:, :200] += torch.linspace(10, 2, 200)
            for case in options.cases:
                sampling = CASES[case]
                ours, sorting = measure(
                    options.seconds, sampler_step(logits, sampling), functools.partial(obvious, logits, sampling)
                )
                known = "penal" not in case and "log" not in case
                compared = f"{sorting:11.0f} {sorting / ours:6.1f}" if known else f"{'':18}"
                print(f"{vocab:10} {rows:5}  {case:20} {ours:11.0f} {compared}", flush=True)
                result = {"vocab": vocab, "rows": rows, "case": case, "sampler_us": round(ours, 1)}
                results.append(result | ({"sorting_us": round(sorting, 1)} if known else {}))
    machine = f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}"
    print(json.dumps({"benchmark": "sampler", "machine": machine, "results": results}))


if __name__ == "__main__":
    main()

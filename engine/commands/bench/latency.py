"""`penstock bench latency`: how long one batch of requests takes, from its prompts to its last tokens.

Options, output and JSON keys are those of `vllm bench latency` where both have them.
"""

import argparse
import random
import time
from dataclasses import dataclass
from statistics import fmean

from penstock.engine.commands.bench.report import percentiles, write_json
from penstock.engine.commands.bench.throughput import OfflineOptions
from penstock.engine.config import EngineOptions, add_engine_options, chosen
from penstock.engine.options import Count, Length, add_options, flag, given_options


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    input_len: Count = flag("tokens of a prompt (default: %(default)s)", "N", default=32)
    output_len: Count = flag("tokens of an answer (default: %(default)s)", "N", default=128)
    batch_size: Count = flag("requests in a batch (default: %(default)s)", "N", default=8)
    num_iters_warmup: Length = flag("batches before the measured ones (default: %(default)s)", "N", default=10)
    num_iters: Count = flag("measured batches (default: %(default)s)", "N", default=30)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, OfflineOptions)
    add_options(parser, LatencyOptions)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    chosen(args, OfflineOptions)
    chosen(args, LatencyOptions)
    latencies = _measure(args)
    percents = percentiles(latencies)
    print(f"Avg latency: {fmean(latencies)} seconds")
    for percent, value in percents.items():
        print(f"{percent}% percentile latency: {value} seconds")
    result = {
        "model_id": args.model,
        "avg_latency": fmean(latencies),
        "latencies": latencies,
        "percentiles": percents,
    }
    write_json(args.output_json, result)
    return 0


def _measure(args: argparse.Namespace) -> list[float]:
    """Return the seconds of each batch. Every batch has new prompts, so that the prefix cache does not shorten it."""
    from penstock.engine.front.llm import LLM
    from penstock.engine.sampling_params import InvalidRequest, SamplingParams

    params = SamplingParams(
        n=args.n, max_tokens=args.output_len, ignore_eos=True, detokenize=not args.disable_detokenize
    )
    rng = random.Random(args.seed or 0)
    latencies = []
    with LLM(args.model, skip_tokenizer=args.skip_tokenizer_init, **given_options(args, EngineOptions)) as llm:
        length = args.input_len + args.output_len
        if length > llm.info.max_model_len:
            limit = llm.info.max_model_len
            raise InvalidRequest("input_len", f"{length} tokens with the answer; a request may have {limit}")
        for index in range(args.num_iters_warmup + args.num_iters):
            tokens = range(llm.info.vocab_size)
            prompts = [rng.choices(tokens, k=args.input_len) for _ in range(args.batch_size)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - started)
    return latencies

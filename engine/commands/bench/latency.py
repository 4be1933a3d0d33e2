"""`penstock bench latency`: how long one batch of requests takes, from its prompts to its last tokens.

Options, output and JSON keys are those of `vllm bench latency` where both have them.
"""

import argparse
import json
import random
import time
from pathlib import Path

from penstock.engine.commands.bench.report import average, percentiles
from penstock.engine.commands.bench.throughput import add_offline_options
from penstock.engine.config import ConfigError, EngineOptions
from penstock.engine.options import given_options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_offline_options(parser)
    add = parser.add_argument
    add("--input-len", type=int, default=32, metavar="N", help="default: %(default)s")
    add("--output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    add("--n", type=int, default=1, metavar="N", help="answers per prompt (default: 1)")
    add("--num-iters-warmup", type=int, default=10, metavar="N", help="default: %(default)s")
    add("--num-iters", type=int, default=30, metavar="N", help="default: %(default)s")
    add("--output-json", metavar="FILE", help="write the result as JSON")


def run(args: argparse.Namespace) -> int:
    for name in ("input_len", "output_len", "batch_size", "num_iters"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name}: {getattr(args, name)} given; at least 1 is expected")
    latencies = _measure(args)
    percents = percentiles(latencies)
    print(f"Avg latency: {average(latencies)} seconds")
    for percent, value in percents.items():
        print(f"{percent}% percentile latency: {value} seconds")
    if args.output_json:
        result = {
            "model_id": args.model,
            "avg_latency": average(latencies),
            "latencies": latencies,
            "percentiles": percents,
        }
        Path(args.output_json).write_text(json.dumps(result, indent=4) + "\n")
    return 0


def _measure(args: argparse.Namespace) -> list[float]:
    """Seconds per batch. Every batch has fresh prompts: the prefix cache must not shorten the second one."""
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

"""`penstock bench throughput` and `penstock bench latency`: measure the engine in this process, without a server.

`throughput` runs many requests at once; `latency` measures how long one batch takes, from its prompts to its last tokens.
Options, output and JSON keys are those of the same commands of `vllm bench` where both have them.
"""

import argparse
import random
import time
from dataclasses import dataclass
from statistics import fmean

from penstock.engine.commands.bench.datasets import DATASETS, PromptSource
from penstock.engine.commands.bench.report import output_file, percentile, write_json
from penstock.engine.config import ConfigError
from penstock.engine.engine_options import EngineOptions
from penstock.engine.front.llm import LLM
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.options import Count, Length, flag, given_options
from penstock.engine.sampling_params import SamplingParams

PERCENTAGES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Options of both benchmarks."""

    model: str | None = None
    skip_tokenizer_init: bool = False
    output_json: str | None = flag(read=output_file)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    input_len: Count = 32
    output_len: Count = 128
    batch_size: Count = 8
    num_iters_warmup: Length = 10
    num_iters: Count = 30


def throughput(args: argparse.Namespace) -> int:
    """Run many requests without a server."""
    if args.trace_speed != 1.0:
        raise ConfigError(f"trace_speed: {args.trace_speed} given; without a server all requests are sent at once")
    with _open_llm(args) as llm:
        samples = DATASETS[args.dataset_name](args, PromptSource(llm.info.vocab_size))
        params = [SamplingParams(max_tokens=sample.output_len, ignore_eos=True) for sample in samples]
        started = time.perf_counter()
        results = llm.generate([sample.prompt for sample in samples], params, use_tqdm=True)
        elapsed_s = time.perf_counter() - started
    num_input = sum(len(result.prompt_token_ids) for result in results)
    num_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    result = {
        "model_id": args.model,
        "elapsed_time": elapsed_s,
        "num_requests": len(samples),
        "total_num_tokens": num_input + num_output,
        "requests_per_second": len(samples) / elapsed_s,
        "tokens_per_second": (num_input + num_output) / elapsed_s,
    }
    rates = f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.2f} total tokens/s"
    print(f"Throughput: {rates}, {num_output / elapsed_s:.2f} output tokens/s")
    print(f"Total num prompt tokens:  {num_input}\nTotal num output tokens:  {num_output}")
    write_json(args.output_json, result)
    return 0


def latency(args: argparse.Namespace) -> int:
    """Time one batch of requests without a server."""
    params, rng = SamplingParams(max_tokens=args.output_len, ignore_eos=True), random.Random(args.seed or 0)
    latencies = []
    with _open_llm(args) as llm:
        length, limit = args.input_len + args.output_len, llm.info.max_model_len
        if length > limit:
            raise InvalidRequest("input_len", f"{length} tokens with the answer; a request may have {limit}")
        for _ in range(args.num_iters_warmup + args.num_iters):
            # Every batch has new prompts, so that the prefix cache does not shorten it.
            prompts = [rng.choices(range(llm.info.vocab_size), k=args.input_len) for _ in range(args.batch_size)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - started)
    measured = latencies[args.num_iters_warmup :]
    percents = {percent: percentile(measured, percent) for percent in PERCENTAGES}
    print(f"Avg latency: {fmean(measured)} seconds")
    for percent, value in percents.items():
        print(f"{percent}% percentile latency: {value} seconds")
    result = {"avg_latency": fmean(measured), "latencies": measured, "percentiles": percents}
    write_json(args.output_json, {"model_id": args.model, **result})
    return 0


def _open_llm(args: argparse.Namespace) -> LLM:
    return LLM(args.model, skip_tokenizer=args.skip_tokenizer_init, **given_options(args, EngineOptions))

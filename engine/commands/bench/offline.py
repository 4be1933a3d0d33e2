"""`penstock bench throughput` and `penstock bench latency`: measure the engine in this process, without a server.

`throughput` runs many requests at once; `latency` measures how long one batch takes, from its prompts to its last tokens.
Options, output and JSON keys are those of the same commands of `vllm bench` where both have them.
"""

import argparse
import random
import time
from dataclasses import dataclass
from statistics import fmean

from penstock.engine.commands.bench.benchmark import Benchmark
from penstock.engine.commands.bench.datasets import DatasetOptions, PromptSource, Sample, load_samples, token_counter
from penstock.engine.commands.bench.report import output_file, percentiles, write_json
from penstock.engine.config import EngineOptions
from penstock.engine.front.llm import LLM
from penstock.engine.options import Count, Length, flag, given_options
from penstock.engine.sampling_params import InvalidRequest, SamplingParams


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Options of both benchmarks."""

    model: str | None = flag("hub name, folder or .gguf file (default: the default model)")
    skip_tokenizer_init: bool = flag("load no tokenizer, for a folder without one", default=False)
    output_json: str | None = flag("write the result as JSON", "FILE", read=output_file)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    num_warmups: Length = flag("requests before the measured ones (default: 0)", "N", default=0)


@dataclass(frozen=True, kw_only=True)
class LatencyOptions:
    input_len: Count = flag("tokens of a prompt (default: %(default)s)", "N", default=32)
    output_len: Count = flag("tokens of an answer (default: %(default)s)", "N", default=128)
    batch_size: Count = flag("requests in a batch (default: %(default)s)", "N", default=8)
    num_iters_warmup: Length = flag("batches before the measured ones (default: %(default)s)", "N", default=10)
    num_iters: Count = flag("measured batches (default: %(default)s)", "N", default=30)


def throughput(args: argparse.Namespace) -> int:
    with _open_llm(args) as llm:
        source = PromptSource(llm.info.vocab_size)
        if not args.skip_tokenizer_init:
            source = source._replace(count_tokens=token_counter(args.model))
        samples = load_samples(args, args.num_prompts + args.num_warmups, source)
        if args.num_warmups:
            _generate(llm, samples[args.num_prompts :], show=False)
        samples = samples[: args.num_prompts]
        started = time.perf_counter()
        num_input, num_output = _generate(llm, samples, show=True)
        elapsed_s = time.perf_counter() - started
    num_total = num_input + num_output
    print(
        f"Throughput: {len(samples) / elapsed_s:.2f} requests/s, {num_total / elapsed_s:.2f} total tokens/s, "
        f"{num_output / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_input}")
    print(f"Total num output tokens:  {num_output}")
    result = {
        "model_id": args.model,
        "elapsed_time": elapsed_s,
        "num_requests": len(samples),
        "total_num_tokens": num_total,
        "requests_per_second": len(samples) / elapsed_s,
        "tokens_per_second": num_total / elapsed_s,
    }
    write_json(args.output_json, result)
    return 0


def latency(args: argparse.Namespace) -> int:
    latencies = _batch_seconds(args)
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


def _open_llm(args: argparse.Namespace) -> LLM:
    return LLM(args.model, skip_tokenizer=args.skip_tokenizer_init, **given_options(args, EngineOptions))


def _params(output_len: int) -> SamplingParams:
    """Return parameters with which an answer has its full length."""
    return SamplingParams(max_tokens=output_len, ignore_eos=True)


def _generate(llm: LLM, samples: list[Sample], show: bool) -> tuple[int, int]:
    """Run the samples; return the numbers of prompt and output tokens."""
    params = [_params(sample.output_len) for sample in samples]
    results = llm.generate([sample.prompt for sample in samples], params, use_tqdm=show)
    num_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    return sum(len(result.prompt_token_ids) for result in results), num_output


def _batch_seconds(args: argparse.Namespace) -> list[float]:
    """Return the seconds of each batch. Every batch has new prompts, so that the prefix cache does not shorten it."""
    params, rng = _params(args.output_len), random.Random(args.seed or 0)
    latencies = []
    with _open_llm(args) as llm:
        length, limit = args.input_len + args.output_len, llm.info.max_model_len
        if length > limit:
            raise InvalidRequest("input_len", f"{length} tokens with the answer; a request may have {limit}")
        for index in range(args.num_iters_warmup + args.num_iters):
            tokens = range(llm.info.vocab_size)
            prompts = [rng.choices(tokens, k=args.input_len) for _ in range(args.batch_size)]
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if index >= args.num_iters_warmup:
                latencies.append(time.perf_counter() - started)
    return latencies


THROUGHPUT = Benchmark(
    *("throughput", "Run many requests without a server.", throughput),
    options=(OfflineOptions, ThroughputOptions, DatasetOptions),
)
LATENCY = Benchmark(
    *("latency", "Time one batch of requests without a server.", latency), options=(OfflineOptions, LatencyOptions)
)

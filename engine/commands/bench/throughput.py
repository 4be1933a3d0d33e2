"""`penstock bench throughput`: how much a batch of requests gets through the engine, without a server.

Options, output and JSON keys are those of `vllm bench throughput` where both have them.
"""

import argparse
import time
from dataclasses import dataclass
from typing import Any

from penstock.engine.commands.bench.datasets import DatasetOptions, load_samples
from penstock.engine.commands.bench.report import output_file, write_json
from penstock.engine.commands.bench.synthetic import PromptSource, Sample, token_counter
from penstock.engine.config import EngineOptions, add_engine_options, chosen
from penstock.engine.options import Count, Length, add_options, flag, given_options


@dataclass(frozen=True, kw_only=True)
class OfflineOptions:
    """Options of every benchmark that runs an engine in this process."""

    model: str | None = flag("hub name, folder or .gguf file (default: the default model)")
    skip_tokenizer_init: bool = flag("load no tokenizer, for a folder without one", default=False)
    disable_detokenize: bool = flag("do not turn token ids into text", default=False)
    n: Count = flag("answers per prompt (default: 1)", "N", default=1)
    output_json: str | None = flag("write the result as JSON", "FILE", read=output_file)


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions:
    num_warmups: Length = flag("requests before the measured ones (default: 0)", "N", default=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for kind in (OfflineOptions, ThroughputOptions, DatasetOptions):
        add_options(parser, kind)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    from penstock.engine.front.llm import LLM

    for kind in (OfflineOptions, ThroughputOptions, DatasetOptions):
        chosen(args, kind)
    with LLM(args.model, skip_tokenizer=args.skip_tokenizer_init, **given_options(args, EngineOptions)) as llm:
        count = args.num_prompts + args.num_warmups
        source = PromptSource(llm.info.vocab_size)
        if not args.skip_tokenizer_init:
            source = source._replace(count_tokens=token_counter(args.model))
        samples = load_samples(args, count, source)
        if args.num_warmups:
            _generate(llm, samples[args.num_prompts :], args, show=False)
        samples = samples[: args.num_prompts]
        started = time.perf_counter()
        num_input, num_output = _generate(llm, samples, args, show=True)
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


def _generate(llm: Any, samples: list[Sample], args: argparse.Namespace, show: bool) -> tuple[int, int]:
    """Run the samples to their full lengths; return the numbers of prompt and output tokens."""
    from penstock.engine.sampling_params import SamplingParams

    params = [
        SamplingParams(n=args.n, max_tokens=sample.output_len, ignore_eos=True, detokenize=not args.disable_detokenize)
        for sample in samples
    ]
    results = llm.generate([sample.prompt for sample in samples], params, use_tqdm=show)
    num_output = sum(len(output.token_ids) for result in results for output in result.outputs)
    return sum(len(result.prompt_token_ids) for result in results), num_output

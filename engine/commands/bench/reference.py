"""`penstock bench logprobs`: how far the engine's log-probabilities are from those of a transformers forward pass.

A trainer computes the probabilities of sampled tokens anew, and takes what differs for a change of the policy.
"""

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from penstock.engine.commands.bench.report import output_file, write_json
from penstock.engine.config import EngineOptions, add_engine_options, chosen
from penstock.engine.options import INT64, Count, add_options, flag, given_options

Reference = Callable[[str, Sequence[Sequence[int]], str], list[list[float]]]  # model, sequences, dtype


@dataclass(frozen=True, kw_only=True)
class LogprobOptions:
    model: str | None = flag("hub name, folder or .gguf file (default: the default model)")
    num_prompts: Count = flag("random prompts (default: 8)", "N", default=8)
    input_len: Annotated[int, Meta(ge=2, le=INT64)] = flag("tokens of each (default: 64)", "N", default=64)
    output_len: Count = flag("tokens that are sampled behind it, at temperature 1 (default: 64)", "N", default=64)
    reference_dtype: Literal["float32", "bfloat16", "float16"] = flag(
        "in which transformers computes (default: float32)", default="float32"
    )
    output_json: str | None = flag("write the result as JSON", "FILE", read=output_file)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, LogprobOptions)
    add_engine_options(parser)


def run(args: argparse.Namespace, reference: Reference) -> int:
    from penstock.engine.front.llm import LLM
    from penstock.engine.model_files import resolve_model
    from penstock.engine.sampling_params import SamplingParams

    chosen(args, LogprobOptions)
    draw = random.Random(args.seed or 0)
    with LLM(args.model, skip_tokenizer=True, **given_options(args, EngineOptions)) as llm:
        prompts = [
            [draw.randrange(llm.info.vocab_size) for _ in range(args.input_len)] for _ in range(args.num_prompts)
        ]
        params = SamplingParams(max_tokens=args.output_len, logprobs=0, prompt_logprobs=0, seed=0, ignore_eos=True)
        results = llm.generate(prompts, params)
        dtype = llm.info.dtype
    ours = [_logprobs(result) for result in results]
    sequences = [[*result.prompt_token_ids, *result.outputs[0].token_ids] for result in results]
    theirs = reference(str(resolve_model(args.model).path), sequences, args.reference_dtype)
    result: dict[str, Any] = {"model_id": args.model, "dtype": dtype, "reference_dtype": args.reference_dtype}
    for what, part in (("prompt", slice(args.input_len - 1)), ("sampled", slice(args.input_len - 1, None))):
        apart = [
            a - b
            for mine, other in zip(ours, theirs, strict=True)
            for a, b in zip(mine[part], other[part], strict=True)
        ]
        sizes = [abs(each) for each in apart]
        result[what] = {"num_tokens": len(apart), "mean": sum(sizes) / len(sizes), "largest": max(sizes)}
        print(
            f"{what} tokens: {len(apart)}, |difference| of log-probabilities: mean {result[what]['mean']:.2e}, "
            f"largest {result[what]['largest']:.2e} nats"
        )
    write_json(args.output_json, result)
    return 0


def _logprobs(result: Any) -> list[float]:
    """Of every token but the first."""
    (output,) = result.outputs
    entries = [*zip(result.prompt_token_ids, result.prompt_logprobs, strict=True)][1:]
    entries += zip(output.token_ids, output.logprobs, strict=True)
    return [entry[token].logprob for token, entry in entries]

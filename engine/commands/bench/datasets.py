"""The data sets that a benchmark draws its prompts from.

A data set is a function (args, count, source) -> samples, an entry in DATASETS, and its options in `DatasetOptions`.
`PromptSource` says what prompts are made of. Completions get token ids where the data set has no texts, so no tokenizer
is needed and lengths are exact. Chats get words, which the server counts itself.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.engine.commands.bench.recorded import sharegpt_samples, timed_trace_samples
from penstock.engine.commands.bench.synthetic import PromptSource, Sample, prefix_repetition_samples, random_samples
from penstock.engine.options import Count, Length, flag

DATASETS: dict[str, Callable[[argparse.Namespace, int, PromptSource], list[Sample]]] = {
    "random": random_samples,
    "prefix_repetition": prefix_repetition_samples,
    "sharegpt": sharegpt_samples,
    "timed_trace": timed_trace_samples,
}

Factor = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    dataset_name: str = flag(
        "what prompts are made of (default: %(default)s)", choices=tuple(DATASETS), default="random", opens="dataset"
    )
    dataset_path: str | None = flag("file of the data sets sharegpt and timed_trace (Mooncake's format)", "FILE")
    num_prompts: Count = flag("number of measured requests (default: %(default)s)", "N", default=1000)
    random_input_len: Count = flag(
        "tokens of a random prompt (default: %(default)s)", "N", ("--random-input-len", "--input-len"), default=1024
    )
    random_output_len: Count = flag(
        "tokens of an answer to it (default: %(default)s)", "N", ("--random-output-len", "--output-len"), default=128
    )
    random_range_ratio: Annotated[float, Meta(ge=0, lt=1)] = flag(
        "draw each length between len·(1-R) and len·(1+R); 0 ≤ R < 1 (default: %(default)g)", "R", default=0.0
    )
    prefix_repetition_prefix_len: Length = flag("tokens of a shared prefix (default: %(default)s)", "N", default=256)
    prefix_repetition_suffix_len: Count = flag(
        "tokens of each prompt after its prefix (default: %(default)s)", "N", default=256
    )
    prefix_repetition_num_prefixes: Count = flag("number of different prefixes (default: %(default)s)", "N", default=10)
    prefix_repetition_output_len: Count = flag("tokens of an answer (default: %(default)s)", "N", default=128)
    trace_speed: Factor = flag("replay the trace this many times faster (default: %(default)g)", "X", default=1.0)
    trace_length_scale: Factor = flag(
        "multiply all lengths of the trace, for a model with a shorter context (default: %(default)g)",
        "X",
        default=1.0,
    )


def load_samples(args: argparse.Namespace, count: int, source: PromptSource) -> list[Sample]:
    """Return `count` samples of the data set that the options name."""
    return DATASETS[args.dataset_name](args, count, source)

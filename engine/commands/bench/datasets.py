"""The prompts of a benchmark.

A dataset is a function (args, count, source) -> samples, an entry in DATASETS, and its options in
`add_dataset_options`. What differs between servers stands in `Source`: a server is sent token ids wherever it
takes them and the dataset has no texts, so no tokenizer is needed and lengths are exact; a chat gets words, which it
counts itself.
"""

import argparse
from collections.abc import Callable

from penstock.engine.commands.bench.recorded import custom_samples, sharegpt_samples, timed_trace_samples
from penstock.engine.commands.bench.synthetic import Sample, Source, prefix_repetition_samples, random_samples
from penstock.engine.config import ConfigError

__all__ = ["DATASETS", "Sample", "Source", "add_dataset_options", "load_samples"]

DATASETS: dict[str, Callable[[argparse.Namespace, int, Source], list[Sample]]] = {
    "random": random_samples,
    "prefix_repetition": prefix_repetition_samples,
    "sharegpt": sharegpt_samples,
    "custom": custom_samples,
    "timed_trace": timed_trace_samples,
}

_LENGTHS = {  # option → the least it can be
    "num_prompts": 1,
    "random_input_len": 1,
    "random_output_len": 1,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 0,
    "prefix_repetition_suffix_len": 1,
    "prefix_repetition_num_prefixes": 1,
    "prefix_repetition_output_len": 1,
    "sharegpt_output_len": 1,
    "custom_output_len": 1,
}


def add_dataset_options(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
    add("--dataset-path", metavar="FILE", help="of sharegpt, custom (JSON lines) and timed_trace (Mooncake or Azure)")
    add("--num-prompts", type=int, default=num_prompts, metavar="N", help="default: %(default)s")
    add("--random-input-len", "--input-len", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--random-output-len", "--output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="draw each length from len·(1-R) … len·(1+R); 0 ≤ R < 1 (default: %(default)g)",
    )
    add(
        "--random-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that all prompts begin with, before their own (default: %(default)s)",
    )
    for name, value, what in (
        ("prefix-len", 256, "tokens that prompts share"),
        ("suffix-len", 256, "tokens of their own"),
        ("num-prefixes", 10, "different prefixes"),
        ("output-len", 128, "tokens of an answer"),
    ):
        add(f"--prefix-repetition-{name}", type=int, default=value, metavar="N", help=f"{what} (default: %(default)s)")
    add("--sharegpt-output-len", type=int, metavar="N", help="default: as long as the answer in the file")
    add(
        "--custom-output-len", type=int, default=256, metavar="N", help="where a line names none (default: %(default)s)"
    )
    add("--trace-speed", type=float, default=1.0, metavar="X", help="replay this much faster (default: %(default)g)")
    add(
        "--trace-length-scale",
        type=float,
        default=1.0,
        metavar="X",
        help="multiply all lengths, for a model that is too small or slow for the trace (default: %(default)g)",
    )


def load_samples(args: argparse.Namespace, count: int, source: Source) -> list[Sample]:
    """`count` samples of the dataset that was asked for."""
    for name, low in _LENGTHS.items():
        value = getattr(args, name)
        if value is not None and value < low:
            raise ConfigError(f"{name}: {value} given; at least {low} is expected")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(
            f"random_range_ratio: {args.random_range_ratio:g} given; 0 or more and less than 1 is expected"
        )
    for name in ("trace_speed", "trace_length_scale"):
        if not 0 < getattr(args, name) < float("inf"):
            raise ConfigError(f"{name}: {getattr(args, name):g} given; more than 0 is expected")
    return DATASETS[args.dataset_name](args, count, source)

"""The prompts of a benchmark.

A dataset is a function (args, count, source) -> samples, an entry in DATASETS, and its options in
`add_dataset_options`. What differs between servers stands in `Source`: a server is sent token ids wherever it
takes them, so no tokenizer is needed and lengths are exact; a chat gets words, which it counts itself.
"""

import argparse
import random
from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.config import ConfigError

Prompt = str | list[int]

# Short common words: one token each, with the space before it, in the usual vocabularies.
_TEXT = """
    the of and to in is was for that with on as are by at be this from or have an they which one you were all
    her she there would their we him been has when who will no more if out so up said what its about than into
    them can only other time new some could these two may first then do any like my now over such our man me even
    most made after also did many off before must well back through years much where your way down should because
    long each just state those people too mr how little good world make very year still see work life day
"""
_WORDS = _TEXT.split()
_SPECIAL_IDS = 100  # the lowest ids are often special tokens; they are left out


class Sample(NamedTuple):
    prompt: Prompt
    prompt_len: int
    output_len: int


class Source(NamedTuple):
    """What prompts may be made of: token ids below `vocab_size`, or text."""

    vocab_size: int
    is_text: bool = False

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Numbers that `prompt` turns into tokens."""
        if self.is_text:
            return rng.choices(range(len(_WORDS)), k=count)
        return rng.choices(range(min(_SPECIAL_IDS, self.vocab_size // 2), self.vocab_size), k=count)

    def prompt(self, numbers: list[int]) -> Prompt:
        return " ".join(_WORDS[number] for number in numbers) if self.is_text else numbers


def random_samples(args: argparse.Namespace, count: int, source: Source) -> list[Sample]:
    """Prompts of random tokens behind a common prefix; lengths uniform within ±range_ratio."""
    rng = random.Random(args.seed or 0)
    prefix = source.draw(args.random_prefix_len, rng)
    samples = []
    for _ in range(count):
        numbers = prefix + source.draw(_length(args.random_input_len, args.random_range_ratio, rng), rng)
        output_len = _length(args.random_output_len, args.random_range_ratio, rng)
        samples.append(Sample(source.prompt(numbers), len(numbers), output_len))
    return samples


DATASETS: dict[str, Callable[[argparse.Namespace, int, Source], list[Sample]]] = {"random": random_samples}


def add_dataset_options(parser: argparse.ArgumentParser, *, num_prompts: int = 1000) -> None:
    add = parser.add_argument_group("dataset").add_argument
    add("--dataset-name", choices=DATASETS, default="random", help="default: %(default)s")
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


def load_samples(args: argparse.Namespace, count: int, source: Source) -> list[Sample]:
    """`count` samples of the dataset that was asked for."""
    for name, low in (("num_prompts", 1), ("random_input_len", 1), ("random_output_len", 1), ("random_prefix_len", 0)):
        if getattr(args, name) < low:
            raise ConfigError(f"{name}: {getattr(args, name)} given; at least {low} is expected")
    if not 0 <= args.random_range_ratio < 1:
        raise ConfigError(
            f"random_range_ratio: {args.random_range_ratio:g} given; 0 or more and less than 1 is expected"
        )
    return DATASETS[args.dataset_name](args, count, source)


def _length(mean: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio))))

"""Synthetic prompts: random tokens, or a few prefixes with many suffixes."""

import argparse
import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from penstock.engine.config import ConfigError
from penstock.engine.model_files import ModelNotFound, resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.engine.text.tokenizer import Tokenizer

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
_SPECIAL_IDS = 100  # the lowest ids are often special tokens, so they are not drawn


class Sample(NamedTuple):
    """A prompt, and the length of the answer to ask for."""

    prompt: Prompt
    prompt_len: int  # of a text: an estimate, until the server has counted
    output_len: int
    arrival_s: float | None = None  # after the start, where the dataset says when


def estimated_tokens(text: str) -> int:
    """Estimate the tokens of an English text: about four characters each."""
    return -(-len(text) // 4)


def token_counter(model: str | None) -> Callable[[str], int]:
    """Return a function that counts with the tokenizer of a model (None: the default model), which is loaded on first use."""

    @cache
    def tokenizer() -> Tokenizer:
        try:
            return load_tokenizer(resolve_model(model, need_weights=False))
        except ModelNotFound as error:
            raise ConfigError(f"tokenizer: {error}") from None

    return lambda text: len(tokenizer().encode(text, add_special_tokens=False))


class PromptSource(NamedTuple):
    """Makes prompts from token ids below `vocab_size`, or from text."""

    vocab_size: int
    is_text: bool = False
    count_tokens: Callable[[str], int] = estimated_tokens

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Draw numbers that `prompt` turns into tokens."""
        if self.is_text:
            return rng.choices(range(len(_WORDS)), k=count)
        return rng.choices(range(min(_SPECIAL_IDS, self.vocab_size // 2), self.vocab_size), k=count)

    def prompt(self, numbers: list[int]) -> Prompt:
        return " ".join(_WORDS[number] for number in numbers) if self.is_text else numbers


def random_samples(args: argparse.Namespace, count: int, source: PromptSource) -> list[Sample]:
    """Make prompts of random tokens; lengths are uniform within ±range_ratio."""
    rng = random.Random(args.seed or 0)
    samples = []
    for _ in range(count):
        numbers = source.draw(_length(args.random_input_len, args.random_range_ratio, rng), rng)
        output_len = _length(args.random_output_len, args.random_range_ratio, rng)
        samples.append(Sample(source.prompt(numbers), len(numbers), output_len))
    return samples


def prefix_repetition_samples(args: argparse.Namespace, count: int, source: PromptSource) -> list[Sample]:
    """Make prompts with a few prefixes, each followed by many different suffixes, in random order."""
    rng = random.Random(args.seed or 0)
    prefixes = [source.draw(args.prefix_repetition_prefix_len, rng) for _ in range(args.prefix_repetition_num_prefixes)]
    samples = []
    for number in range(count):
        prefix = prefixes[number % len(prefixes)]
        numbers = prefix + source.draw(args.prefix_repetition_suffix_len, rng)
        samples.append(Sample(source.prompt(numbers), len(numbers), args.prefix_repetition_output_len))
    rng.shuffle(samples)
    return samples


def _length(mean: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio))))

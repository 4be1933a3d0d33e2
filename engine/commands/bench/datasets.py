"""The data sets that a benchmark draws its prompts from: random tokens, a few prefixes with many suffixes, ShareGPT's
conversations, and recorded traces of services.

A data set is a function (args, count, source) -> samples, an entry in DATASETS, and its options in `DatasetOptions`.
`PromptSource` says what prompts are made of. Completions get token ids where the data set has no texts, so no tokenizer
is needed and lengths are exact. Chats get words, which the server counts itself.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from penstock.engine.config import ConfigError
from penstock.engine.model_files import ModelNotFound, resolve_model
from penstock.engine.options import Count, Length, flag
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


# Conversations outside of these limits are skipped, as other benchmarks of this data do.
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
HASH_TOKENS = 512  # of a prompt for each hash id, in Mooncake's format


Tokens = Annotated[int, Meta(ge=0, le=10**8)]
BAD_DATA = (ValueError, TypeError, KeyError, RecursionError)


def sharegpt_samples(args: argparse.Namespace, count: int, source: PromptSource) -> list[Sample]:
    """Take the first question of each conversation, and the length of its answer.

    The file is a JSON list of objects like {"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}]}.
    """
    path = _path(args)
    try:
        turns = [conversation["conversations"] for conversation in msgspec.json.decode(path.read_bytes())]
        questions = [(first["value"], second["value"]) for first, second, *_ in (t for t in turns if len(t) >= 2)]
        pairs = msgspec.convert(questions, list[tuple[str, str]])
    except BAD_DATA as error:
        raise ConfigError(f"dataset_path: {path} is no list of conversations: {error}") from None
    random.Random(args.seed or 0).shuffle(pairs)
    found = []
    for question, answer in pairs:
        prompt_len, output_len = source.count_tokens(question), source.count_tokens(answer)
        if (
            min(prompt_len, output_len) >= MIN_TOKENS
            and prompt_len <= MAX_PROMPT
            and prompt_len + output_len <= MAX_TOTAL
        ):
            found.append(Sample(question, prompt_len, output_len))
        if len(found) == count:
            break
    return _enough(found, count, path)


class _TraceEntry(msgspec.Struct):
    """One request of a trace in Mooncake's format."""

    timestamp: float  # ms
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int] | None = None  # prompts that begin with equal ids begin with equal tokens


def timed_trace_samples(args: argparse.Namespace, count: int, source: PromptSource) -> list[Sample]:
    """Make requests with the lengths, the times and the shared prefixes of a recorded trace.

    The file has Mooncake's format: JSON lines with timestamp in ms, input_length, output_length and hash_ids.
    """
    path = _path(args)
    entries: list[_TraceEntry] = []
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        try:
            for line in islice(lines, count):
                entries.append(msgspec.json.decode(line, type=_TraceEntry))
        except BAD_DATA as error:
            raise ConfigError(f"dataset_path: {path}, request {len(entries) + 1}: {error}") from None
    if len(entries) < count:
        raise ConfigError(f"num_prompts: {count} with the warm-ups given; the trace has {len(entries)} requests")
    rng, scale, pieces = random.Random(args.seed or 0), args.trace_length_scale, dict[int, list[int]]()
    piece_len = max(1, round(HASH_TOKENS * scale))
    samples = []
    for entry in entries:
        prompt_len = max(1, round(entry.input_length * scale))
        numbers: list[int] = []
        for hash_id in entry.hash_ids or ():
            if hash_id not in pieces:
                pieces[hash_id] = source.draw(piece_len, rng)
            numbers += pieces[hash_id]
        numbers = numbers[:prompt_len] + source.draw(max(0, prompt_len - len(numbers)), rng)
        output_len = max(1, round(entry.output_length * scale))
        at_s = (entry.timestamp - entries[0].timestamp) / 1000 / args.trace_speed
        samples.append(Sample(source.prompt(numbers), prompt_len, output_len, at_s))
    return samples


def _path(args: argparse.Namespace) -> Path:
    if args.dataset_path is None:
        raise ConfigError(f"dataset_path: none given; --dataset-name {args.dataset_name} reads a file")
    path = Path(args.dataset_path)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise ConfigError(f"dataset_path: {path} given; there is no such file, or it may not be read")
    return path


def _enough(found: list[Sample], count: int, path: Path) -> list[Any]:
    """Return `count` samples; if the file has fewer, repeat them and report that on stderr."""
    if not found:
        raise ConfigError(f"dataset_path: {path} has no prompt that can be used")
    if len(found) < count:
        print(
            f"{path.name} has {len(found)} prompts; they are repeated to {count}, so a prefix cache finds them again",
            file=sys.stderr,
        )
    return [found[number % len(found)] for number in range(count)]


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

"""The data sets that a benchmark draws its prompts from: random tokens, ShareGPT's conversations, and recorded traces.

A data set is a function (args, source) -> samples, an entry in DATASETS, and its options in `DatasetOptions`.
`PromptSource` says what prompts are made of. Completions get token ids where the data set has no texts, so no tokenizer
is needed and lengths are exact. Chats get words, which the server counts itself.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from penstock.engine.config import ConfigError
from penstock.engine.options import Count, Length, flag, options_of
from penstock.prove.questions import WORDS

_SPECIAL_IDS = 100  # the lowest ids are often special tokens, so they are not drawn
# Conversations outside of these limits are skipped, as other benchmarks of this data do.
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
HASH_TOKENS = 512  # tokens of the prompt for each hash id, in Mooncake's format


T = TypeVar("T")


class Sample(NamedTuple):
    """A prompt, and the length of the answer to ask for."""

    prompt: str | list[int]
    prompt_len: int  # of a text: an estimate, until the server has counted
    output_len: int
    arrival_s: float | None = None  # after the start, where the data set says when


class PromptSource(NamedTuple):
    """Makes prompts from token ids below `vocab_size`, or from words."""

    vocab_size: int
    is_text: bool = False

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Draw ids of words or of tokens for `sample`."""
        if self.is_text:
            return rng.choices(range(len(WORDS)), k=count)
        return rng.choices(range(min(_SPECIAL_IDS, self.vocab_size // 2), self.vocab_size), k=count)

    def sample(self, ids: list[int], output_len: int, arrival_s: float | None = None) -> Sample:
        prompt = " ".join(WORDS[each] for each in ids) if self.is_text else ids
        return Sample(prompt, len(ids), output_len, arrival_s)


def random_samples(args: argparse.Namespace, source: PromptSource) -> list[Sample]:
    """Make prompts of random tokens after one of a few shared prefixes; lengths are uniform within ±range_ratio."""
    rng = random.Random(args.seed or 0)
    prefixes = [source.draw(args.random_prefix_len, rng) for _ in range(args.random_num_prefixes)]
    samples = []
    for _ in range(args.num_prompts):
        ids = source.draw(_length(args.random_input_len, args.random_range_ratio, rng), rng)
        output_len = _length(args.random_output_len, args.random_range_ratio, rng)
        samples.append(source.sample(rng.choice(prefixes) + ids, output_len))
    return samples


def _length(mean: int, ratio: float, rng: random.Random) -> int:
    return rng.randint(max(1, int(mean * (1 - ratio))), max(1, int(mean * (1 + ratio))))


class _Turn(msgspec.Struct):
    value: str


class _Conversation(msgspec.Struct):
    """A conversation in ShareGPT's format."""

    conversations: list[_Turn]


def sharegpt_samples(args: argparse.Namespace, _source: PromptSource) -> list[Sample]:
    """Take the first question of each conversation, and the length of its answer: four characters count as a token."""
    conversations = _read(args, msgspec.json.Decoder(list[_Conversation]).decode)
    random.Random(args.seed or 0).shuffle(conversations)
    samples = []
    for question, answer, *_ in (each.conversations for each in conversations if len(each.conversations) >= 2):
        prompt_len, output_len = (-(-len(turn.value) // 4) for turn in (question, answer))
        is_short = prompt_len <= MAX_PROMPT and prompt_len + output_len <= MAX_TOTAL
        if is_short and min(prompt_len, output_len) >= MIN_TOKENS:
            samples.append(Sample(question.value, prompt_len, output_len))
    return _enough(args, samples)


Tokens = Annotated[int, Meta(ge=0, le=10**8)]


class _TraceEntry(msgspec.Struct):
    """One request of a trace in Mooncake's format."""

    timestamp: float  # ms
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int] | None = None  # prompts that begin with equal ids begin with equal tokens


def timed_trace_samples(args: argparse.Namespace, source: PromptSource) -> list[Sample]:
    """Make requests with the lengths, the times and the shared prefixes of a recorded trace.

    The file has Mooncake's format: JSON lines with timestamp in ms, input_length, output_length and hash_ids.
    """
    entries = _read(args, msgspec.json.Decoder(_TraceEntry).decode_lines)[: args.num_prompts]
    rng, scale, pieces = random.Random(args.seed or 0), args.trace_length_scale, dict[int, list[int]]()
    piece_len = max(1, round(HASH_TOKENS * scale))
    samples = []
    for entry in entries:
        prompt_len = max(1, round(entry.input_length * scale))
        ids: list[int] = []
        for hash_id in entry.hash_ids or ():
            if hash_id not in pieces:
                pieces[hash_id] = source.draw(piece_len, rng)
            ids += pieces[hash_id]
        ids = ids[:prompt_len] + source.draw(max(0, prompt_len - len(ids)), rng)
        at_s = (entry.timestamp - entries[0].timestamp) / 1000 / args.trace_speed
        samples.append(source.sample(ids, max(1, round(entry.output_length * scale)), at_s))
    return _enough(args, samples)


def _read(args: argparse.Namespace, decode: Callable[[bytes], list[T]]) -> list[T]:
    """Return the decoded file of a data set; raise ConfigError if it cannot be read or has another format."""
    try:
        return decode(Path(args.dataset_path or "").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        what = f"{args.dataset_path} given; a file for --dataset-name {args.dataset_name} is expected ({error})"
        raise ConfigError(f"dataset_path: {what}") from None


def _enough(args: argparse.Namespace, samples: list[Sample]) -> list[Sample]:
    """Return as many samples as were asked for; raise ConfigError if the file has fewer."""
    if len(samples) < args.num_prompts:
        raise ConfigError(f"num_prompts: {args.num_prompts} given; {args.dataset_path} has {len(samples)} to use")
    return samples[: args.num_prompts]


DATASETS: dict[str, Callable[[argparse.Namespace, PromptSource], list[Sample]]] = {
    "random": random_samples,
    "sharegpt": sharegpt_samples,
    "timed_trace": timed_trace_samples,
}

Factor = Annotated[float, Meta(gt=0, le=1e9)]


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    dataset_name: str = flag("random", choices=tuple(DATASETS))
    dataset_path: str | None = None
    num_prompts: Count = 1000
    random_input_len: Count = 1024
    random_output_len: Count = 128
    random_range_ratio: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    random_prefix_len: Length = 0
    random_num_prefixes: Count = 1
    trace_speed: Factor = 1.0
    trace_length_scale: Factor = 1.0

    def __post_init__(self) -> None:
        """Refuse an option that has no effect on this data set."""
        of_files = ("sharegpt", "timed_trace")
        for prefix, names in (("random_", ("random",)), ("trace_", ("timed_trace",)), ("dataset_path", of_files)):
            for option in options_of(DatasetOptions) if self.dataset_name not in names else ():
                value = getattr(self, option.name)
                if option.name.startswith(prefix) and value != option.default:
                    raise ValueError(f"{option.name}: {value} given; it requires dataset_name {' or '.join(names)}")

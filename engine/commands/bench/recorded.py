"""Prompts from files: ShareGPT's conversations, and recorded traces of services."""

import argparse
import os
import random
import sys
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.engine.commands.bench.synthetic import PromptSource, Sample
from penstock.engine.config import ConfigError

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

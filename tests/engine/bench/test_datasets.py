"""The prompts of a benchmark, and when they are sent."""

import argparse
import json
import math
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.commands.bench import chosen
from penstock.engine.commands.bench.datasets import DATASETS, DatasetOptions, PromptSource, Sample
from penstock.engine.commands.bench.serving import arrival_times
from penstock.engine.config import ConfigError
from penstock.engine.options import add_options
from tests.support.refusals import table

IDS = PromptSource(1000)


def samples(*options: str, count: int = 50, source: PromptSource = IDS, seed: int = 0) -> list[Sample]:
    parser = argparse.ArgumentParser()
    add_options(parser, DatasetOptions)
    args = parser.parse_args(["--num-prompts", str(count), *options])
    args.seed = seed
    chosen(args, DatasetOptions)
    return DATASETS[args.dataset_name](args, source)


def test_a_range_ratio_spreads_lengths_to_both_sides() -> None:
    drawn = samples("--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.3", count=400)
    assert {sample.prompt_len for sample in drawn} == set(range(70, 131))
    assert {sample.output_len for sample in drawn} == set(range(7, 14))


@pytest.mark.parametrize("vocab_size", [2, 150, 50_000])
def test_token_ids_stay_inside_the_vocabulary(vocab_size: int) -> None:
    for sample in samples(count=10, source=PromptSource(vocab_size)):
        assert isinstance(sample.prompt, list)
        assert min(sample.prompt) >= 0 and max(sample.prompt) < vocab_size


def test_a_seed_repeats_the_prompts_and_a_longer_run_begins_with_them() -> None:
    assert samples(seed=4, count=20) == samples(seed=4, count=25)[:20] != samples(seed=5, count=20)


def test_a_few_prefixes_come_again_and_again() -> None:
    lengths = ("--random-prefix-len", "20", "--random-num-prefixes", "3", "--input-len", "5", "--output-len", "7")
    drawn = samples(*lengths, count=60)
    heads = Counter(tuple(sample.prompt[:20]) for sample in drawn)
    assert len(heads) == 3 and min(heads.values()) > 10
    assert {(len(sample.prompt), sample.prompt_len, sample.output_len) for sample in drawn} == {(25, 25, 7)}
    assert len({tuple(sample.prompt) for sample in drawn}) == 60


def conversation(question: str, *answers: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, *({"from": "gpt", "value": a} for a in answers)]}


def test_conversations_give_their_first_question_and_the_length_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    long, short, alone = conversation("q" * 5000, "a" * 40), conversation("q" * 40, "a"), conversation("q" * 40)
    good = conversation("Where does the river end?", "In the sea, after four hundred kilometres.")
    path.write_text(json.dumps([long, short, alone, good]))
    options = ("--dataset-name", "sharegpt", "--dataset-path", str(path))
    assert samples(*options, count=1) == [Sample("Where does the river end?", 7, 11)]
    with pytest.raises(ConfigError, match=f"num_prompts: 2 given; {path} has 1 to use"):
        samples(*options, count=2)


def test_a_trace_keeps_its_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [(1000, 1200, 30, [0, 1, 2]), (3000, 1024, 4, [0, 1]), (3500, 512, 8, [7])]
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(keys, line, strict=True))) + "\n" for line in lines))
    options = ("--dataset-name", "timed_trace", "--dataset-path", str(path))
    first, second, third = samples(*options, "--trace-speed", "2", count=3)
    assert [sample.arrival_s for sample in (first, second, third)] == [0.0, 1.0, 1.25]
    assert [(len(s.prompt), s.prompt_len, s.output_len) for s in (first, second)] == [(1200, 1200, 30), (1024, 1024, 4)]
    assert first.prompt[:1024] == second.prompt and third.prompt[:50] != second.prompt[:50]
    small = samples(*options, "--trace-length-scale", "0.1", count=2)
    assert [(s.prompt_len, s.output_len) for s in small] == [(120, 3), (102, 1)]
    assert small[0].prompt[:102] == small[1].prompt


@pytest.mark.parametrize(("name", "content", "count", "message"), table(__file__, "datasets"))
def test_an_unusable_file_is_named(name: str, content: str | bytes, count: int, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message):
        samples("--dataset-name", name, "--dataset-path", str(path), count=count)


def test_arrivals_are_a_poisson_process_of_an_exact_rate() -> None:
    times = arrival_times(20_000, 10.0, random.Random(1))
    assert times[-1] == pytest.approx(2000.0) and times == sorted(times) and times[0] > 0
    beyond = sum(later - earlier > 0.1 for earlier, later in pairwise([0.0, *times])) / 20_000
    assert beyond == pytest.approx(math.exp(-1), rel=0.05)
    assert times[:9] == arrival_times(20_000, 10.0, random.Random(1))[:9] != arrival_times(9, 5, random.Random(8))

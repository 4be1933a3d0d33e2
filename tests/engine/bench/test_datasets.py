"""The prompts of a benchmark."""

import argparse

import pytest

from penstock.engine.bench.datasets import Sample, Source, add_dataset_options, load_samples
from penstock.engine.config import ConfigError

IDS = Source(1000)


def samples(*options: str, count: int = 50, source: Source = IDS, seed: int = 0) -> list[Sample]:
    parser = argparse.ArgumentParser()
    add_dataset_options(parser)
    args = parser.parse_args(options)
    args.seed = seed
    return load_samples(args, count, source)


def test_lengths_are_exact_without_a_range() -> None:
    for sample in samples("--random-input-len", "70", "--random-output-len", "9"):
        assert len(sample.prompt) == sample.prompt_len == 70
        assert sample.output_len == 9


def test_a_range_ratio_spreads_lengths_to_both_sides() -> None:
    made = samples("--input-len", "100", "--output-len", "10", "--random-range-ratio", "0.3", count=400)
    assert {sample.prompt_len for sample in made} == set(range(70, 131))
    assert {sample.output_len for sample in made} == set(range(7, 14))


def test_a_prefix_is_shared_by_all_and_comes_on_top() -> None:
    made = samples("--random-input-len", "10", "--random-prefix-len", "6")
    assert len({tuple(sample.prompt[:6]) for sample in made}) == 1
    assert len({tuple(sample.prompt) for sample in made}) == len(made)
    assert {len(sample.prompt) for sample in made} == {16}


@pytest.mark.parametrize("vocab_size", [2, 150, 50_000])
def test_token_ids_stay_inside_the_vocabulary(vocab_size: int) -> None:
    for sample in samples(count=10, source=Source(vocab_size)):
        assert min(sample.prompt) >= 0 and max(sample.prompt) < vocab_size


def test_a_chat_gets_as_many_words() -> None:
    for sample in samples("--random-input-len", "12", source=Source(1000, is_text=True), count=5):
        assert isinstance(sample.prompt, str)
        assert len(sample.prompt.split()) == 12


def test_a_seed_gives_the_same_prompts_and_asking_for_more_keeps_the_first() -> None:
    assert samples(seed=4, count=20) == samples(seed=4, count=25)[:20]
    assert samples(seed=4) != samples(seed=5)


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--num-prompts", "0", "num_prompts"),
        ("--random-input-len", "0", "random_input_len"),
        ("--random-output-len", "-1", "random_output_len"),
        ("--random-prefix-len", "-1", "random_prefix_len"),
        ("--random-range-ratio", "1", "random_range_ratio"),
    ],
)
def test_a_value_out_of_range_is_named(option: str, value: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}: {value} given"):
        samples(option, value)

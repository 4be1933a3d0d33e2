"""The executor seam, kept to the letter: shared blocks, skipped writes, table edits, preemption, drafts and masks."""

import random
from typing import Any

import msgspec
import pytest
import torch

from penstock.executor.protocol import Sampling, Step
from penstock.executor.ranks import runner_factory
from penstock.executor.uniproc import UniprocExecutor
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.small_models import greedy
from tests.support.twins import torch_inputs

CASE = "mistral-sliding"  # its window of 11 also makes positions fall out of sight
PROMPT = [(7 * i * i + 3 * i) % 160 for i in range(48)]


def open_driver() -> Driver:
    return Driver(executor_of(CASE))


@pytest.fixture
def driver() -> Driver:
    return open_driver()


def kv_of(driver: Driver) -> torch.Tensor:
    assert isinstance(driver.executor, UniprocExecutor)
    return driver.executor._rank.kv


def test_a_row_reads_blocks_that_an_earlier_row_of_the_same_step_fills(driver: Driver) -> None:
    first, second = driver.admit(PROMPT), driver.admit([*PROMPT[:40], 9, 9, 9])
    whole = driver.row(first)
    second.blocks, second.computed = first.blocks[:5], 40
    driver.step((first, whole), (second, driver.row(second)))
    expected = [greedy(CASE, PROMPT, 10)[0], greedy(CASE, [*PROMPT[:40], 9, 9, 9], 10)[0]]
    assert driver.generate(first, second, count=10) == expected


def test_positions_below_write_from_are_not_written(driver: Driver) -> None:
    owner, hit = driver.admit(PROMPT), driver.admit(PROMPT)
    driver.advance(owner)
    hit.blocks, hit.computed = list(owner.blocks), len(PROMPT) - 20
    kv_of(driver)[owner.blocks] += 0.5  # what a second write would undo
    before = kv_of(driver)[owner.blocks].clone()
    driver.step((hit, driver.row(hit, write_from=len(PROMPT))))
    assert torch.equal(kv_of(driver)[owner.blocks], before)


def test_a_partly_skipped_row_writes_the_rest(driver: Driver) -> None:
    owner, hit = driver.admit(PROMPT[:24]), driver.admit(PROMPT)
    driver.advance(owner)
    hit.blocks, hit.computed = owner.blocks[:3], 16
    row = driver.row(hit, write_from=24)
    marked = kv_of(driver)[hit.blocks[2:4]]
    kv_of(driver)[hit.blocks[3]] = float("nan")  # must be written
    driver.step((hit, row))
    assert torch.equal(kv_of(driver)[hit.blocks[2]], marked[0])
    assert driver.generate(hit, count=12) == [greedy(CASE, PROMPT, 12)[0]]


@pytest.mark.parametrize(
    "options", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2}]
)
def test_tokens_that_a_row_brings_count_as_if_they_were_sampled(driver: Driver, options: dict[str, Any]) -> None:
    sampling, forced = Sampling(temperature=0.0, **options), (5, 9, 5, 77)
    sampled, forced_to = driver.admit(PROMPT[:20], sampling), driver.admit(PROMPT[:20], sampling)
    driver.generate(sampled, forced_to, count=3)
    sampled.tokens += forced
    driver.readmit(sampled, slot=9)
    first = len(forced_to.tokens)
    forced_to.tokens += forced
    row = msgspec.structs.replace(driver.row(forced_to), first_token=first, tokens=forced)
    driver.step((forced_to, row))
    assert driver.generate(sampled, count=12) == driver.generate(forced_to, count=12)


def drafts_of(expected: list[int], first: int, rng: random.Random) -> list[int]:
    """Return up to five tokens that follow, some of them wrong."""
    drafts = expected[first : first + rng.randint(0, 5)]
    return [token if rng.random() < 0.8 else rng.randrange(160) for token in drafts]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=1.3, seed=77, top_k=50)])
@pytest.mark.parametrize("is_device", [False, True])
def test_drafts_change_no_sampled_token(is_device: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right and wrong drafts, beside a request without any; stale blocks hold nothing that a sum would survive."""
    if is_device:
        monkeypatch.setattr(runner_factory, "select_input_ops", lambda _: torch_inputs)
    driver = open_driver()
    kv_of(driver).fill_(float("nan"))
    prompts = [PROMPT[:5], PROMPT[:17], PROMPT]
    alone = driver.generate(*[driver.admit(prompt, sampling) for prompt in prompts], count=30)
    sequences = [driver.admit(prompt, sampling) for prompt in prompts]
    driver.advance(*sequences)
    rng = random.Random(6)
    gains = []
    while min(len(sequence.output) for sequence in sequences) < 24:
        drafts = {index: drafts_of(alone[index], len(sequences[index].output), rng) for index in (0, 2)}
        gains += driver.advance_with_drafts(drafts, *sequences)
    for sequence, expected in zip(sequences, alone, strict=True):
        assert sequence.output[:24] == expected[:24]
    assert {1, 2, 3, 4} <= set(gains)


def test_a_step_without_rows_is_answered(driver: Driver) -> None:
    sequence = driver.admit(PROMPT)
    assert driver.step().tokens == []  # and the admission it carried counts
    assert driver.generate(sequence, count=3) == [greedy(CASE, PROMPT, 3)[0]]


def test_a_request_whose_numbers_break_fails_alone(driver: Driver) -> None:
    sound, broken = driver.admit(PROMPT), driver.admit(PROMPT[:20])
    driver.advance(sound, broken)
    kv_of(driver)[broken.blocks[-1]] = float("nan")
    row = driver.row(broken)
    result = driver.step_unchecked((broken, row), (sound, driver.row(sound)))
    assert "not finite" in result.errors[0] and list(result.errors) == [0]
    assert result.tokens[0] == -1
    assert result.tokens[1] == greedy(CASE, PROMPT, 2)[0][1]


def test_prompt_log_probabilities_and_embeddings_that_break_fail_alone(driver: Driver) -> None:
    with_logprobs = Sampling(temperature=0.0, prompt_logprobs=1)
    sequences = [
        driver.admit(PROMPT, with_logprobs),  # the one that is sound
        driver.admit(PROMPT, pooling="mean"),
        driver.admit(PROMPT, pooling="last"),
        driver.admit(PROMPT, with_logprobs),
    ]
    driver.advance(*sequences, chunk=20)
    for broken in sequences[1:]:
        kv_of(driver)[broken.blocks[2]] = float("nan")
    result = driver.step_unchecked(*((each, driver.row(each)) for each in sequences))
    assert sorted(result.errors) == [1, 2, 3] and result.embeddings == {}
    assert all("not finite" in error for error in result.errors.values())
    assert result.tokens == [greedy(CASE, PROMPT, 1)[0][0], -1, -1, -1]
    assert len(result.prompt_logprobs[0]) == len(PROMPT) - 20 - 1


def test_a_mean_is_the_same_bits_wherever_chunks_end(driver: Driver) -> None:
    whole = driver.advance(driver.admit(PROMPT, pooling="mean")).embeddings[0]
    for chunk in (1, 7, 16, 47):
        sequence = driver.admit(PROMPT, pooling="mean")
        embeddings: dict[int, bytes] = {}
        while not embeddings:
            embeddings = driver.advance(sequence, chunk=chunk).embeddings
        assert embeddings[0] == whole


def test_a_mean_over_a_prompt_with_skipped_positions_fails_that_row_alone(driver: Driver) -> None:
    chat, pooled = driver.admit(PROMPT), driver.admit(PROMPT, pooling="mean")
    pooled.computed = 8
    pooled.blocks = [driver.free.pop()]
    result = driver.advance(chat, pooled)
    assert "40 of 48" in result.errors[1] and result.embeddings == {}
    assert chat.output == greedy(CASE, PROMPT, 1)[0]


def test_a_masked_row_samples_from_its_mask_and_the_next_step_goes_on(driver: Driver) -> None:
    masked, free = driver.admit(PROMPT[:20]), driver.admit(PROMPT)
    for allowed in ({5, 6}, {70}, {33, 99, 120}):
        driver.advance(masked, free, masks={0: allowed})
        assert masked.output[-1] in allowed
    assert free.output == greedy(CASE, PROMPT, 3)[0]
    expected = greedy(CASE, PROMPT[:20] + masked.output, 5)[0]
    assert driver.generate(masked, count=8)[0][3:] == expected


def test_a_mask_goes_to_the_row_it_names_whatever_the_order_of_the_batch(driver: Driver) -> None:
    single, long, other = driver.admit(PROMPT[:9]), driver.admit(PROMPT), driver.admit(PROMPT[:5])
    driver.advance(single)
    # The row of one token comes first in the batch, though it is the second of the step.
    driver.advance(long, single, other, masks={0: {41}, 1: {42}, 2: {43}})
    assert (long.output[-1], single.output[-1], other.output[-1]) == (41, 42, 43)
    ended, last = driver.admit(PROMPT), driver.admit(PROMPT)
    driver.advance(ended, last, masks={0: None, 1: {3}})  # the request of the first has ended meanwhile
    assert ended.output == greedy(CASE, PROMPT, 1)[0] and last.output == [3]


def test_a_step_is_not_collected_before_its_masks_came(driver: Driver) -> None:
    row = driver.row(driver.admit(PROMPT), masked=True)
    driver.executor.submit(Step(1, driver._admissions, [row]))
    with pytest.raises(AssertionError, match="before its masks"):
        driver.executor.collect()

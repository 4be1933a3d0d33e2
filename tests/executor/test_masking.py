"""Grammar masks in the real executor: the masked rows sample what is allowed, the others as if nothing were."""

import numpy as np
import pytest
import torch

from penstock.executor.protocol import NOTHING_LEFT, Sampling, Step, TokenLogprobs
from penstock.executor.sampling.draw import CpuSampling
from penstock.executor.sampling.edits import RowMasks
from penstock.executor.sampling.sampler import Sampler
from tests.executor.test_sampler import admit, sample
from tests.support.checkpoints import executor_of
from tests.support.driver import Driver
from tests.support.small_models import greedy

CASE = "llama"
PROMPT = [(5 * i * i + 3 * i) % 160 for i in range(30)]


def bits(*allowed: set[int], vocab_size: int) -> np.ndarray:
    """One mask for each set of tokens, with ones beyond the vocabulary, which must not matter."""
    flags = np.ones((len(allowed), -(-vocab_size // 32) * 32), dtype=bool)
    flags[:, :vocab_size] = False
    for row, tokens in enumerate(allowed):
        flags[row, list(tokens)] = True
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 1000])
def test_what_a_mask_forbids_becomes_minus_infinity_and_nothing_else_changes(
    vocab_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, vocab_size).to(dtype)
    before = logits.clone()
    chosen = [set(range(0, vocab_size, 3)), {vocab_size - 1}, set()]
    RowMasks([4, 0, 2], bits(*chosen, vocab_size=vocab_size)).apply(logits, CpuSampling(vocab_size, 1))
    for row, allowed in zip((4, 0, 2), chosen, strict=True):
        kept = torch.tensor([token in allowed for token in range(vocab_size)])
        assert torch.equal(logits[row][kept], before[row][kept])
        assert (logits[row][~kept] == -torch.inf).all()
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def sampled(
    samplings: list[Sampling], masks: RowMasks | None, logits: torch.Tensor
) -> tuple[list[int], dict[int, TokenLogprobs], dict[int, str]]:
    sampler = Sampler(logits.shape[1], 8, torch.device("cpu"))
    requests = [admit(sampler, slot, sampling, [1, 2, 3], 3) for slot, sampling in enumerate(samplings)]
    tokens, logprobs, errors = sample(sampler, logits, requests, [3] * len(samplings), masks)
    return tokens.tolist(), logprobs, errors


def test_masks_go_with_every_other_option_and_log_probabilities_are_of_the_raw_distribution() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 100)
    logits[:, 7] = 9.0  # the favourite, which no mask allows
    samplings = [
        Sampling(temperature=0.0, logprobs=3),
        Sampling(temperature=1.5, seed=3, top_k=5, top_p=0.9, logprobs=3),
        Sampling(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.5, logit_bias=((20, 50.0),)),
        Sampling(temperature=0.0),
    ]
    allowed = [{10, 11, 12}, {30, 31}, {20, 21, 22}]
    free, raw, _ = sampled(samplings, None, logits.clone())
    tokens, logprobs, errors = sampled(samplings, RowMasks([0, 1, 2], bits(*allowed, vocab_size=100)), logits.clone())
    assert errors == {}
    assert all(token in those for token, those in zip(tokens, allowed, strict=False))
    assert tokens[2] == 20 and tokens[3] == free[3] == 7
    values = logits.log_softmax(-1)
    for row in (0, 1):
        assert logprobs[row].ids[1:] == raw[row].ids[1:], "the most likely ones are those without the mask"
        assert logprobs[row].values[0] == pytest.approx(values[row, tokens[row]].item(), abs=1e-5)


def test_a_mask_and_other_options_that_leave_nothing_fail_their_row_alone() -> None:
    logits = torch.randn(2, 100)
    samplings = [Sampling(temperature=0.0, banned_ids=(5,)), Sampling(temperature=0.0)]
    tokens, _, errors = sampled(samplings, RowMasks([0], bits({5}, vocab_size=100)), logits.clone())
    assert errors == {0: NOTHING_LEFT}
    assert tokens[1] == logits[1].argmax().item()


@pytest.fixture
def driver() -> Driver:
    return Driver(executor_of(CASE))


def test_a_masked_row_samples_from_its_mask_and_the_next_step_goes_on_from_there(driver: Driver) -> None:
    masked, free = driver.admit(PROMPT[:20]), driver.admit(PROMPT)
    for allowed in ({5, 6}, {70}, {33, 99, 120}):
        driver.advance(masked, free, masks={0: allowed})
    assert masked.output[0] in {5, 6} and masked.output[1] == 70 and masked.output[2] in {33, 99, 120}
    assert free.output == greedy(CASE, PROMPT, 3)[0]
    written = masked.output
    rest = driver.generate(masked, count=8)[0]
    assert rest[3:] == greedy(CASE, PROMPT[:20] + written, 5)[0]


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
    sequence = driver.admit(PROMPT)
    row = driver.row(sequence, masked=True)
    driver.executor.submit(Step(1, driver._admissions, [row]))
    with pytest.raises(AssertionError, match="before its masks"):
        driver.executor.collect()

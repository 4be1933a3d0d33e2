"""The sampler against a slow, obvious reference in float64, and against itself: alone, batched, in any order."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from penstock.executor.kernels import SamplingOps
from penstock.executor.outbox import Outbox
from penstock.executor.protocol import NOTHING_LEFT, Admission, Row, Sampling, TokenLogprobs
from penstock.executor.sampling import draw
from penstock.executor.sampling.draw import CpuSampling
from penstock.executor.sampling.edits import RowMasks
from penstock.executor.sampling.sampler import NOT_FINITE, WORK_BYTES, Sampler, prompt_logprobs
from penstock.executor.step.inputs import DeviceInputs
from penstock.executor.step.layout import Layout
from tests.support.refusals import cases
from tests.support.twins import sampling as sampling_twin
from tests.support.twins import torch_inputs

VOCAB, SLOTS = 700, 8
CPU = torch.device("cpu")
Sampled = tuple[torch.Tensor, dict[int, TokenLogprobs], dict[int, str]]
Masks = Mapping[int, set[int]]  # the tokens that a grammar allows, by row
NO_MASKS: Masks = {}


def admit(sampler: Sampler, slot: int, sampling: Sampling, tokens: list[int], num_prompt: int) -> Admission:
    """Tell the sampler of a request: its prompt, and the tokens sampled before a preemption."""
    ids = np.array(tokens, np.int32)
    request = Admission(slot=slot, request_id=0, tokens=ids.tobytes(), num_prompt=num_prompt, sampling=sampling)
    sampler.admit(request, ids)
    return request


def options_on_device(requests: list[Admission], positions: list[int]) -> tuple[torch.Tensor, ...]:
    """Return the options of the rows' draws as a step gets them from the state of a GPU."""
    inputs = DeviceInputs(SLOTS, max(positions), 16, len(positions), torch_inputs, CPU)
    for request in requests:
        inputs.admit(request.slot, np.zeros(1, np.int32), request.sampling)
    layout = Layout([Row(request.slot, at - 1, 1, True) for request, at in zip(requests, positions, strict=True)])
    return inputs.prepare(layout, np.arange(len(requests)))[1].options


def mask_bits(*allowed: set[int], vocab_size: int = VOCAB) -> np.ndarray:
    """Return a mask for each set of tokens, with ones beyond the vocabulary, which must not matter."""
    flags = np.ones((len(allowed), -(-vocab_size // 32) * 32), dtype=bool)
    flags[:, :vocab_size] = False
    for row, tokens in enumerate(allowed):
        flags[row, list(tokens)] = True
    return np.packbits(flags, axis=1, bitorder="little").view(np.int32)


def sample(
    sampler: Sampler, logits: torch.Tensor, rows: list[Admission], positions: list[int], masks: Masks = NO_MASKS
) -> Sampled:
    """Start and wait; return tokens [S], and log-probabilities and failures by row."""
    row_masks = None
    if masks:
        row_masks, logits = RowMasks(list(masks), mask_bits(*masks.values())), logits.clone()  # it is changed in place
    options = options_on_device(rows, positions)
    sampled = sampler.start(logits, rows, np.array(positions), row_masks, options)
    sampled.post(Outbox(logits.device))
    return sampled.tokens, *sampled.wait()[1:]


def reference_logits(logits: np.ndarray, s: Sampling, prompt: list[int], output: list[int]) -> np.ndarray:
    """Return the edited logits of one row, [V] float64."""
    x = logits.astype(np.float64)
    if s.allowed_ids:
        x[[i for i in range(len(x)) if i not in s.allowed_ids]] = -np.inf
    x[list(s.banned_ids)] = -np.inf
    if len(output) < s.min_tokens:
        x[list(s.stop_ids)] = -np.inf
    for token, bias in s.logit_bias:
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(output):
        x[token] -= s.frequency_penalty * output.count(token) + s.presence_penalty
    return x


def reference_probabilities(x: np.ndarray, s: Sampling) -> np.ndarray:
    """Return the distribution of a draw from edited logits, [V] float64; it keeps tokens tied with the last one kept."""
    p = np.exp((x - x.max()) / s.temperature)
    p[p < s.min_p] = 0
    if 0 < s.top_k < len(p):
        p[p < np.sort(p)[-s.top_k]] = 0
    if s.top_p < 1:
        down = np.sort(p)[::-1]
        p[p < down[np.argmax(np.cumsum(down) >= s.top_p * p.sum())]] = 0
    chances: np.ndarray = p / p.sum()
    return chances


def assert_is_drawn(token: int, p: np.ndarray, seed: int, position: int) -> None:
    """Check that the token is at fraction u of the cumulated probabilities; u may be off by float32's rounding."""
    u = draw.uniforms(np.array([seed], np.uint64), np.array([position]))[0]
    upper = np.cumsum(p)
    assert p[token] > 0
    assert upper[token] - p[token] - 1e-5 <= u < upper[token] + 1e-5


class Requests:
    """A sampler, and the prompts and outputs of the requests in its slots."""

    def __init__(self, vocab: int = VOCAB, slots: int = SLOTS, ops: SamplingOps | None = None) -> None:
        """With `ops`, a drawn token need only be one that the filters keep: the number that is drawn is not known."""
        self.sampler, self.has_ops = Sampler(vocab, slots, CPU, ops), ops is not None
        self.state: dict[int, tuple[Admission, list[int], list[int]]] = {}

    def admit(self, slot: int, sampling: Sampling, prompt: list[int], output: list[int] | None = None) -> None:
        request = admit(self.sampler, slot, sampling, prompt + (output or []), len(prompt))
        self.state[slot] = request, prompt, [*(output or [])]

    def sample(self, logits: torch.Tensor, slots: list[int], positions: list[int], masks: Masks = NO_MASKS) -> Sampled:
        return sample(self.sampler, logits, [self.state[slot][0] for slot in slots], positions, masks)

    def step(self, logits: torch.Tensor, slots: list[int], masks: Masks = NO_MASKS) -> list[int]:
        """Sample one token per row, hold it against the reference, and append it to its request."""
        positions = [len(self.state[slot][1]) + len(self.state[slot][2]) for slot in slots]
        before = logits.clone()
        tokens, _, errors = self.sample(logits, slots, positions, masks)
        assert not errors
        assert torch.equal(logits, before)
        for row, (slot, token) in enumerate(zip(slots, tokens.tolist(), strict=True)):
            request, prompt, output = self.state[slot]
            sampling = request.sampling
            x = reference_logits(logits[row].double().numpy(), sampling, prompt, output)
            x[[i for i in range(len(x)) if row in masks and i not in masks[row]]] = -np.inf
            if sampling.temperature == 0:
                assert x[token] >= x.max() - 1e-4
            else:
                p = reference_probabilities(x, sampling)
                if self.has_ops:
                    assert p[token] > 0
                else:
                    assert_is_drawn(token, p, sampling.seed, positions[row])
            output.append(token)
        return tokens.tolist()


OPTIONS: dict[str, dict[str, Any]] = dict(cases(__file__, "sampling options"))


@pytest.mark.parametrize("ops", [None, sampling_twin], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_does_what_the_reference_does(name: str, ops: SamplingOps | None) -> None:
    """The logits are the same in each step, so that the penalties on earlier tokens matter."""
    requests = Requests(ops=ops)
    logits = torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    for slot in range(SLOTS):
        requests.admit(slot, Sampling(**OPTIONS[name], seed=slot), [slot, 5, 5, 650])
    for _ in range(3):
        requests.step(logits, list(range(SLOTS)))


def random_sampling(rng: np.random.Generator) -> Sampling:
    """Options of one or several of the cases above, with a seed of its own."""
    names = rng.choice(list(OPTIONS), size=rng.integers(1, 4), replace=False)
    options: dict[str, Any] = {}
    for name in names:
        options |= OPTIONS[name]
    if "banned_ids" in options:
        options.pop("allowed_ids", None)  # together with min_tokens they would leave nothing
        options.pop("stop_ids", None)
    return Sampling(**options, seed=int(rng.integers(2**64, dtype=np.uint64)))


@pytest.mark.parametrize("ops", [None, sampling_twin], ids=["cpu", "as on a gpu"])
def test_mixed_batches_do_what_the_reference_does(ops: SamplingOps | None) -> None:
    rng, mask_rng = np.random.default_rng(5), np.random.default_rng(6)
    requests = Requests(ops=ops)
    for _ in range(60):
        for slot in range(SLOTS):
            if slot not in requests.state or rng.random() < 0.2:
                prompt = rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()
                output = rng.integers(0, VOCAB, rng.integers(0, 4)).tolist()  # as after a preemption
                requests.admit(slot, random_sampling(rng), prompt, output)
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist()
        logits = torch.from_numpy(rng.normal(0, 3, (len(slots), VOCAB)).astype(np.float32))
        # The options of no request forbid all tokens of these masks.
        masks = {
            row: {7, 11, 42, 400, 650, 695, *mask_rng.choice(VOCAB, 300).tolist()}
            for row in range(len(slots))
            if mask_rng.random() < 0.3
        }
        requests.step(logits, slots, masks)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("vocab", [pytest.param(49152, marks=pytest.mark.slow), 50257])
def test_a_large_vocabulary_has_the_same_bits_in_any_batch_and_on_any_threads(vocab: int) -> None:
    padded = -(-vocab // draw.BLOCK) * draw.BLOCK
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0)) * 2
    options = {
        "min_p": torch.linspace(0, 1e-4, 8)[:, None],
        "top_k": torch.arange(50, 5050, 625)[:, None],
        "top_p": torch.linspace(0.5, 1.0, 8, dtype=torch.float64)[:, None],
    }
    uniform = torch.rand(8, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weights = torch.zeros(len(logits[rows]), padded)
        weights[:, :vocab] = (logits[rows] - logits[rows].amax(-1, keepdim=True)).exp()
        part = {name: value[rows] for name, value in options.items()}
        draw.filter_weights(weights, torch.empty_like(weights), **part, max_top_k=int(part["top_k"].max()))
        return weights, draw.cumulative(weights), draw.draw(weights, uniform[rows])

    together = run(slice(0, 8))
    torch.set_num_threads(1)
    one_thread = run(slice(0, 8))
    torch.set_num_threads(2)
    for row in range(8):
        for a, b, c in zip(run(slice(row, row + 1)), together, one_thread, strict=True):
            assert torch.equal(a[0], b[row]) and torch.equal(a[0], c[row])


def test_filters_keep_exactly_the_tokens_of_the_reference() -> None:
    """Flat rows have nuclei far beyond the candidates, so both ways to find the threshold are taken."""
    rng = np.random.default_rng(2)
    vocab, kept = 5120, set()
    filters = [(0, 0.9, 0.0), (0, 0.5, 0.0), (40, 1.0, 0.0), (2000, 0.9, 0.0), (0, 0.99, 0.003)]
    for temperature, (top_k, top_p, min_p) in itertools.product([0.3, 1.0, 4.0], filters):
        logits = rng.normal(0, 2, (6, vocab)).astype(np.float32)
        weights = torch.from_numpy(np.exp((logits - logits.max(1, keepdims=True)) / np.float32(temperature)))
        expected = np.stack(
            [
                reference_probabilities(np.log(row.astype(np.float64)), Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
                for row in weights.numpy()
            ]
        )
        column = torch.ones(6, 1)
        draw.filter_weights(
            weights,
            torch.empty_like(weights),
            column * min_p,
            (column * (top_k or vocab)).long(),
            column.double() * top_p,
            max_top_k=top_k,
        )
        assert ((weights.numpy() > 0) == (expected > 0)).all()
        kept.add(int((expected > 0).sum(1).max()))
    assert min(kept) < 40 and max(kept) > 2 * draw.CANDIDATES


def test_tokens_tied_with_the_last_one_kept_are_kept() -> None:
    requests = Requests(vocab=6, slots=1)
    drawn = set()
    for seed in range(200):
        requests.admit(0, Sampling(top_k=2, seed=seed), [0])
        drawn |= set(requests.step(torch.tensor([[1.0, 0.5, 0.5, 0.5, -1.0, 0.4]]), [0]))
    assert drawn == {0, 1, 2, 3}


def test_a_token_of_weight_zero_is_never_drawn_not_even_at_the_ends() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        weights = torch.zeros(1, 4 * draw.BLOCK)
        columns = rng.integers(0, weights.shape[1], rng.integers(1, 6))
        weights[0, columns] = torch.from_numpy(rng.uniform(1e-3, 1, len(columns)).astype(np.float32))
        total = float(draw.cumulative(weights)[0, -1])
        edges = (weights.double().cumsum(-1)[0, columns] / total).tolist()
        largest = 1 - 2.0**-52  # that `uniforms` gives
        us = [0.0, largest, *(min(u, largest) for u in edges)]
        drawn = [int(draw.draw(weights, torch.tensor([[u]], dtype=torch.float64))) for u in us]
        assert set(drawn) <= set(columns.tolist())
        assert drawn[:2] == [columns.min(), columns.max()]


def test_uniforms_are_even_and_unrelated_for_neighbouring_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300))
    u = draw.uniforms(seeds, positions)
    assert u.min() >= 0 and u.max() < 1
    counts = np.bincount((u.ravel() * 100).astype(int), minlength=100)
    assert abs(((counts - 900) ** 2 / 900).sum() - 99) < 4 * math.sqrt(2 * 99)
    for a, b in [(u[:, :-1], u[:, 1:]), (u[:-1], u[1:]), (u[:-1, 1:], u[1:, :-1])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015
    assert len(np.unique(u)) == u.size
    assert draw.uniforms(np.array([2**64 - 1], np.uint64), np.array([2**31]))[0] != u[0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_fails_alone(temperature: float, value: float) -> None:
    requests = Requests()
    for slot in range(4):
        requests.admit(slot, Sampling(temperature=temperature, seed=slot, top_p=0.9, logprobs=1), [0])
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))
    expected, _, _ = requests.sample(logits, [0, 1, 2, 3], [1] * 4)
    logits[2, 345] = value
    tokens, logprobs, errors = requests.sample(logits, [0, 1, 2, 3], [1] * 4)
    assert errors == {2: NOT_FINITE}
    assert tokens.tolist() == [*expected[:2].tolist(), 0, int(expected[3])]
    assert set(logprobs) == {0, 1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_every_token_banned_fails_alone(temperature: float) -> None:
    requests = Requests()
    everything = tuple(range(VOCAB))
    requests.admit(0, Sampling(temperature=temperature, banned_ids=everything), [0])
    requests.admit(1, Sampling(temperature=temperature, allowed_ids=(5,)), [0])
    requests.admit(2, Sampling(temperature=temperature, allowed_ids=(5, 6), stop_ids=(5, 6), min_tokens=1), [0])
    requests.admit(3, Sampling(temperature=temperature, banned_ids=(5,)), [0])
    slots = [0, 1, 2, 3]
    tokens, _, errors = requests.sample(torch.zeros(4, VOCAB), slots, [1] * 4, {1: {5}, 3: {5}})
    assert errors == dict.fromkeys((0, 2, 3), NOTHING_LEFT)
    assert tokens.tolist() == [0, 5, 0, 0]
    _, _, errors = requests.sample(torch.zeros(4, VOCAB), slots, [1, 2, 2, 1], {3: {6}})
    assert errors == {0: NOTHING_LEFT}


def assert_is_logprobs(logprobs: TokenLogprobs, logits: np.ndarray, chosen: int, num: int) -> None:
    x = logits.astype(np.float64)
    values = x - x.max() - np.log(np.exp(x - x.max()).sum())
    order = np.argsort(-x, kind="stable")[: len(x) if num < 0 else num]
    assert logprobs.ids[0] == chosen
    np.testing.assert_allclose(logprobs.values, values[list(logprobs.ids)], atol=2e-5)
    np.testing.assert_allclose(logprobs.values[1:], values[order], atol=2e-5)
    assert len(set(logprobs.ids[1:])) == len(order)
    assert logprobs.rank == (x > x[chosen]).sum() + 1


def test_logprobs_are_those_of_the_raw_distribution_whatever_was_done_to_it() -> None:
    requests = Requests()
    numbers = [None, 0, 1, 20, -1, 20, None, 3]  # of log-probabilities, by slot
    for slot, num in enumerate(numbers):
        options = list(OPTIONS.values())[3 * slot]
        requests.admit(slot, Sampling(**options, seed=slot, logprobs=num), [slot, 2])
    logits = torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    slots = [5, 0, 3, 4, 1, 2, 7, 6]
    tokens, logprobs, _ = requests.sample(logits, slots, [2] * SLOTS, {2: {650}, 3: {600, 690}})
    assert tokens[2] == 650 and int(tokens[3]) in {600, 690}
    assert set(logprobs) == {row for row, slot in enumerate(slots) if numbers[slot] is not None}
    for row, got in logprobs.items():
        num = numbers[slots[row]]
        assert num is not None
        assert_is_logprobs(got, logits[row].numpy(), int(tokens[row]), num)
        assert len(got.ids) == 1 + (VOCAB if num < 0 else num)


def test_prompt_logprobs_follow_the_prompt() -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    prompt = torch.arange(9) * 70
    for num in (0, 5, -1):
        for row, got in enumerate(prompt_logprobs(logits, prompt, num)):
            assert_is_logprobs(got, logits[row].numpy(), int(prompt[row]), num)
    assert prompt_logprobs(logits[:0], prompt[:0], 5) == []
    logits[4, 4] = math.nan
    with pytest.raises(ValueError, match="not finite"):
        prompt_logprobs(logits, prompt, 5)
    ties = torch.tensor([[2.0, 1.0, 2.0, 0.0]]).expand(3, -1)  # tokens that tie for the first place have rank one
    assert [got.rank for got in prompt_logprobs(ties, torch.tensor([0, 1, 2]), 0)] == [1, 3, 1]


def test_sampling_in_parts_and_from_bfloat16_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The working memory may have room for all rows, for some, or for one."""
    logits = (torch.randn(SLOTS, VOCAB, generator=torch.Generator().manual_seed(2)) * 2).bfloat16()
    results = []
    for values, size in ((logits.float(), 1 << 22), (logits, 1 << 22), (logits.float(), 3 * 4 * 768), (logits, 1)):
        monkeypatch.setitem(WORK_BYTES, "cpu", size)
        sampler, requests = Sampler(VOCAB, SLOTS, CPU), []
        for slot in range(SLOTS):
            sampling = msgspec.structs.replace(random_sampling(np.random.default_rng(slot)), logprobs=slot)
            requests.append(admit(sampler, slot, sampling, [1, 2, 3], 1))
        results.append(sample(sampler, values, requests, [3] * SLOTS))
    for tokens, logprobs, errors in results[1:]:
        assert torch.equal(tokens, results[0][0]) and logprobs == results[0][1] and errors == results[0][2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [31, 32, 33, 1000])
def test_a_mask_turns_only_forbidden_logits_into_minus_infinity(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = logits.clone()
    masks = {4: set(range(0, vocab_size, 3)), 0: {vocab_size - 1}, 2: set[int]()}
    RowMasks(list(masks), mask_bits(*masks.values(), vocab_size=vocab_size)).apply(logits, CpuSampling(vocab_size, 1))
    for row, allowed in masks.items():
        kept = torch.tensor([token in allowed for token in range(vocab_size)])
        assert torch.equal(logits[row][kept], before[row][kept])
        assert (logits[row][~kept] == -torch.inf).all()
    assert torch.equal(logits[[1, 3]], before[[1, 3]])


def test_plain_greedy_rows_make_no_copy_of_the_logits() -> None:
    sampler = Sampler(VOCAB, SLOTS, CPU)
    sampling = Sampling(temperature=0.0, stop_ids=(2,), top_p=0.5, top_k=3)
    requests = [admit(sampler, slot, sampling, [1], 1) for slot in range(SLOTS)]
    logits, options = torch.randn(SLOTS, VOCAB), options_on_device(requests, [1] * SLOTS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        sampled = sampler.start(logits, requests, np.ones(SLOTS, dtype=np.int64), None, options)
    assert torch.equal(sampled.tokens, logits.argmax(-1))
    largest = max((event.self_cpu_memory_usage for event in profile.key_averages()), default=0)
    assert largest < VOCAB * 4

"""The kernels that make a step's inputs against the host, and their copies of blocks; drawing in Triton against its twin, and
the twin's noise against its distribution."""

import numpy as np
import pytest
import torch

from penstock.executor.cache_layout import CacheLayout
from penstock.executor.kernels.cuda import draw_tokens as sampling
from penstock.executor.kernels.cuda import step_inputs as inputs
from penstock.executor.kernels.state import OPTIONS, StateLayout
from tests.executor import test_inputs
from tests.support.kernel_cases import matrix
from tests.support.paged import random
from tests.support.twins import sampling as sampling_twin


@pytest.mark.parametrize("num_bytes", [2 * inputs.PIECE + 48, 52])
def test_blocks_are_copied_between_a_gpu_and_padded_blocks_of_the_host(device: torch.device, num_bytes: int) -> None:
    blocks, pairs = torch.randint(256, (5, num_bytes), dtype=torch.uint8), torch.tensor([[4, 1], [0, 2], [3, 5]]).int()
    hosts = torch.zeros(6, -(-num_bytes // 4096) * 4096, dtype=torch.uint8, pin_memory=device.type == "cuda")
    hosts, back = hosts[:, :num_bytes], torch.zeros_like(blocks, device=device)
    inputs.copy_blocks(blocks.to(device), hosts, pairs.to(device))
    inputs.copy_blocks(hosts, back, pairs.flip(1).to(device))  # on a GPU, `cpu` waits for both
    assert torch.equal(back.cpu()[[4, 0, 3]], blocks[[4, 0, 3]]) and not back[[1, 2]].any()
    assert torch.equal(hosts[[1, 2, 5]], blocks[[4, 0, 3]]) and not hosts[[0, 3, 4]].any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the host's tensors are a CPU's, where kernels are interpreted")
@pytest.mark.parametrize(
    ("payload", "layout"),
    [pytest.param(7, test_inputs.MANY, marks=pytest.mark.slow), (1 << 10, test_inputs.ONE)],
    ids=["many", "one"],
)
def test_any_step_is_what_the_host_makes(payload: int, layout: CacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.executor.test_inputs.torch_inputs", inputs)
    test_inputs.test_a_device_makes_of_any_step_what_the_host_makes(5, payload, layout)


def test_what_a_kernel_takes_for_granted_is_checked(device: torch.device) -> None:
    layout = StateLayout(width=9, blocks_at=18, max_blocks=4, options_at=22, spare=9, block_size=2)
    packed, numbers = (torch.zeros(n, dtype=torch.int32, device=device) for n in (9, layout.options_at + OPTIONS))
    for wrong in (packed.long(), packed[:8:2], packed[:8]):  # the last is too short for one row
        with pytest.raises(AssertionError):
            inputs.prepare(wrong, numbers, layout, 1, 1, 1, 1)
    with pytest.raises(AssertionError):
        inputs.prepare(packed, numbers[: layout.options_at], layout, 1, 1, 1, 1)
    with pytest.raises(AssertionError):
        inputs.apply_runs(packed, numbers, 7, 1, 1)


VOCAB = 5000  # more than one chunk of 4096
OFF = (1.0, 0.0, 0, 1.0)


def options(
    values: list[tuple[float, float, int, float]], device: torch.device, start: int = 100
) -> list[torch.Tensor]:
    temperature, min_p, top_k, top_p = zip(*values, strict=True)
    rows = torch.arange(len(values), device=device)
    return [
        torch.tensor(temperature, device=device),
        torch.tensor(min_p, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
        rows * -(2**40) + 12345,  # seeds, of 64 bits
        rows + start,
    ]


def test_rows_that_are_not_finite_are_told(device: torch.device) -> None:
    logits = random(4, 50).to(device)
    logits[0, 7] = torch.nan
    logits[1, 7] = torch.inf
    logits[2] = -torch.inf
    for temperature in (0.0, 1.0):
        tokens, largest = sampling.choose(logits, *options([(temperature, 0.0, 0, 1.0)] * 4, device))
        assert tokens[:3].tolist() == [0, 0, 0]
        assert largest[0].isnan() and largest[1] == torch.inf and largest[2] == -torch.inf and largest[3].isfinite()


def any_row(vocab: int, rng: np.random.Generator) -> torch.Tensor:
    """Logits [vocab]: peaked or flat, mostly tied or mostly banned, high or low."""
    row = rng.normal(rng.choice([-50, 0, 20]), rng.choice([0.01, 1, 4]), vocab)
    if rng.random() < 0.3:
        row = row.round()
    if rng.random() < 0.3:
        row[rng.random(vocab) < rng.choice([0.5, 0.999])] = -np.inf
        row[rng.integers(vocab)] = 30
    if rng.random() < 0.3:  # what is likely is neighbours
        row[: vocab // 9] += 8
    return torch.from_numpy(row.astype(np.float32))


def any_options(vocab: int, rng: np.random.Generator) -> tuple[float, float, int, float]:
    return (
        float(rng.choice([0.0, 1e-3, 0.7, 1.0, 2.0, 100.0])),
        float(rng.choice([0.0, 0.0, 1e-3, 0.2, 1.0])),
        int(rng.choice([0, 0, 1, 5, 40, 300, vocab - 1, vocab, vocab + 1])),
        float(rng.choice([1.0, 1.0, 1e-6, 0.5, 0.9, 0.999])),
    )


MANY = [pytest.param(vocab, marks=pytest.mark.slow) for vocab in (8193, 32_000, 49_152, 50_257)]
MOST = pytest.param(151_936, marks=pytest.mark.nightly)


@pytest.mark.parametrize("vocab", [257, *MANY, MOST])
def test_any_row_draws_what_the_twin_draws_and_the_same_in_every_batch(device: torch.device, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for rows in range(1, 4) if vocab < 10_000 else (1, 5):
        dtype = torch.bfloat16 if rows % 2 else torch.float32
        logits = torch.stack([any_row(vocab, rng) for _ in range(rows)]).to(dtype).to(device)
        given = options([any_options(vocab, rng) for _ in range(rows)], device, int(rng.integers(10_000)))
        tokens, largest = sampling.choose(logits, *given)
        expected, expected_largest = sampling_twin.choose(logits, *given)
        assert torch.equal(tokens, expected) and torch.equal(largest, expected_largest)
        some = torch.from_numpy(rng.permutation(rows)[: rows // 2 + 1]).to(device)
        again, _ = sampling.choose(*(tensor[some] for tensor in (logits, *given)))
        assert torch.equal(again, tokens[some])


def test_each_filter_alone_draws_what_the_twin_draws(device: torch.device) -> None:
    """Rows are so flat that without its filter most draws would be others."""
    given = options(4 * [(1.0, 0.5, 0, 1.0), (1.0, 0.0, 3, 1.0), (1.0, 0.0, 0, 0.3)], device)
    logits = random(12, 257, seed=3).to(device)
    assert torch.equal(sampling.choose(logits, *given)[0], sampling_twin.choose(logits, *given)[0])


KEPT = [(1.0, 0.0, 0, 0.9), (1.0, 0.0, 0, 0.0), (1.0, 0.8, 2000, 0.7)]


@matrix("kept, shape", KEPT, ("flat", "tied", "steep"), hardest=[(KEPT[0], "steep"), (KEPT[2], "tied")])
def test_low_thresholds_are_found_too(device: torch.device, kept: tuple[float, float, int, float], shape: str) -> None:
    """Flat rows, whose nuclei are most of the vocabulary, more equal logits than a list takes, and steep rows, of whose
    nuclei the lists hold the larger part."""
    rows, vocab = 2, 2 * sampling.PART.value
    flat = 0.1 * random(rows, vocab)
    logits = {"flat": flat, "tied": torch.where(flat > 0, 1.0, 0.0), "steep": 20 * flat}[shape].to(device)
    given = options([kept] * rows, device)
    tokens, _ = sampling.choose(logits, *given)
    assert torch.equal(tokens, sampling_twin.choose(logits, *given)[0])


def test_what_drawing_takes_for_granted_is_checked(device: torch.device) -> None:
    logits, given = random(2, 64).to(device), options([OFF] * 2, device)
    sampling.choose(logits, *given)
    for index, wrong in ((0, given[0].double()), (2, given[2].long()), (1, given[1][:1]), (4, given[4].repeat(2)[::2])):
        with pytest.raises(AssertionError):
            sampling.choose(logits, *(wrong if place == index else right for place, right in enumerate(given)))
    with pytest.raises(AssertionError):
        sampling.choose(logits.T, *options([OFF] * 64, device))


def test_the_noise_is_gumbels() -> None:
    """Tokens come up as often as their weights say: chi-square of 20,000 draws, 9 degrees of freedom."""
    weights = torch.tensor([0.3, 0.2, 0.15, 0.1, 0.08, 0.06, 0.05, 0.03, 0.02, 0.01])
    draws = 20_000
    seeds, positions = torch.arange(draws) % 100 * 7919, torch.arange(draws) // 100
    tokens = (weights.log() + sampling_twin.gumbel(seeds, positions, 10)).argmax(-1)
    counts = torch.bincount(tokens, minlength=10)
    chi_square = ((counts - draws * weights) ** 2 / (draws * weights)).sum()
    assert chi_square < 27.9  # exceeded once in a thousand


def test_the_generator_is_philox() -> None:
    """The known answer of Random123 for ten rounds of Philox 4x32 from zeros."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    words = sampling_twin._philox(zero, zero, zero).flatten().tolist()
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]

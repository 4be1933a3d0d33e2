"""The kernels that make a step's inputs, against their twins, on blocks with every kind of row."""

import pytest
import torch

from penstock.executor.cache_layout import CacheLayout
from penstock.executor.kernels.cuda import step_inputs as inputs
from penstock.executor.kernels.state import OPTIONS, StateLayout
from tests.executor import test_inputs
from tests.support.twins import torch_inputs

SLOTS, LENGTH, PAGE = 5, 700, 2  # more blocks of a slot than a kernel takes at once
PLACES = StateLayout(LENGTH + 1, (SLOTS + 1) * (LENGTH + 1), LENGTH // PAGE, 0, SLOTS * (LENGTH + 1), PAGE)
PLACES = PLACES._replace(options_at=PLACES.blocks_at + SLOTS * PLACES.max_blocks)


def state() -> torch.Tensor:
    torch.manual_seed(0)
    # Any bits are a seed or a block; as floats NaN would not equal itself.
    return torch.randint(-(2**30), 2**30, (PLACES.options_at + SLOTS * OPTIONS,), dtype=torch.int32)


@pytest.mark.parametrize("rows", ["mixed", "one long prompt", "padded"])
def test_rows_gather_what_their_twin_gathers(device: torch.device, rows: str) -> None:
    counts, num_real, width = {
        "mixed": ([1, 1, 3, 400], 4, 320),
        "one long prompt": ([650], 1, 330),
        "padded": ([1] * 8, 5, PLACES.max_blocks),
    }[rows]
    starts = torch.tensor([0, *counts]).cumsum(0)
    slots = [3, 0, 4, 1, 2, 0, 0, 0][: len(counts)]
    first = [17, 600, 100, 200, 0, 0, 0, 0][: len(counts)] if len(counts) > 1 else [9]
    write_from = [0, 601, 102, 390, 0, 0, 0, 0][: len(counts)]
    packed = torch.tensor([num_real, 0, 0, 0, *starts.tolist(), *slots, *first, *write_from], dtype=torch.int32)
    arguments = (PLACES, len(counts), sum(counts), max(counts), width)
    expected = torch_inputs.prepare(packed, state(), *arguments)
    got = inputs.prepare(packed.to(device), state().to(device), *arguments)
    for name, ours, theirs in zip(expected._fields, got, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs), name


def test_runs_go_where_their_twin_puts_them(device: torch.device) -> None:
    runs = [(10, 300), (2000, 1), (700, 257)]
    packed, source = [-1] * 4, 4 + 3 * len(runs)
    for to, length in runs:
        packed += [to, source, length]
        source += length
    packed += range(1, source - len(packed) + 1)
    block = torch.tensor(packed, dtype=torch.int32)
    expected, got = state(), state().to(device)
    torch_inputs.apply_runs(block, expected, 4, len(runs), 300)
    inputs.apply_runs(block.to(device), got, 4, len(runs), 300)
    assert torch.equal(got.cpu(), expected) and not torch.equal(expected, state())


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
    packed = torch.zeros(9, dtype=torch.int32, device=device)
    numbers = state().to(device)
    for wrong in (packed.long(), packed[:8:2], packed[:8]):  # the last is too short for one row
        with pytest.raises(AssertionError):
            inputs.prepare(wrong, numbers, PLACES, 1, 1, 1, 1)
    with pytest.raises(AssertionError):
        inputs.prepare(packed, numbers[: PLACES.options_at], PLACES, 1, 1, 1, 1)
    with pytest.raises(AssertionError):
        inputs.apply_runs(packed, numbers, 7, 1, 1)

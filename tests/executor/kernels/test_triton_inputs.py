"""The kernels that make a step's inputs against the host, on steps of every kind, and their copies of blocks."""

import pytest
import torch

from penstock.executor.cache_layout import CacheLayout
from penstock.executor.kernels.cuda import step_inputs as inputs
from penstock.executor.kernels.state import OPTIONS, StateLayout
from tests.executor import test_inputs


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

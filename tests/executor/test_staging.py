"""What the sampler sends a GPU goes over from pinned memory, and nothing it launches waits for the device.

The GPU is torch's device without content: its tensors have shapes only, and asking for a number of them is an error.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.executor.kernels import SamplingOps
from penstock.executor.protocol import Sampling
from penstock.executor.sampling.edits import RowMasks
from penstock.executor.sampling.sampler import WORK_BYTES, Sampler
from penstock.executor.staging import send, send_list

VOCAB = 512
GPU = torch.device("meta")


class Copies(TorchDispatchMode):
    """Every copy to the GPU: whether it came from memory that was pinned for it, and whether the host went on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[bool, bool]] = []
        self._pinned: list[torch.Tensor] = []

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._pinned.append(tensor.clone())
        return self._pinned[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        source = args[1] if func is torch.ops.aten.copy_.default else args[0] if args else None
        copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        out = func(*args, **kwargs)
        if copies and source is not None and source.device.type == "cpu" and out.device == GPU and source.dim() > 0:
            non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            self.made.append((any(source is pinned for pinned in self._pinned), non_blocking))
        return out


def choose(logits: torch.Tensor, *options: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert all(option.device == logits.device and len(option) == len(logits) for option in options)
    return logits.new_empty(len(logits), dtype=torch.int64), logits.new_empty(len(logits), dtype=torch.float32)


def in_place(logits: torch.Tensor, *given: Any) -> None:
    assert all(tensor.device == logits.device for tensor in given if isinstance(tensor, torch.Tensor))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    recorded = Copies()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: recorded.pin(tensor))
    monkeypatch.setitem(WORK_BYTES, GPU.type, WORK_BYTES["cuda"])
    with recorded:
        yield recorded


EVERYTHING = [
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, seed=5, top_k=20, top_p=0.9, min_p=0.1),
    Sampling(temperature=0.0, logprobs=3, banned_ids=(1, 2)),
    Sampling(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.1),
    Sampling(temperature=0.7, allowed_ids=(4, 5), logit_bias=((4, 1.5),)),
    Sampling(temperature=1.0, min_tokens=5, stop_ids=(9,)),
]


def test_whatever_requests_ask_for_goes_over_from_pinned_memory(copies: Copies) -> None:
    sampler = Sampler(
        VOCAB, len(EVERYTHING), GPU, cast(SamplingOps, SimpleNamespace(choose=choose, penalize=in_place, mask=in_place))
    )
    copies.made.clear()  # what was allocated once
    for slot, sampling in enumerate(EVERYTHING):
        sampler.admit(slot, sampling, np.arange(7), 4)
    sampler.extend(3, (1, 2))
    counts = []
    for step in range(3):
        slots = list(range(len(EVERYTHING) - (step == 2)))
        logits = torch.empty(len(slots), VOCAB, device=GPU)
        masks = RowMasks([0, 2], np.zeros((2, VOCAB // 32), np.int32)) if step else None
        sampler.start(logits, slots, np.full(len(slots), 8 + step), masks)
        counts.append(len(copies.made))
    assert all(is_pinned and goes_on for is_pinned, goes_on in copies.made)
    assert 0 < counts[1] - counts[0] < counts[0]  # the same requests again: only positions and masks
    assert counts[2] - counts[1] > counts[1] - counts[0]


def test_on_a_cpu_nothing_is_copied() -> None:
    given, cpu = np.arange(3), torch.device("cpu")
    assert send(given, cpu).data_ptr() == given.ctypes.data
    tensor = torch.ones(2)
    assert send(tensor, cpu) is tensor
    assert send_list([1, 2], torch.int64, cpu).tolist() == [1, 2]


def test_a_copy_from_ordinary_memory_would_be_seen(copies: Copies) -> None:
    send_list([1, 2], torch.int64, GPU)
    torch.tensor([1, 2]).to(GPU, non_blocking=True)
    torch.tensor([1, 2]).pin_memory().to(GPU)
    assert copies.made == [(True, True), (False, True), (True, False)]

"""Experts that move between two ranks' GPUs, beside steps that compute with the resident ones.

One rank of two, on a made-up device; the other one, and the threads, are made up as well.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from penstock.eplb import Plan
from penstock.executor.protocol import EplbConfig
from penstock.executor.step import rebalance
from penstock.executor.step.rebalance import Rebalancer
from tests.support.pretended_gpu import PretendedGpu
from tests.support.pretended_memory import GPU
from tests.support.pretended_streams import Stream

LAYERS, EXPERTS, SLOTS = 4, 4, 4  # of both ranks


class Other:
    """The group, and the links to the other rank, which agrees with us and has every expert."""

    rank, world, is_first, device = 0, 2, True, GPU

    def __init__(self) -> None:
        self.streams: list[Stream] = []  # on which something went over the links

    def minimum(self, value: int) -> int:
        return value

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        tensor.sum()
        self._end()

    def receive(self, tensor: torch.Tensor, rank: int, timeout_s: float) -> None:
        tensor.fill_(7)
        self._end()

    def _end(self) -> None:
        """Let the host wait, as with NCCL."""
        self.streams.append(torch.cuda.current_stream(GPU))  # type: ignore[arg-type]
        self.streams[-1].synchronize()


class Expert:
    def __init__(self) -> None:
        self._weight = torch.zeros(300, device=GPU)

    def tensors(self) -> list[torch.Tensor]:
        return [self._weight]


@pytest.fixture
def open_rebalancer(
    gpu: PretendedGpu, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Rebalancer, list[SimpleNamespace]]]:
    """Open the first of two ranks whose threads run at once, with its layers."""

    class Thread:
        def __init__(self, target: Any, args: tuple[Any, ...], daemon: bool) -> None:
            self._run: Callable[[], object] = lambda: target(*args)

        def start(self) -> None:
            with gpu.thread("beside the steps"):
                self._run()

        def is_alive(self) -> bool:
            return False

    def opened(experts_of_slots: list[int], other: Other, **options: Any) -> tuple[Rebalancer, list[SimpleNamespace]]:
        placed = Plan.of(np.tile(experts_of_slots, (LAYERS, 1)), EXPERTS, 2)
        slots = [[Expert() for _ in range(placed.slots_per_rank)] for _ in range(LAYERS)]
        layers = [
            SimpleNamespace(num_experts=EXPERTS, expert_slots=each, counter=None, replace=Mock()) for each in slots
        ]
        config = EplbConfig(window=1, interval=1, target=1.0, min_gain_per_gib=0.0, **options)
        return Rebalancer(config, placed, layers, other, other), layers  # type: ignore[arg-type]

    monkeypatch.setattr(rebalance, "threading", SimpleNamespace(Thread=Thread))
    return opened


def test_experts_arrive_beside_and_move_between_steps(gpu: PretendedGpu, open_rebalancer: Callable[..., Any]) -> None:
    other = Other()
    rebalancer, layers = open_rebalancer(list(range(SLOTS)), other)
    loads = [torch.tensor(load).to(GPU) for load in ([9, 9, 1, 1], [1, 9, 1, 9])]
    moved = 0
    for step in range(80):
        rebalancer.boundary(20)
        for experts in layers:
            experts.counter.counts.add_(loads[step // 10 % 2])
            for expert in experts.expert_slots:
                expert.tensors()[0] * 2
        update = rebalancer.take_update()
        moved = moved if update is None else update.num_moved
    assert moved >= 2 * LAYERS and gpu.stream not in other.streams


def test_a_plan_that_changes_only_shares_of_copies_counts_apart(open_rebalancer: Callable[..., Any]) -> None:
    rebalancer, layers = open_rebalancer([0, 1, 2, 3, 1, 0], Other(), max_moves=0)
    for load in ([9, 1, 1, 5], [1, 1, 9, 1]):
        for _ in range(20):
            rebalancer.boundary(20)
            for experts in layers:
                experts.counter.counts.add_(torch.tensor(load).to(GPU))
    update = rebalancer.take_update()
    assert update.num_reweights >= 2 and update.num_skipped > 0, "the shares change with the load alone"
    assert update.num_rebalances == update.num_moved == update.num_aborted == 0
    assert all(experts.replace.call_count >= 2 for experts in layers)


def test_a_move_has_failed_after_any_error_in_its_thread() -> None:
    """Otherwise every later step would ask all ranks whether the expert has arrived."""
    fail = Mock(side_effect=MemoryError("no memory for what arrives"))
    here = cast(rebalance.Rebalancer, SimpleNamespace(_stream=None, _run=fail))
    move = rebalance.Move(layer=0, copies=[(0, [1])])
    with pytest.raises(MemoryError):
        rebalance.Rebalancer._bring(here, move)
    assert move.state == rebalance.FAILED

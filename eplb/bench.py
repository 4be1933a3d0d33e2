"""`penstock bench eplb`: how long plans take, how even they are, what drift costs in moves; tables and a heat map.

The published algorithm, re-stated from its definition, stands beside ours as the floor of quality; it is a loop in
Python, and its time is not compared. Times are CPU time of the planning thread, the median over repetitions.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.eplb import heatmap, workloads
from penstock.eplb.maps import Plan
from penstock.eplb.measure import balance, bound, rank_loads
from penstock.eplb.planner import plan
from penstock.eplb.reference import plan_by_definition
from penstock.eplb.replanner import replan
from penstock.eplb.transfer import transfers
from penstock.eplb.workloads import DRIFTING, DRIFTS, Cell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = sorted({cell.model for cell in workloads.CELLS})
    parser.add_argument("--model", choices=models, help="one model's shapes instead of all")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="loads per shape and kind (3)")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="timed plans per load (5)")
    parser.add_argument("--target", type=float, default=0.95, help="balance that replan aims at (0.95)")
    parser.add_argument("--image", type=Path, default=Path("eplb.png"), help="where the heat map goes (eplb.png)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rows as JSON")


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, must be at least 1")
    return int(text)


def run(args: argparse.Namespace) -> int:
    cells = [cell for cell in workloads.CELLS if args.model in (None, cell.model)]
    plans = [plan_row(cell, kind, args) for cell in cells for kind in workloads.KINDS]
    print_table("Plans from scratch", plans)
    moves = [drift_row(cell, drift, args) for cell in cells if cell in DRIFTING for drift in DRIFTS]
    print_table(f"Replanning to {args.target} after drift (mean over zipf and lognormal loads)", moves)
    draw(next(cell for cell in cells if cell in DRIFTING), args.image)
    if args.json:
        args.json.write_text(json.dumps({"plans": plans, "moves": moves}, indent=1))
    return 0


def make(cell: Cell, load: np.ndarray) -> Plan:
    locality = "group" if cell.nodes > 1 else "global"
    return plan(load, cell.slots, cell.ranks, groups=cell.groups, nodes=cell.nodes, locality=locality)


def plan_row(cell: Cell, kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Time and balance of plans from scratch, means over the seeds."""
    loads = [workloads.load(cell, kind, seed) for seed in range(args.seeds)]
    plans = [make(cell, load) for load in loads]
    published = [plan_by_definition(load, cell.slots, cell.ranks, cell.groups, cell.nodes) for load in loads]
    theirs = [Plan.of(placed, cell.experts, cell.ranks) for placed in published]
    return {
        "shape": cell.name,
        "load": kind,
        "plan ms": median_ms([lambda load=load: make(cell, load) for load in loads], args.repeats),  # type: ignore[misc]
        "balance": mean(balance(load, ours) for load, ours in zip(loads, plans, strict=True)),
        "published": mean(balance(load, other) for load, other in zip(loads, theirs, strict=True)),
        "bound": mean(bound(load, cell.slots, cell.ranks) for load in loads),
        "repeats": sum(num_repeats(ours) for ours in plans),
    }


def drift_row(cell: Cell, drift: str, args: argparse.Namespace) -> dict[str, Any]:
    """What replanning reaches, how much it moves and how long it takes."""
    before, after, moved, took = [], [], [], []
    for kind in ("zipf", "logn1"):
        for seed in range(args.seeds):
            old = make(cell, workloads.load(cell, kind, seed))
            later = workloads.drifted(cell, kind, seed, drift)
            start = time.thread_time()
            new = replan(later, old, target=args.target)
            took.append((time.thread_time() - start) * 1e3)
            before.append(balance(later, old))
            after.append(balance(later, new))
            moved.append(len(transfers(old, new, 1)) / old.phy2log.size)
    return {
        "shape": cell.name,
        "drift": drift,
        "stay": mean(before),
        "replan": mean(after),
        "moved %": 100 * statistics.fmean(moved),
        "replan ms": statistics.median(took),
    }


def draw(cell: Cell, path: Path) -> None:
    """Experts laid out in order, against a plan, for one load."""
    load = workloads.load(cell, "zipf", 0)
    in_order = np.tile(np.arange(cell.slots) % cell.experts, (cell.layers, 1))
    halves = Plan.of(in_order, cell.experts, cell.ranks), make(cell, load)
    heatmap.write(path, *(rank_loads(load.astype(float), half.phy2log, half.weight, half.ranks) for half in halves))
    values = [f"{balance(load, half).mean():.3f}" for half in halves]
    print(f"\n{path}: rank loads of {cell.name}, layers down, ranks across; left in order, right planned; "
          f"white is even, red is twice the mean; balance {values[0]} and {values[1]}")  # fmt: skip


def mean(values: Any) -> float:
    return float(np.mean([np.mean(value) for value in values]))


def num_repeats(plan: Plan) -> int:
    """Slots with an expert that their rank has in another slot too."""
    by_rank = np.sort(plan.phy2log.reshape(plan.layers, plan.ranks, -1), axis=2)
    return int((by_rank[..., 1:] == by_rank[..., :-1]).sum())


def median_ms(calls: list[Callable[[], object]], repeats: int) -> float:
    return statistics.median(_times_ms(calls, repeats))


def _times_ms(calls: list[Callable[[], object]], repeats: int) -> Iterator[float]:
    for call in calls:
        for _ in range(repeats):
            start = time.thread_time()
            call()
            yield (time.thread_time() - start) * 1e3


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    cells = [[_shown(value) for value in row.values()] for row in rows]
    widths = [max(map(len, column)) for column in zip([*rows[0]], *cells, strict=True)]
    print(f"\n{title}\n")
    for line in [[*rows[0]], *cells]:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _shown(value: Any) -> str:
    return (
        f"{value:.4f}"
        if isinstance(value, float) and value < 1.5
        else f"{value:.2f}"
        if isinstance(value, float)
        else str(value)
    )

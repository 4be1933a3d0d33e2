"""`penstock bench eplb`: how long plans take, how even they are, what drift costs in moves; tables and a heat map.

The published algorithm, re-stated from its definition, stands beside ours as the floor of quality; it is a loop in
Python, and its time is not compared. Times are CPU time of the planning thread, the median over repetitions.
"""

import argparse
import json
import os
import statistics
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.eplb import workloads
from penstock.eplb.maps import Plan, balance, rank_loads
from penstock.eplb.planner import bound, plan
from penstock.eplb.replanner import replan
from penstock.eplb.transfer import transfers
from penstock.eplb.workloads import CELLS, DRIFTING, DRIFTS, Cell, plan_by_definition

_CELL = 16  # pixels of the heat map, the last row and column of them a line
_GAP = 16  # between the two halves and around them: dark, so that even halves, which are white, stand out
_LINE, _GROUND = 205, 48  # greys
# Rank load / mean of its layer: from 0 over 1 to 2 and more.
_COLOURS = np.array([[33, 64, 154], [245, 245, 240], [178, 24, 43]], np.float64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = sorted({cell.model for cell in CELLS})
    parser.add_argument("--model", choices=models, help="one model's shapes instead of all")
    parser.add_argument("--seeds", type=at_least_one, default=3, help="loads per shape and kind (3)")
    parser.add_argument("--repeats", type=at_least_one, default=5, help="timed plans per load (5)")
    parser.add_argument("--target", type=float, default=0.95, help="balance that replan aims at (0.95)")
    parser.add_argument("--image", type=output_file, default="eplb.png", help="where the heat map goes (eplb.png)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="also write all rows as JSON")


def at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}, must be at least 1")
    return int(text)


def output_file(name: str) -> Path:
    """One that can be written, as far as is seen before minutes are spent on what it is for."""
    path = Path(name)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{name} cannot be written; a file in a folder that is there is expected")
    return path


def run(args: argparse.Namespace) -> int:
    if not 0 < args.target <= 1:
        raise SystemExit(f"penstock: target: {args.target} given; more than 0 and at most 1 is expected")
    cells = [cell for cell in CELLS if args.model in (None, cell.model)]
    plans = [plan_row(cell, kind, args.seeds, args.repeats) for cell in cells for kind in workloads.KINDS]
    print_table("Plans from scratch", plans)
    drifting = [cell for cell in cells if cell in DRIFTING]
    moves = [drift_row(cell, drift, args.seeds, args.target) for cell in drifting for drift in DRIFTS]
    print_table(f"Replanning to {args.target} after drift (mean over zipf and lognormal loads)", moves)
    rows = json.dumps({"plans": plans, "moves": moves}, indent=1)
    try:
        if args.json:
            args.json.write_text(rows)
        draw(drifting[0], args.image)
    except OSError as error:
        print(rows, flush=True)  # so that nothing is lost
        print(f"penstock: the results cannot be written: {error}; they are printed", file=sys.stderr)
        return 2
    return 0


def make(cell: Cell, load: NDArray[np.int64]) -> Plan:
    locality = "group" if cell.nodes > 1 else "global"
    return plan(load, cell.slots, cell.ranks, groups=cell.groups, nodes=cell.nodes, locality=locality)


def plan_row(cell: Cell, kind: str, num_seeds: int, repeats: int) -> dict[str, Any]:
    """Time and balance of plans from scratch, means over the seeds."""
    loads = [workloads.load(cell, kind, seed) for seed in range(num_seeds)]
    times_ms = [cpu_ms(make, cell, load)[0] for load in loads for _ in range(repeats)]
    plans = [make(cell, load) for load in loads]
    placed = [plan_by_definition(load, cell.slots, cell.ranks, cell.groups, cell.nodes) for load in loads]
    published = [Plan.of(each, cell.experts, cell.ranks) for each in placed]
    return {
        "shape": cell.name,
        "load": kind,
        "plan ms": statistics.median(times_ms),
        "balance": float(np.mean(list(map(balance, loads, plans)))),
        "published": float(np.mean(list(map(balance, loads, published)))),
        "bound": float(np.mean([bound(load, cell.slots, cell.ranks) for load in loads])),
        "repeats": sum(map(num_repeats, plans)),
    }


def drift_row(cell: Cell, drift: str, num_seeds: int, target: float) -> dict[str, Any]:
    """What replanning reaches, how much it moves and how long it takes."""
    before, after, moved, times_ms = [], [], [], []
    for kind in ("zipf", "logn1"):
        for seed in range(num_seeds):
            old = make(cell, workloads.load(cell, kind, seed))
            later = workloads.drifted(cell, kind, seed, drift)
            took_ms, new = cpu_ms(replan, later, old, target=target)
            times_ms.append(took_ms)
            before.append(balance(later, old))
            after.append(balance(later, new))
            moved.append(len(transfers(old, new, 1)) / old.phy2log.size)
    return {
        "shape": cell.name,
        "drift": drift,
        "stay": float(np.mean(before)),
        "replan": float(np.mean(after)),
        "moved %": 100 * statistics.fmean(moved),
        "replan ms": statistics.median(times_ms),
    }


def cpu_ms(call: Callable[..., Plan], *args: Any, **options: Any) -> tuple[float, Plan]:
    start = time.thread_time()
    made = call(*args, **options)
    return (time.thread_time() - start) * 1e3, made


def num_repeats(plan: Plan) -> int:
    """Slots with an expert that their rank has in another slot too."""
    by_rank = np.sort(plan.phy2log.reshape(plan.layers, plan.ranks, -1), axis=2)
    return int((by_rank[..., 1:] == by_rank[..., :-1]).sum())


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    lines = [[*rows[0]], *([_shown(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}\n")
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)))


def _shown(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if value < 1.5 else f"{value:.2f}"


def draw(cell: Cell, path: Path) -> None:
    """Experts laid out in order, against a plan, for one load: rank loads, layers down, ranks across."""
    load = workloads.load(cell, "zipf", 0)
    in_order = np.tile(np.arange(cell.slots) % cell.experts, (cell.layers, 1))
    plans = Plan.of(in_order, cell.experts, cell.ranks), make(cell, load)
    halves = [rank_loads(load.astype(float), each.phy2log, each.weight, each.ranks) for each in plans]
    width = cell.ranks * _CELL
    pixels = np.full((cell.layers * _CELL + 2 * _GAP, 2 * width + 3 * _GAP, 3), _GROUND, np.uint8)
    for half, left in zip(halves, (_GAP, width + 2 * _GAP), strict=True):
        squares = np.full((cell.layers, _CELL, cell.ranks, _CELL, 3), _LINE, np.uint8)
        squares[:, :-1, :, :-1] = colours(half)[:, None, :, None]
        pixels[_GAP:-_GAP, left : left + width] = squares.reshape(-1, width, 3)
    path.write_bytes(png(pixels))
    values = [f"{balance(load, each).mean():.3f}" for each in plans]
    print(f"\n{path}: rank loads of {cell.name}, layers down, ranks across; left in order, right planned; "
          f"white is even, red is twice the mean; balance {values[0]} and {values[1]}")  # fmt: skip


def colours(loads: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[layers, ranks] → [layers, ranks, 3]: blue below the layer's mean, white at it, red at twice the mean or above."""
    mean = loads.mean(axis=1, keepdims=True)
    relative = np.divide(loads, mean, out=np.ones_like(loads), where=mean > 0).clip(0, 2)
    channels = [np.interp(relative, (0, 1, 2), _COLOURS[:, channel]) for channel in range(3)]
    shades: NDArray[np.uint8] = np.rint(np.stack(channels, axis=-1)).astype(np.uint8)
    return shades


def png(pixels: NDArray[np.uint8]) -> bytes:
    """[height, width, 3] as an 8-bit RGB image."""
    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 9)), (b"IEND", b"")
    chunks = [struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
              for kind, data in parts]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)

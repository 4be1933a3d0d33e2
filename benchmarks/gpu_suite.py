"""A GPU in eight minutes: kernels beside what the device can do, models on made-up weights, transformers beside them.

    python -m benchmarks.gpu_suite [--parts kernels,decode] [--models qwen3-0.6b] [--budget-s 480]
    python -m benchmarks.gpu_suite --device cpu --tiny      (what a test runs: nothing of it is a measurement)
    python -m benchmarks.gpu_suite --page RESULT.json       (its decoding steps as the table of docs/performance.md)

Every model has a process and a share of the time; what one leaves over the next may use. A process that is late is
killed: what it had said stands, what it had not is listed as skipped. A JSON, written again after every process, and a
plot go to benchmarks/results.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pairs
from benchmarks.gpu import roofline
from benchmarks.gpu.processes import run_shares
from benchmarks.gpu.shapes import MODELS, SHARES
from benchmarks.published.report import Report, Row, plot

PARTS = ("twins", "kernels", "startup", "decode", "profile", "prefill", "throughput", "dependent", "peer")
MODEL_PARTS = PARTS[2:7]
FIRST = ("qwen3-0.6b", "llama-3.1-8b")  # what takes as long as all the rest again is measured for these two
TWINS_SHARE, KERNELS_SHARE, DEPENDENT_SHARE, PEER_SHARE = 45, 60, 30, 45
TWIN_PROCESSES = 8  # compiling takes longest
BOUNDS = {"gb_per_s": ("copy", "GB/s"), "tflop_per_s": ("matrix product", "TFLOP/s")}


class Job(NamedTuple):
    name: str
    module: str
    share: float
    argument: dict[str, Any]
    parts: tuple[str, ...]
    processes: int = 1


def main() -> int:
    args = read_arguments()
    if args.page is not None:
        roofline.write_page(args.page)
        return 0
    started_s, now = time.monotonic(), datetime.now(UTC)
    path = args.output / f"gpu-{now:%Y%m%d-%H%M%S}.json"
    args.output.mkdir(parents=True, exist_ok=True)
    jobs = list(plan(args))
    whole = sum(job.share for job in jobs)
    figures: dict[str, dict[str, Any]] = {}
    skipped: list[str] = []
    passed = 0.0
    for job in jobs:
        passed += job.share
        limit_s = started_s + args.budget_s * passed / whole - time.monotonic()
        print(f"== {job.name}: {', '.join(job.parts)}; at most {limit_s:.0f} s", flush=True)
        found, problem = run_shares(job.module, job.argument, job.processes, limit_s)
        figures[job.name] = found
        skipped += missing(job, found, problem)
        result = result_of(args, now, figures, skipped, time.monotonic() - started_s)
        fresh = path.with_suffix(".part")
        fresh.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
        fresh.replace(path)  # the time may be over at any moment
    for line in skipped:
        print(f"skipped: {line}")
    for line in result["wrong"]:
        print(f"wrong: {line}")
    print(f"{path}, {result['elapsed_s']:.0f} s in all")
    show(result, path)
    return 0 if any(figures.values()) and not result["wrong"] else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--models", default=",".join(SHARES), help=f"of {', '.join(SHARES)}; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument(
        "--dependent-launch", action="store_true", help="kernels may start before the last one's end; on a GPU only"
    )
    parser.add_argument("--budget-s", type=float, default=480, help="the end of the last part (default: 480)")
    parser.add_argument("--output", type=Path, default=pairs.RESULTS, help="folder for the JSON and the plot")
    parser.add_argument(
        "--page", type=Path, metavar="JSON", help="measure nothing: write the page's table of this result"
    )
    args = parser.parse_args()
    if args.dependent_launch and args.device == "cpu":
        parser.error("--dependent-launch: given with --device cpu; only a GPU's kernels can be launched so")
    args.parts, args.models = args.parts.split(","), args.models.split(",")
    for name, given, known in (("parts", args.parts, PARTS), ("models", args.models, MODELS)):
        for word in given:
            if word not in known:
                parser.error(f"--{name}: {word!r} given; known are {', '.join(known)}")
    return args


def plan(args: argparse.Namespace) -> Iterator[Job]:
    common = {"device": args.device, "tiny": args.tiny, "eager": args.eager, "dependent": args.dependent_launch}
    if "twins" in args.parts:
        processes = TWIN_PROCESSES if args.device == "cuda" else 1
        yield Job("twins", "twin_part", TWINS_SHARE, common, ("twins",), processes)
    if "kernels" in args.parts:
        yield Job("kernels", "kernel_part", KERNELS_SHARE, common, ("kernels",))
    parts = tuple(part for part in MODEL_PARTS if part in args.parts)
    for model in (model for model in SHARES if model in args.models):
        argument = common | {"model": model}
        if parts:
            yield Job(model, "model_part", SHARES[model], argument | {"parts": parts}, parts)
        if "dependent" in args.parts and model in FIRST and args.device == "cuda" and not args.dependent_launch:
            argument |= {"dependent": True, "parts": ("decode",)}
            yield Job(f"{model}, dependent launch", "model_part", DEPENDENT_SHARE, argument, ("decode",))
    for model in (model for model in FIRST if model in args.models and "peer" in args.parts):
        argument = common | {"model": model}
        yield Job(f"{model} in transformers", "peer_part", PEER_SHARE, argument, ("throughput",))


def missing(job: Job, found: dict[str, Any], problem: str | None) -> list[str]:
    """The job's parts of which nothing was heard, and single figures that it passed over itself."""
    reasons = [f"{job.name}: {name}: {figure['skipped']}" for name, figure in found.items() if "skipped" in figure]
    heard = set(job.parts) if found and job.module in ("kernel_part", "twin_part") else {n.split()[0] for n in found}
    unheard = [part for part in job.parts if part not in heard]
    if unheard or problem:
        what = ", ".join(unheard) or "the rest of its figures"
        reasons.append(f"{job.name}: {what}: {problem or 'nothing was said of it'}")
    return reasons


def result_of(
    args: argparse.Namespace, now: datetime, figures: dict[str, Any], skipped: list[str], elapsed_s: float
) -> dict[str, Any]:
    return {
        "bench": "gpu_suite",
        "date": now.isoformat(timespec="seconds"),
        "commit": pairs.commit(),
        "device": device_name(args.device),
        "machine": pairs.machine(),
        "versions": {name: version(name) for name in ("torch", "triton", "transformers", "numpy")},
        "tiny": args.tiny,
        "eager": args.eager,
        "dependent_launch": args.dependent_launch,
        "elapsed_s": round(elapsed_s, 1),
        "figures": figures,
        "skipped": skipped,
        "wrong": [
            f"{job}: {name}" for job, found in figures.items() for name, one in found.items() if one.get("ok") is False
        ],
    }


def show(result: dict[str, Any], path: Path) -> None:
    print("\n".join(roofline.table(result)))
    rows = bars(result["figures"])
    if rows:
        title = f"{result['device']}: " + ("tiny shapes, no measurement" if result["tiny"] else "made-up weights")
        report = Report("gpu", title, "the device's copy or product; transformers", "Penstock", "", rows)
        path.with_suffix(".svg").write_text(plot(report))


def bars(figures: dict[str, dict[str, Any]]) -> list[Row]:
    """Ours beside what it is held against: the copy or the product for kernels, transformers for requests."""
    rows = []
    kernels = figures.get("kernels", {})
    for name, figure in kernels.items():
        if "of_ceiling" not in figure:
            continue
        ceiling, unit = BOUNDS[figure["bound"]]
        rows.append(Row(name, kernels[ceiling][figure["bound"]], figure[figure["bound"]], unit))
    for model in figures:
        ours = figures[model].get("throughput", {}).get("total_tokens_per_s")
        theirs = figures.get(f"{model} in transformers", {}).get("throughput of transformers")
        if ours and theirs:
            rows.append(Row(f"{model}, 1,500 in, 150 out", theirs["total_tokens_per_s"], ours, "tokens/s"))
    return rows


def device_name(device: str) -> str:
    if device == "cpu":
        return pairs.machine()["cpu"]
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "a GPU that nvidia-smi does not name"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


if __name__ == "__main__":
    sys.exit(main())

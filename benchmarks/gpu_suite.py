"""A GPU in eight minutes: kernels beside what the device can do, models on made-up weights, transformers beside them.

    python -m benchmarks.gpu_suite [--parts kernels,decode] [--models qwen3-0.6b] [--budget-s 480]
    python -m benchmarks.gpu_suite --device cpu --tiny      (what a test runs: nothing of it is a measurement)
    python -m benchmarks.gpu_suite --page RESULT.json       (its decoding steps as the table of docs/performance.md)

Every model has a process and a share of the time; what one leaves over the next may use. A process that is late is
killed: what it had said stands, what it had not is listed as skipped. A JSON and a plot go to benchmarks/results.
"""

import argparse
import importlib.metadata
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pairs
from benchmarks.gpu import MARK, roofline
from benchmarks.gpu.shapes import MODELS, SHARES
from benchmarks.published.report import Report, Row, plot

ROOT = Path(__file__).parents[1]
PARTS = ("kernels", "startup", "decode", "prefill", "throughput", "peer")
MODEL_PARTS = PARTS[1:5]
PEERS = ("qwen3-0.6b", "llama-3.1-8b")  # transformers needs as long as all the rest: two suffice
KERNELS_SHARE, PEER_SHARE = 60, 45
BOUNDS = {"gb_per_s": ("copy", "GB/s"), "tflop_per_s": ("matrix product", "TFLOP/s")}


class Job(NamedTuple):
    name: str
    module: str
    share: float
    argument: dict[str, Any]
    parts: tuple[str, ...]


def main() -> int:
    args = read_arguments()
    if args.page is not None:
        roofline.write_page(args.page)
        return 0
    started_s = time.monotonic()
    jobs = list(plan(args))
    whole = sum(job.share for job in jobs)
    figures: dict[str, dict[str, Any]] = {}
    skipped: list[str] = []
    passed = 0.0
    for job in jobs:
        passed += job.share
        limit_s = started_s + args.budget_s * passed / whole - time.monotonic()
        print(f"== {job.name}: {', '.join(job.parts)}; at most {limit_s:.0f} s", flush=True)
        found, problem = run(job, limit_s)
        figures[job.name] = found
        skipped += missing(job, found, problem)
    for line in skipped:
        print(f"skipped: {line}")
    write(args, figures, skipped, time.monotonic() - started_s)
    return 0 if any(figures.values()) else 1


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
    if "kernels" in args.parts:
        yield Job("kernels", "kernel_part", KERNELS_SHARE, common, ("kernels",))
    parts = tuple(part for part in MODEL_PARTS if part in args.parts)
    for model in SHARES:
        if model not in args.models:
            continue
        if parts:
            argument = common | {"model": model, "parts": parts}
            yield Job(model, "model_part", SHARES[model], argument, parts)
        if "peer" in args.parts and model in PEERS:
            yield Job(f"{model} in transformers", "peer_part", PEER_SHARE, common | {"model": model}, ("throughput",))


def run(job: Job, limit_s: float) -> tuple[dict[str, Any], str | None]:
    """What the job's process said until it ended or its time was over, and why there is not more."""
    ends_s = time.monotonic() + limit_s
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    argument = json.dumps(job.argument | {"started_s": time.time()})
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.gpu.{job.module}", argument],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    found: dict[str, Any] = {}
    last = ""
    try:
        for line in lines(process, ends_s):
            if not line.startswith(MARK):
                last = line.strip() or last
                print(f"   {line}", flush=True)
                continue
            figure = json.loads(line.removeprefix(MARK))
            found[figure.pop("name")] = figure
            print(f"   {line.removeprefix(MARK)}", flush=True)
        code = process.poll()
    finally:
        process.kill()
        process.communicate()
    if code is None:
        return found, f"its {limit_s:.0f} s were over"
    return found, None if code == 0 else last or f"it ended with {code}"


def lines(process: subprocess.Popen[bytes], ends_s: float) -> Iterator[str]:
    """What the process prints, line by line, until it closes its output or the time is over."""
    assert process.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while (left_s := ends_s - time.monotonic()) > 0:
            if not selector.select(left_s):
                continue
            data = os.read(process.stdout.fileno(), 1 << 16)
            if not data:
                process.wait()
                break
            *whole, pending = (pending + data).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    if pending:
        yield pending.decode(errors="replace")


def missing(job: Job, found: dict[str, Any], problem: str | None) -> list[str]:
    """The job's parts of which nothing was heard, and single figures that it passed over itself."""
    reasons = [f"{job.name}: {name}: {figure['skipped']}" for name, figure in found.items() if "skipped" in figure]
    heard = {"kernels"} if job.parts == ("kernels",) and found else {name.split()[0] for name in found}
    unheard = [part for part in job.parts if part not in heard]
    if unheard or problem:
        what = ", ".join(unheard) or "the rest of its figures"
        reasons.append(f"{job.name}: {what}: {problem or 'nothing was said of it'}")
    return reasons


def write(args: argparse.Namespace, figures: dict[str, Any], skipped: list[str], elapsed_s: float) -> None:
    now = datetime.now(UTC)
    result = {
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
    }
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / f"gpu-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"{path}, {elapsed_s:.0f} s in all")
    print("\n".join(roofline.table(result)))
    rows = bars(figures)
    if rows:
        title = f"{result['device']}: " + ("tiny shapes, no measurement" if args.tiny else "made-up weights")
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

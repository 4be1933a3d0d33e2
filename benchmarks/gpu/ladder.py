"""The first half hour on a GPU: rungs from the cheapest question to the most expensive, each with a time limit.

    python -m benchmarks.gpu.ladder --output DIR [--rungs 1-7] [--again]
    python -m benchmarks.gpu.ladder --output DIR --device cpu --tiny      (a rehearsal: nothing of it is a measurement)

A rung that fails leaves its line and the next one begins. DIR/ladder.jsonl gets one JSON line for each as it ends,
DIR/ladder.log all that was printed. A rung whose line is there is not run again without --again. `make gpu-first` runs
what fits into ten minutes at the worst, `make gpu` as much again; docs/benchmarks.md says what each one shows.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO

from benchmarks import pairs
from benchmarks.gpu import machine
from benchmarks.gpu.processes import run_shares


class Rung(NamedTuple):
    name: str
    limit_s: float
    module: str
    argument: Mapping[str, Any] = MappingProxyType({})
    processes: int = 1  # parallel processes, each with its share, because compiling takes long at first


RUNGS = tuple(Rung(*fields) for fields in json.loads(Path(__file__).with_suffix(".json").read_text()))
CPU_PATIENCE = 10.0  # a rehearsal is slow, and may share its cores


def main() -> int:
    args = read_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    record = args.output / "ladder.jsonl"
    known = [] if args.again else list(read_lines(record))
    with (args.output / "ladder.log").open("a") as log:
        hear = partial(say, log)
        for problem in machine.prepare():
            hear(problem)
        found = []
        for number in args.rungs:
            rung = RUNGS[number - 1]
            line = next((line for line in known if is_of(line, number, args)), None)
            if line is None:
                line = climb(number, rung, args, hear)
                with record.open("a") as file:
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            else:
                hear(f"== {number} {rung.name}: has its line of {line['date']}")
            found.append(line)
        for line in found:
            hear(summary(line))
        for text in roofline([*read_lines(record)][::-1]):
            hear(text)
    return 0 if all(line["ok"] for line in found) else 1


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the lines; made if it is not there")
    parser.add_argument("--rungs", type=rungs_of, default="1-7", help=f"of 1 to {len(RUNGS)}: 1-7 (the default), 5,6")
    parser.add_argument("--again", action="store_true", help="also rungs that have their line")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see that it runs")
    return parser.parse_args()


def rungs_of(text: str) -> list[int]:
    """Parse rung numbers: 1-3,5 → [1, 2, 3, 5]."""
    rungs: list[int] = []
    for part in text.split(","):
        if (bounds := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is None:
            raise argparse.ArgumentTypeError(f"{text!r} given; as in 1-3,5")
        rungs += range(int(bounds[1]), int(bounds[2] or bounds[1]) + 1)
    if not all(1 <= number <= len(RUNGS) for number in rungs):
        raise argparse.ArgumentTypeError(f"{text!r} given; there are 1 to {len(RUNGS)}")
    return rungs


def read_lines(record: Path) -> Iterator[dict[str, Any]]:
    """Yield the recorded lines, latest first, without a line that was cut off when the machine was taken away."""
    for text in reversed(record.read_text().splitlines() if record.exists() else []):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def is_of(line: dict[str, Any], number: int, args: argparse.Namespace) -> bool:
    return [line["rung"], line["device"], line["tiny"]] == [number, args.device, args.tiny]


def climb(number: int, rung: Rung, args: argparse.Namespace, hear: Any) -> dict[str, Any]:
    limit_s = rung.limit_s * (CPU_PATIENCE if args.device == "cpu" else 1)
    hear(f"== {number} {rung.name}: at most {limit_s:.0f} s")
    started_s = time.monotonic()
    common = {"device": args.device, "tiny": args.tiny, "dependent": True, "output": str(args.output.resolve())}
    count = rung.processes if args.device == "cuda" else 1
    figures, problem = run_shares(rung.module, {**common, **rung.argument}, count, limit_s, hear)
    wrong = [name for name, figure in figures.items() if figure.get("ok") is False]
    return {
        "rung": number,
        "name": rung.name,
        "ok": not problem and not wrong,
        "problem": problem,
        "wrong": wrong,
        "skipped": {name: figure["skipped"] for name, figure in figures.items() if "skipped" in figure},
        "seconds": round(time.monotonic() - started_s, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": pairs.commit(),
        "device": args.device,
        "tiny": args.tiny,
        "figures": figures,
    }


def say(log: TextIO, text: str) -> None:
    """Print and log a line immediately, because the process may be killed at any time."""
    print(text, flush=True)
    print(text, file=log, flush=True)


def summary(line: dict[str, Any]) -> str:
    said = [line["problem"]] if line["problem"] else []
    said += [f"wrong: {', '.join(line['wrong'][:8])}"] if line["wrong"] else []
    said += [f"skipped: {', '.join(list(line['skipped'])[:8])}"] if line["skipped"] else []
    verdict = "ok" if line["ok"] else "FAILED"
    return f"{line['rung']} {line['name']}: {verdict}, {line['seconds']:.0f} s. {'. '.join(said)}".rstrip()


def roofline(lines: list[dict[str, Any]]) -> list[str]:
    """Return the Markdown table of docs/performance.md: the time of each decoding step and the time to read its bytes at
    the speed of a read. Device and speed are the first rung's, steps those of the rungs of whole models."""
    rungs = {line["name"]: line for line in lines if not line["tiny"]}
    device = rungs.get("device", {}).get("figures", {})
    read = device.get("read", {}).get("gb_per_s")
    whole = {name.removeprefix("whole "): line for name, line in rungs.items() if name.startswith("whole ")}
    rows = []
    for model, line in whole.items():
        for name, figure in line["figures"].items():
            if read and name.startswith("decode ") and "gb" in figure:
                least_ms = figure["gb"] / read * 1e3
                rows.append(
                    f"| {model} | {name.removeprefix('decode ')} | {figure['gb']:.3g} | {least_ms:.3g} "
                    f"| {figure['step_ms']:.3g} | {least_ms / figure['step_ms']:.0%} | {figure['tokens_per_s']:,.0f} |"
                )
    if not rows:
        return []
    date = max(line["date"] for line in whole.values())
    versions = ", ".join(f"{name} {device['versions'][name]}" for name in ("torch", "triton", "transformers"))
    return [
        f"{device['device']['model']}, {date}, {versions}; a read moves {read:,.0f} GB/s. Made-up weights.",
        "",
        "| model | requests at positions | GB to read | ms at the read's speed | ms a step | share | tokens/s |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


if __name__ == "__main__":
    sys.exit(main())

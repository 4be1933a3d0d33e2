"""The last rung: models with random weights one after another.

    python -m benchmarks.gpu.ladder --output DIR --rungs 9 --suite='--parts decode,prefill --models qwen3-0.6b'

Every model has a process and a share of the time; what one leaves over the next may use. One that is late is killed:
what it had reported stands, what it had not is reported as skipped.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.figures import open_device, report
from benchmarks.gpu.processes import Figures, run_part
from benchmarks.gpu.shapes import MODELS, SHARES

PARTS = ("startup", "decode", "prefill")
MARGIN_S = 15.0  # of the rung's time


def main(job: dict[str, Any]) -> None:
    started_s = time.monotonic()
    open_device(job)
    options = read_options(job["suite"])
    models = [model for model in SHARES if model in options.models]
    common = {name: job[name] for name in ("device", "tiny", "dependent")} | {"engine": True}
    passed, whole = 0.0, sum(SHARES[model] for model in models)
    for model in models:
        passed += SHARES[model]
        limit_s = started_s + (job["limit_s"] - MARGIN_S) * passed / whole - time.monotonic()
        print(f"{model}: {', '.join(options.parts)}; at most {limit_s:.0f} s", flush=True)
        argument = common | {"models": [model], "parts": options.parts}
        found, problem = run_part("model_part", argument, limit_s, lambda line: print(line, flush=True))
        for name, figure in found.items():
            report(f"{model}: {name}", **figure)
        if reason := missing(options.parts, found, problem):
            report(f"{model}: the rest", skipped=reason)


def read_options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="--suite")
    known = {"parts": PARTS, "models": tuple(MODELS)}
    for name, values in known.items():
        parser.add_argument(f"--{name}", default=",".join(values), help=f"of {', '.join(values)}; default: all")
    args = parser.parse_args(words)
    for name, values in known.items():
        given = getattr(args, name).split(",")
        for word in given:
            if word not in values:
                parser.error(f"--{name}: {word!r} given; known are {', '.join(values)}")
        setattr(args, name, given)
    return args


def missing(parts: Sequence[str], figures: Figures, problem: str | None) -> str | None:
    """Return why some of the parts reported nothing, or None if all did."""
    reported = {name.split()[0] for name in figures}
    unheard = ", ".join(part for part in parts if part not in reported)
    if not unheard and not problem:
        return None
    return f"{unheard or 'the rest of its figures'}: {problem or 'it reported nothing of it'}"

"""The last rung: models with random weights one after another, each alone or compared with transformers.

    python -m benchmarks.gpu.ladder --output DIR --rungs 9 --suite='--parts decode,prefill --models qwen3-0.6b'

Every model has a process and a share of the time; what one leaves over the next may use. One that is late is killed:
what it had reported stands, what it had not is reported as skipped.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.gpu.figures import open_device, report
from benchmarks.gpu.processes import Figures, run_part
from benchmarks.gpu.shapes import MODELS, SHARES

PARTS = ("startup", "decode", "profile", "prefill", "throughput", "concurrent", "peer")
BESIDE = ("qwen3-0.6b", "llama-3.1-8b")  # the others would take too long with transformers
CONCURRENT = "qwen3-8b"  # the model that other engines publish such figures of
PEER_SHARE = 45
MARGIN_S = 15.0  # of the rung's time


class Job(NamedTuple):
    name: str
    module: str
    share: float
    argument: dict[str, Any]
    parts: tuple[str, ...]


def main(job: dict[str, Any]) -> None:
    started_s = time.monotonic()
    open_device(job)
    jobs = plan(job)
    whole = sum(each.share for each in jobs)
    passed = 0.0
    for each in jobs:
        passed += each.share
        limit_s = started_s + (job["limit_s"] - MARGIN_S) * passed / whole - time.monotonic()
        print(f"{each.name}: {', '.join(each.parts)}; at most {limit_s:.0f} s", flush=True)
        found, problem = run_part(each.module, each.argument, limit_s, lambda line: print(line, flush=True))
        for name, figure in found.items():
            report(f"{each.name}: {name}", **figure)
        if reason := missing(each, found, problem):
            report(f"{each.name}: the rest", skipped=reason)


def plan(job: dict[str, Any]) -> list[Job]:
    args = read_options(job["suite"])
    common = {name: job[name] for name in ("device", "tiny", "dependent")} | {"engine": True}
    parts = tuple(part for part in PARTS[:-1] if part in args.parts)
    models = [model for model in SHARES if model in args.models]
    jobs = []
    if parts:
        for model in models:
            own = tuple(part for part in parts if part != "concurrent" or model == CONCURRENT)
            jobs.append(Job(model, "model_part", SHARES[model], common | {"models": [model], "parts": own}, own))
    for model in [model for model in BESIDE if model in models and "peer" in args.parts]:
        name = f"{model} in transformers"
        jobs.append(Job(name, "peer_part", PEER_SHARE, common | {"model": model}, ("throughput",)))
    return jobs


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


def missing(job: Job, found: Figures, problem: str | None) -> str | None:
    """Return why parts of the job reported nothing, or None if all did."""
    reported = {name.split()[0] for name in found}
    unheard = ", ".join(part for part in job.parts if part not in reported)
    if not unheard and not problem:
        return None
    return f"{unheard or 'the rest of its figures'}: {problem or 'it reported nothing of it'}"

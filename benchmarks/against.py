"""Measures what users on a CPU notice, in this checkout and in an earlier revision by turns: a ratio for each figure.

    python benchmarks/against.py                          this checkout alone, the short form that `make bench` runs
    python benchmarks/against.py --revision main [--pairs 10] [--figures decode-1 start]
    python benchmarks/against.py --tree DIR               beside a checkout that is already there, with its extension built

The figures: tokens per second of the default model as it is installed (one request, 16 requests, prompts), and of one
request to a model with Qwen3.5-0.8B's shape and random weights; seconds from process start to the first token over
HTTP; requests and chunks per CPU second of the router. A ratio above 1 means that this checkout is better. A revision
is unpacked into a temporary folder and gets its own extension; uncommitted changes of this checkout are measured too.
"""

import contextlib
import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench_route import BACKEND, per_cpu_second
from gateways import ROUTE
from gpu.shapes import HYBRID, model_folder
from pairs import ROOT, Asked, answers, environment, is_ready, main, rounded, rounds, serving, summary
from peers import BATCHES, DEFAULT_VOCAB, Batch

from penstock.engine.commands.bench import startup

SERVE = (sys.executable, "-P", "-m", "penstock.cli", "serve", "--port", "{port}")
BATCH_FIGURES = {
    "decode-1": BATCHES["installed-batch1"],
    "decode-16": BATCHES["installed-batch16"],
    "prefill": BATCHES["installed-prefill"],
    "hybrid-1": Batch("hybrid", 1, 256, 32, "output"),
}
FIGURES = [*BATCH_FIGURES, "start", "router-requests", "router-chunks"]
ROUTER_SECONDS = 3.0

Sides = dict[str, Callable[[], float]]


def against(
    revision: str | None = None, tree: str | None = None, pairs: int = 10, figures: list[str] = FIGURES
) -> dict[str, Any]:
    for name in figures:
        if name not in FIGURES:
            raise SystemExit(f"--figures: {name} given; known are {', '.join(FIGURES)}")
    found = {}
    with tempfile.TemporaryDirectory() as scratch, model_folder(HYBRID) as model:
        trees = {"ours": ROOT}
        if tree is not None or revision is not None:
            trees["theirs"] = (
                Path(tree).resolve() if tree is not None else unpacked(str(revision), Path(scratch, "tree"))
            )
        for name in figures:
            with sides_of(name, trees, model) as (sides, unit):
                rounds(sides, 1)  # warms up
                values = rounds(sides, pairs if len(sides) > 1 else 1)
            if len(sides) > 1:
                found[name] = summary(name, values, unit)
            else:
                found[name] = {"ours": rounded(statistics.median(values["ours"]))}
                print(f"{name}: {found[name]['ours']:,.4g} {unit}", flush=True)
    return {"against": revision or (Path(tree).name if tree else None), "pairs": pairs, "figures": found}


@contextlib.contextmanager
def sides_of(figure: str, trees: dict[str, Path], model: str) -> Iterator[tuple[Sides, str]]:
    """Start the processes that measure one figure in each tree; yield a measurement for each tree, and the unit."""
    with contextlib.ExitStack() as stack:
        if figure in BATCH_FIGURES:
            batch = BATCH_FIGURES[figure]
            engines = {side: stack.enter_context(engine(root, batch, model)) for side, root in trees.items()}
            unit = "prompt tok/s" if batch.measure == "prefill" else "tok/s"
            yield {side: partial(batch.value, each.ask) for side, each in engines.items()}, unit
        elif figure == "start":
            start = partial(startup.first_token_s, SERVE)
            yield {side: partial(start, env=environment(root)) for side, root in trees.items()}, "s"
        else:
            backend = stack.enter_context(serving("backend", BACKEND, answers))
            command = (*ROUTE, "--backend", backend.url)
            routers = {
                side: stack.enter_context(serving(side, command, is_ready, env=environment(root)))
                for side, root in trees.items()
            }
            streams = figure == "router-chunks"
            sides = {side: partial(per_cpu_second, each, streams, ROUTER_SECONDS) for side, each in routers.items()}
            yield sides, "per CPU second"


def engine(root: Path, batch: Batch, model: str) -> Asked:
    """Start a process of that tree that runs batches with the default or the hybrid model."""
    job: dict[str, Any] = {"engine": "penstock", "model": None, "vocab_size": DEFAULT_VOCAB, "options": {}}
    if batch.model == "hybrid":
        options = {"load_format": "dummy", "dtype": "bfloat16"}
        job |= {"model": model, "vocab_size": HYBRID["vocab_size"], "options": options}
    job["options"] |= {"max_model_len": 2048}
    return Asked(sys.executable, str(root / "benchmarks/offline_job.py"), json.dumps(job), env=environment(root))


def unpacked(revision: str, folder: Path) -> Path:
    """Unpack a revision and build its extension."""
    print(f"building {revision}", flush=True)
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", revision], check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="tar")
    subprocess.run([sys.executable, "csrc/build.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    main(__doc__, "against", against)

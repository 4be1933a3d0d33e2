"""The last rung on a CPU at sizes that measure nothing: it runs to its end, and reports each part that is missing."""

import json
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks.gpu import ladder, suite_part
from benchmarks.gpu.batches import fill
from benchmarks.gpu.figures import Timer
from benchmarks.gpu.processes import Figures, run_part
from benchmarks.gpu.shapes import MODELS, SHARES, config_of, decode_bytes
from benchmarks.pairs import MARK

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import find_architecture

JOB = {"device": "cpu", "tiny": True, "dependent": False, "limit_s": 600.0}


def run(capsys: pytest.CaptureFixture[str], *options: str, **job: Any) -> tuple[Figures, str]:
    """Return its figures, and everything that it prints."""
    suite_part.main(JOB | {"suite": options} | job)
    printed = capsys.readouterr().out
    lines = [json.loads(line.removeprefix(MARK)) for line in printed.splitlines() if line.startswith(MARK)]
    return {line.pop("name"): line for line in lines}, printed


@pytest.mark.slow
def test_it_measures_the_selected_parts(capsys: pytest.CaptureFixture[str]) -> None:
    parts = "startup,decode,prefill,throughput,concurrent"
    figures, printed = run(capsys, "--parts", parts, "--models", "qwen3-8b")
    assert {name.split()[1] for name in figures} == {"startup", "decode", "prefill", "throughput", "concurrent"}
    assert all(name.startswith("qwen3-8b: ") and "skipped" not in figure for name, figure in figures.items())
    assert figures["qwen3-8b: throughput"]["output_tokens_per_s"] > 0
    assert "qwen3-8b: startup, decode, prefill, throughput, concurrent; at most" in printed


def test_decoding_steps_are_printed_beside_the_speed_of_a_read() -> None:
    step = {"step_ms": 0.5, "tokens_per_s": 64_000.0, "gb": 1.0}
    versions = dict.fromkeys(("torch", "triton", "transformers"), "9")
    device = {"read": {"gb_per_s": 4000.0}, "device": {"model": "a card"}, "versions": versions}
    first: dict[str, Any] = {"name": "device", "tiny": False, "figures": device}
    steps = {"opt: decode 32 at 1024": step, "opt: rest": {}}
    last = {"name": "suite", "tiny": False, "date": "today", "figures": steps}
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


def test_a_late_model_is_killed_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    limit_s = suite_part.MARGIN_S + 0.2
    figures, _ = run(capsys, "--models", "qwen3-8b", "--parts", "decode", limit_s=limit_s)
    assert figures == {"qwen3-8b: the rest": {"skipped": "decode: its 0 s were over"}}


@pytest.mark.slow
def test_a_part_that_fails_leaves_its_figures_and_its_last_line() -> None:
    figures, problem = run_part("model_part", JOB | {"models": ["absent"], "parts": ["decode"], "engine": True}, 600)
    assert figures == {} and problem == "KeyError: 'absent'"
    assert suite_part.missing(["decode"], figures, problem) == "decode: KeyError: 'absent'"
    partly: Figures = {"decode 1 at 24": {"step_ms": 1.0}}
    assert suite_part.missing(["decode"], partly, None) is None
    assert suite_part.missing(["decode"], partly, "out of memory") == "the rest of its figures: out of memory"


def test_an_unknown_part_or_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option, allowed in (("--parts", "decode"), ("--models", "qwen3-8b")):
        with pytest.raises(SystemExit):
            suite_part.read_options([option, "nothing"])
        message = capsys.readouterr().err
        assert f"{option}: 'nothing' given; known are" in message and allowed in message


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_configuration_can_be_read(name: str, is_tiny: bool) -> None:
    assert name in SHARES
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

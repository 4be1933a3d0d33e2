"""The GPU suite on a CPU at sizes that measure nothing: that it runs to its end, and is honest about what it did not."""

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from benchmarks import gpu_suite
from benchmarks.gpu import roofline
from benchmarks.gpu.batches import fill
from benchmarks.gpu.processes import run_part
from benchmarks.gpu.shapes import MODELS, SHARES, config_of, decode_bytes

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import find_architecture


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    words = ["gpu_suite", "--device", "cpu", "--tiny", "--output", str(folder), *options]
    monkeypatch.setattr(sys, "argv", words)
    code = gpu_suite.main()
    (path,) = folder.glob("gpu-*.json")
    return code, json.loads(path.read_text())


def test_it_measures_the_parts_that_are_asked_for_and_draws_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = "kernels,startup,decode,prefill,throughput"
    code, found = run(monkeypatch, tmp_path, "--parts", parts, "--models", "qwen3-0.6b")
    assert code == 0 and found["skipped"] == [] and found["tiny"]
    assert {"device", "versions", "date", "commit"} <= found.keys()
    assert list(found["figures"]) == ["kernels", "qwen3-0.6b"]
    kernels, model = found["figures"]["kernels"], found["figures"]["qwen3-0.6b"]
    assert {"copy", "matrix product", "linear 8 × 32 to 64", "add and norm", "sampling, drawn"} <= kernels.keys()
    assert all(figure["of_ceiling"] > 0 for figure in kernels.values() if "bound" in figure)
    assert {name.split()[0] for name in model} == {"startup", "decode", "prefill", "throughput"}
    assert model["throughput"]["output_tokens_per_s"] > 0
    (drawing,) = tmp_path.glob("gpu-*.svg")
    bars = list(ElementTree.parse(drawing).iter("{http://www.w3.org/2000/svg}rect"))
    assert len(bars) == 2 * (len(kernels) - 2)
    assert "tiny shapes, no measurement" in drawing.read_text()
    assert "== qwen3-0.6b: startup, decode, prefill, throughput; at most" in capsys.readouterr().out


def test_the_page_gets_the_decoding_steps_of_a_result_beside_a_copy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page, saved = tmp_path / "performance.md", tmp_path / "result.json"
    assert all(mark in roofline.PAGE.read_text() for mark in roofline.MARKS)
    page.write_text(f"before\n{roofline.MARKS[0]}\nold\n{roofline.MARKS[1]}\nafter\n")
    monkeypatch.setattr(roofline, "PAGE", page)
    monkeypatch.setattr(sys, "argv", ["gpu_suite", "--page", str(saved)])
    step = {"step_ms": 0.5, "tokens_per_s": 64_000.0, "gb": 1.0}
    result = {
        "device": "a card",
        "date": "today",
        "versions": {"torch": "9"},
        "tiny": False,
        "figures": {"kernels": {"copy": {"gb_per_s": 4000.0}}, "opt": {"decode 32 at 1024": step, "prefill 1": {}}},
    }
    saved.write_text(json.dumps(result))
    for _ in range(2):
        assert gpu_suite.main() == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith(f"{roofline.MARKS[1]}\nafter\n") and "old" not in text
    assert "| opt | 32 at 1024 | 1 | 0.25 | 0.5 | 50% | 64,000 |" in text
    for change in ({"tiny": True}, {"figures": {"opt": {"decode 32 at 1024": step}}}):
        saved.write_text(json.dumps(result | change))
        with pytest.raises(SystemExit, match="result.json"):
            gpu_suite.main()


def test_made_up_pages_hold_numbers_of_their_dtype() -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn):
        pages = torch.zeros(300, 2, 16, 8).to(dtype)
        fill(pages)
        assert pages.float().isfinite().all() and pages.float().std() == pytest.approx(1, abs=0.05)


def test_kernels_start_early_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--dependent-launch")


def test_what_is_late_is_killed_and_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, "--models", "opt-125m", "--parts", "decode", "--budget-s", "0.2")
    assert code == 1 and found["figures"] == {"opt-125m": {}}
    assert found["skipped"] == ["opt-125m: decode: its 0 s were over"]
    assert not list(tmp_path.glob("*.svg"))


def test_a_part_that_fails_leaves_what_it_had_said_and_its_last_words(tmp_path: Path) -> None:
    argument = {
        "model": "opt-125m",
        "device": "cpu",
        "tiny": True,
        "eager": False,
        "dependent": False,
        "parts": ["decode", "nothing"],
    }
    job = gpu_suite.Job("opt-125m", "model_part", 1, argument | {"model": "absent"}, ("decode",))
    found, problem = run_part(job.module, job.argument, 600)
    assert found == {} and problem == "KeyError: 'absent'"
    assert gpu_suite.missing(job, found, problem) == ["opt-125m: decode: KeyError: 'absent'"]
    partly = {"decode 1 at 24": {"step_ms": 1.0}, "decode 3 at 24": {"skipped": "the cache is full"}}
    assert gpu_suite.missing(job, partly, None) == ["opt-125m: decode 3 at 24: the cache is full"]
    assert gpu_suite.missing(job, {"decode 1 at 24": {}}, "out of memory") == [
        "opt-125m: the rest of its figures: out of memory"
    ]


@pytest.mark.slow
def test_transformers_answers_the_same_requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code, found = run(monkeypatch, tmp_path, "--models", "qwen3-0.6b", "--parts", "throughput,peer")
    assert code == 0 and found["skipped"] == []
    theirs = found["figures"]["qwen3-0.6b in transformers"]["throughput of transformers"]
    ours = found["figures"]["qwen3-0.6b"]["throughput"]
    assert theirs["requests"] == ours["requests"] and theirs["output_tokens_per_s"] > 0


def test_an_unknown_part_or_model_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option, known in (("--parts", "kernels"), ("--models", "opt-125m")):
        with pytest.raises(SystemExit):
            run(monkeypatch, tmp_path, option, "nothing")
        message = capsys.readouterr().err
        assert f"{option}: 'nothing' given; known are" in message and known in message


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_configuration_is_one_we_can_read(name: str, is_tiny: bool) -> None:
    assert name in SHARES
    config = config_of(name, is_tiny)
    _, architecture = find_architecture(Fields(config, name))
    assert architecture.read_spec(Fields(config, name)).hidden_size == config["hidden_size"]


def test_a_step_reads_of_the_experts_only_those_that_are_chosen() -> None:
    config = MODELS["qwen3-30b-a3b"]
    whole = 61_064_245_248  # its weights in bfloat16
    one, many = (decode_bytes(config, whole, 2, batch) for batch in (1, 10_000))
    assert one == pytest.approx(6.1e9, rel=0.05)  # 3.0 billion active ones, without the embedding
    assert many == pytest.approx(whole - 151_936 * 2048 * 2, rel=0.001)
    assert decode_bytes(MODELS["qwen3-0.6b"], 1000, 2, 5) == 1000

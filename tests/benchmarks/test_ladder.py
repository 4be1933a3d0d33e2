"""The ladder of a first half hour on a GPU, rehearsed on a CPU at sizes that measure nothing: it needs no package that a
bare machine lacks, goes on after a failure, and resumes; a part runs to its end or says why not."""

import argparse
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from benchmarks import pairs
from benchmarks.gpu import beside, ladder, machine, memcheck_part, pytest_part
from benchmarks.gpu.batches import fill
from benchmarks.gpu.figures import Timer
from benchmarks.gpu.processes import MARGIN_S, run_part
from benchmarks.gpu.shapes import MODELS, config_of, decode_bytes
from packaging.utils import canonicalize_name

from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import find_architecture
from tests.support.refusals import cases

ON_THE_MACHINE = (*cases(__file__, "packages of a machine"), *machine.PACKAGES)


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(sys, "argv", ["ladder", "--output", str(folder), *options])
    monkeypatch.setattr(machine, "prepare", list)
    code = ladder.main()
    return code, [json.loads(line) for line in (folder / "ladder.jsonl").read_text().splitlines()]


def lacking_modules() -> set[str]:
    """Return the modules of our dependencies that a bare machine need not have."""
    project = tomllib.loads((machine.ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    lacking = {canonicalize_name(re.split(r"[\s<>=\[]", line)[0]) for line in lines}
    lacking -= {canonicalize_name(name) for name in ON_THE_MACHINE}
    modules = importlib.metadata.packages_distributions()
    return {name for name, owners in modules.items() if {canonicalize_name(owner) for owner in owners} <= lacking}


QUICK = "1,6"  # one rung of each kind: measured here, and in a process of kernels


@pytest.mark.nightly
@pytest.mark.parametrize("rungs", [QUICK, "1-9,15"])
def test_rungs_run_on_a_bare_machine(rungs: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lacking = lacking_modules()
    assert {"ray", "openai", "jsonschema"} <= lacking and not {"msgspec", "torch", "cffi"} & lacking
    for name in lacking:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('No module named {name}')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-c", "import ray"]
    absent = subprocess.run(command, env=machine.environment(), capture_output=True, text=True)
    assert "No module named ray" in absent.stderr
    code, lines = run(monkeypatch, tmp_path, "--device", "cpu", "--tiny", "--rungs", rungs)
    assert [line["name"] for line in lines] == [ladder.RUNGS[number - 1].name for number in ladder.rungs_of(rungs)]
    assert code == 0 and all(line["ok"] and line["problem"] is None and line["figures"] for line in lines)
    figures = {line["name"]: line["figures"] for line in lines}
    assert figures["device"]["read"]["gb_per_s"] > 0 and figures["device"]["lacking"]["extension"] is None
    assert "torch's prefill by math, 2 × 24" in figures["ceilings"]
    if rungs == QUICK:
        return
    assert len(figures["twins"]) > 25 or "twins" in figures["twins"]
    assert [figures[name]["tests"]["exit_code"] for name in ("kernel tests", "graphs")] == [0, 0]
    shown = figures["decoding"]["llama-3.1-8b, dependent launch: profile 3 at 24"]["kernels"]
    assert len(shown) == 15 and shown == sorted(shown, key=lambda each: -each["us"])
    assert {"aten::index_select", "aten::add"} <= {each["kernel"] for each in shown}
    assert figures["whole qwen3-0.6b"]["decode 3 at 24"]["step_ms"] > 0
    compared = figures["switches"].values()  # without a GPU both ways are the same, and have no ratio
    assert len(compared) == 6 and all(figure.keys() == {"off_ms", "on_ms"} for figure in compared)


@pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.name)
def test_every_rung_reports_that_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, rung: ladder.Rung) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memcheck_part, "find_sanitizer", lambda: "/bin/false")
    job = {"device": "cuda", "tiny": False, "dependent": False, "share": [0, 1], "output": "."}
    part = importlib.import_module(f"benchmarks.gpu.{rung.module}")
    with pytest.raises(SystemExit, match="sees no GPU"):
        part.main(job | {"limit_s": 60.0} | dict(rung.argument))


@pytest.mark.slow
def test_a_failed_rung_leaves_a_line_and_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, lines = run(monkeypatch, tmp_path, "--rungs", "6,1")
    assert code == 1 and [line["rung"] for line in lines] == [6, 1]
    for line in lines:
        assert not line["ok"] and "sees no GPU" in line["problem"]
    assert "versions" in lines[1]["figures"]  # reported before the failure
    assert "1 device: FAILED" in (tmp_path / "ladder.log").read_text()


def test_a_rung_is_run_once_unless_it_is_requested_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[str] = []

    def pretend(module: str, argument: dict[str, Any], count: int, limit_s: float, hear: Any) -> Any:
        started.append(module)
        return {"a figure": {"ok": module != "kernel_part"}, "another": {"skipped": "no tool"}}, None

    monkeypatch.setattr(ladder, "run_shares", pretend)
    code, lines = run(monkeypatch, tmp_path, "--rungs", "1,6")
    assert code == 1 and [line["ok"] for line in lines] == [True, False]
    assert lines[1]["wrong"] == ["a figure"] and lines[1]["skipped"] == {"another": "no tool"}
    record = tmp_path / "ladder.jsonl"
    record.write_text(record.read_text() + '{"rung": 2, "name"\n')  # the machine was taken away here
    for code, num_started, options in cases(__file__, "further ladders"):
        monkeypatch.setattr(sys, "argv", ["ladder", "--output", str(tmp_path), "--rungs", *options])
        assert ladder.main() == code and len(started) == num_started
    assert started == ["device_part", "kernel_part", "twin_part", "device_part", "device_part"]


def test_rungs_are_named_by_number() -> None:
    assert ladder.rungs_of("1-3,5") == [1, 2, 3, 5] and ladder.rungs_of("7") == [7]
    for wrong in ("0", "16", "1-16", "a", "", "2-"):
        with pytest.raises(argparse.ArgumentTypeError, match="given; "):
            ladder.rungs_of(wrong)


def test_each_of_the_two_commands_ends_within_ten_minutes() -> None:
    limits = [rung.limit_s for rung in ladder.RUNGS]
    assert sum(limits[:7]) <= 520 and sum(limits[7:13]) <= 550


def test_findings_of_compute_sanitizer_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'case "$PYTORCH_NO_CUDA_MEMORY_CACHING$*" in 1*--tool*memcheck*twin_part*) ;; *) exit 3;; esac\n'
        "echo ========= Invalid __global__ read of size 4 bytes\n"
        "echo ========= ERROR SUMMARY: 2 errors\nexit 99\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert memcheck_part.find_sanitizer() == str(tool)
    reported: dict[str, Any] = {}
    monkeypatch.setattr(memcheck_part, "report", lambda name, **figures: reported.update({name: figures}))
    job = {"device": "cpu", "tiny": False, "share": [3, 8], "limit_s": 60.0}
    memcheck_part.main(job)
    figure = reported["memcheck 3"]
    assert (figure["ok"], figure["errors"], figure["exit_code"]) == (False, 1, 99)
    assert figure["said"][0] == "Invalid __global__ read of size 4 bytes"
    tool.write_text("#!/bin/sh\necho ========= COMPUTE-SANITIZER\nexec sleep 60\n")
    memcheck_part.main(job | {"limit_s": MARGIN_S + 0.5})
    figure = reported["memcheck 3"]
    assert figure["ok"] and figure["skipped"] == "its time was over before the end" and figure["said"]


@pytest.mark.parametrize(("line", "expected"), cases(__file__, "lines of pytest"))
def test_a_tests_outcome_is_read_with_and_without_xdist(line: str, expected: tuple[str, str] | None) -> None:
    match = pytest_part.OUTCOME.search(line)
    assert expected == (None if match is None else (match[1] or match[4], match[2] or match[3]))


def test_only_packages_that_a_machine_lacks_are_unpacked(tmp_path: Path) -> None:
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for name, module in cases(__file__, "wheels of a machine", here=here):
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(module, "")
    unpacked = []
    for _ in range(2):  # a second ladder leaves the files that the first one uses
        problems = machine.unpack(tmp_path)
        unpacked.append({path.name: path.stat().st_ctime_ns for path in tmp_path.glob("*/*")})
    assert unpacked[0] == unpacked[1] and sorted(unpacked[0]) == ["lacking.py", "lacking_too.py"]
    assert len(problems) == 1 and problems[0].startswith("other_python-1.0-cp27")


def test_an_extension_that_cannot_be_built_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "EXTENSION", tmp_path / "_csrc.abi3.so")
    without_compiler = os.environ | {"PATH": "", "CC": "no-compiler", "PYTHONPATH": ""}
    monkeypatch.setattr(machine, "environment", lambda _: without_compiler)
    (problem,) = machine.extend(tmp_path)
    assert "penstock._csrc cannot be had here" in problem
    (tmp_path / machine.carried_name()).write_text("carried")
    machine.extend(tmp_path)
    assert (tmp_path / "_csrc.abi3.so").read_text() == "carried"


def test_carried_packages_have_the_tested_versions() -> None:
    lines = machine.pinned(machine.PACKAGES)
    assert len(lines) == len(machine.PACKAGES) and all("==" in line for line in lines)


JOB = {"device": "cpu", "tiny": True, "dependent": False, "engine": True, "parts": ["startup", "decode", "prefill"]}


@pytest.mark.slow
def test_the_start_decoding_and_prompts_of_a_model_are_measured() -> None:
    figures, problem = run_part("model_part", JOB | {"models": ["qwen3-8b"]}, 600)
    assert problem is None and {name.split()[0] for name in figures} == {"startup", "decode", "prefill"}
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
@pytest.mark.parametrize(("model", "limit_s", "expected"), cases(__file__, "parts without a result"))
def test_a_part_that_fails_or_is_late_says_so(model: str, limit_s: float, expected: str) -> None:
    assert run_part("model_part", JOB | {"models": [model]}, limit_s) == ({}, expected)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_tiny", [False, True])
def test_every_configuration_can_be_read(name: str, is_tiny: bool) -> None:
    assert f"whole {name}" in [rung.name for rung in ladder.RUNGS]
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

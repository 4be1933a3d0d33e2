"""The ladder of a first half hour on a GPU: it goes on, resumes and says so whatever happens on it."""

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import ladder, machine, memcheck_part, pytest_part


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    monkeypatch.setattr(sys, "argv", ["ladder", "--output", str(folder), *options])
    monkeypatch.setattr(machine, "prepare", list)
    code = ladder.main()
    return code, [json.loads(line) for line in (folder / "ladder.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rung", ladder.RUNGS, ids=lambda rung: rung.name)
def test_without_a_gpu_a_rung_says_so(monkeypatch: pytest.MonkeyPatch, rung: ladder.Rung) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(memcheck_part, "find_sanitizer", lambda: "/bin/false")
    job = {"device": "cuda", "tiny": False, "dependent": False, "share": [0, 1], "output": ".", "suite": []}
    part = importlib.import_module(f"benchmarks.gpu.{rung.module}")
    with pytest.raises(SystemExit, match="sees no GPU"):
        part.main(job | {"limit_s": 60.0} | dict(rung.argument))


@pytest.mark.slow
def test_a_rung_that_fails_leaves_its_line_and_the_next_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, lines = run(monkeypatch, tmp_path, "--rungs", "6,1")
    assert code == 1 and [line["rung"] for line in lines] == [6, 1]
    for line in lines:
        assert not line["ok"] and "sees no GPU" in line["problem"]
    assert "versions" in lines[1]["figures"]  # what was said before
    assert "1 device: FAILED" in (tmp_path / "ladder.log").read_text()


def test_a_rung_that_has_its_line_is_not_run_again_unless_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started: list[str] = []

    def pretend(module: str, argument: dict[str, Any], count: int, limit_s: float, hear: Any) -> Any:
        started.append(module)
        return {"a figure": {"ok": module != "kernel_part"}, "another": {"skipped": "no tool"}}, None

    monkeypatch.setattr(ladder, "run_shares", pretend)
    code, lines = run(monkeypatch, tmp_path, "--rungs", "1,6")
    assert code == 1 and [line["ok"] for line in lines] == [True, False]
    assert lines[1]["wrong"] == ["a figure"] and lines[1]["skipped"] == {"another": "no tool"}
    with (tmp_path / "ladder.jsonl").open("a") as file:
        file.write('{"rung": 2, "name"\n')  # the machine went here
    monkeypatch.setattr(sys, "argv", ["ladder", "--output", str(tmp_path), "--rungs", "1-2,6"])
    assert ladder.main() == 1 and started == ["device_part", "kernel_part", "twin_part"]
    monkeypatch.setattr(sys, "argv", ["ladder", "--output", str(tmp_path), "--rungs", "1", "--again"])
    assert ladder.main() == 0 and started[3:] == ["device_part"]
    rehearsal = ["ladder", "--output", str(tmp_path), "--rungs", "1", "--device", "cpu", "--tiny"]
    monkeypatch.setattr(sys, "argv", rehearsal)
    assert ladder.main() == 0 and len(started) == 5  # a rehearsal's line is none of the device's


def test_rungs_are_named_by_number() -> None:
    assert ladder.numbers("1-3,5") == [1, 2, 3, 5] and ladder.numbers("7") == [7]
    for wrong in ("0", "10", "1-10", "a", "", "2-"):
        with pytest.raises(argparse.ArgumentTypeError, match="given; "):
            ladder.numbers(wrong)


def test_each_of_the_two_commands_ends_within_ten_minutes() -> None:
    limits = [rung.limit_s for rung in ladder.RUNGS]
    assert sum(limits[:7]) <= 520 and sum(limits[7:]) <= 550


def test_what_compute_sanitizer_finds_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    memcheck_part.main(job | {"limit_s": memcheck_part.MARGIN_S + 0.5})
    figure = reported["memcheck 3"]
    assert figure["ok"] and figure["skipped"] == "its time was over before the end" and figure["said"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[gw3] [ 25%] PASSED tests/a/test_b.py::test_c ", ("PASSED", "tests/a/test_b.py::test_c")),
        ("tests/a/test_b.py::test_c[two words] FAILED      [ 50%]", ("FAILED", "tests/a/test_b.py::test_c[two words]")),
        ("tests/a/test_b.py::test_c ", None),
        ("E   AssertionError", None),
    ],
)
def test_a_tests_outcome_is_read_with_and_without_xdist(line: str, expected: tuple[str, str] | None) -> None:
    found = pytest_part.OUTCOME.search(line)
    assert expected == (None if found is None else (found[1] or found[4], found[2] or found[3]))


def test_only_what_a_machine_lacks_is_unpacked(tmp_path: Path) -> None:
    here = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    wheels = {
        f"lacking-1.0-{here}-{here}-manylinux_2_17_x86_64.whl": "lacking.py",
        "lacking_too-1.0-cp39-abi3-manylinux_2_31_x86_64.whl": "lacking_too.py",
        "other_python-1.0-cp27-cp27mu-manylinux1_x86_64.whl": "other_python.py",
        "pytest-99.0-py3-none-any.whl": "pytest.py",
    }
    for name, module in wheels.items():
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr(module, "")
    problems = machine.unpack(tmp_path)
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["lacking.py", "lacking_too.py"]
    assert len(problems) == 1 and problems[0].startswith("other_python-1.0-cp27")


def test_an_extension_that_cannot_be_built_is_said_and_nothing_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "EXTENSION", tmp_path / "_csrc.abi3.so")
    monkeypatch.setattr(
        machine, "environment", lambda _: os.environ | {"PATH": "", "CC": "no-compiler", "PYTHONPATH": ""}
    )
    (problem,) = machine.extend(tmp_path)
    assert "penstock._csrc cannot be had here" in problem
    (tmp_path / machine.carried_name()).write_text("carried")
    machine.extend(tmp_path)
    assert (tmp_path / "_csrc.abi3.so").read_text() == "carried"


def test_what_is_carried_has_the_versions_that_are_tested() -> None:
    pinned = machine.pinned(machine.PACKAGES)
    assert len(pinned) == len(machine.PACKAGES) and all("==" in line for line in pinned)

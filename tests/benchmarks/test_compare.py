"""Servers side by side, and results against earlier ones."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from benchmarks import pairs

from tests.support.bench_endpoint import endpoint
from tests.support.default_file import needs_model
from tests.support.programs import printed

sys.path.insert(0, str(pairs.HERE))  # its scripts import each other as scripts do
compare, script_pairs = importlib.import_module("compare"), importlib.import_module("pairs")


@pytest.fixture(autouse=True)
def rooms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script_pairs, "RESULTS", tmp_path / "results")


def test_two_servers_take_turns_and_the_ratios_are_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "3"]
    with endpoint() as first, endpoint() as second:
        sides = ["--side", f"a={first.url}", "--side", f"b={second.url}"]
        compare.main([*sides, "--rounds", "3", "--", *options])
    said = capsys.readouterr().out
    order = [line.split(":")[0].strip() for line in said.partition("3 rounds")[2].splitlines() if "tok/s" in line]
    assert order == ["a", "b", "b", "a", "a", "b"]
    (line,) = (tmp_path / "results" / "compare.jsonl").read_text().splitlines()
    result = json.loads(line)
    rate = [[run["output_throughput"] for run in result["sides"][name]] for name in "ab"]
    ratios = sorted(a / b for a, b in zip(*rate, strict=True))
    assert result["ratios"]["b"]["output_throughput"]["ratio"] == pytest.approx(ratios[1], rel=1e-3)


def test_what_a_side_is_run_by() -> None:
    vllm = ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
    for what, words in (("vllm:/env/bin/python", vllm), ("llama.cpp:/llama-server", ["/llama-server", "-m", "M"])):
        assert compare.command_of(what, "M") == [*words, "--port", "{port}"]
        with pytest.raises(SystemExit, match="model: none given"):
            compare.command_of(what, None)
    assert compare.command_of("my-server --port {port}", "M") == ["my-server", "--port", "{port}"]
    with pytest.raises(SystemExit, match="my-server --fast' given"):
        compare.command_of("my-server --fast", "M")


def test_a_server_that_ends_is_reported_with_its_last_words() -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no such model\")' {{port}}"
    with (
        pytest.raises(SystemExit, match="side b: it ended with 1\n.*no such model"),
        compare.started("b", command, None),
    ):
        pass


def test_every_script_can_be_imported_and_what_it_replaces_exists() -> None:
    for path in pairs.HERE.glob("*.py"):
        if path.stem != "eplb_peer":  # for the environment of vLLM
            importlib.import_module(path.stem)
    answers = importlib.import_module("bench_answers")
    with answers.WITHOUT_JUMPING, answers.WITHOUT_DRAFTS:
        pass


@needs_model
def test_the_process_that_starts_servers_cold_maps_none_of_their_files() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(pairs.HERE)!r})
import bench_contact
assert "penstock" in bench_contact.servers(bench_contact.Setup("", bench_contact.ROOT, 1, ()), "")
print("site-packages" in open("/proc/self/maps").read())
"""
    assert printed(code) == "False"

"""Servers side by side, answers side by side, and what all scripts need."""

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
agreement, compare = importlib.import_module("bench_agreement"), importlib.import_module("compare")


def test_two_servers_take_turns_and_the_ratios_are_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("pairs"), "RESULTS", tmp_path / "results")
    options = ["--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "3"]
    with endpoint() as first, endpoint() as second:
        sides = ["--side", f"a={first.url}", "--side", f"b={second.url}"]
        compare.main([*sides, "--rounds", "3", "--", *options])
    printed = capsys.readouterr().out.partition("3 rounds")[2].splitlines()
    order = [line.split(":")[0].strip() for line in printed if "tok/s" in line]
    assert order == ["a", "b", "b", "a", "a", "b"]
    (line,) = (tmp_path / "results" / "compare.jsonl").read_text().splitlines()
    result = json.loads(line)
    rate = [[run["output_throughput"] for run in result["sides"][name]] for name in "ab"]
    ratios = sorted(a / b for a, b in zip(*rate, strict=True))
    assert result["ratios"]["b"]["output_throughput"]["ratio"] == pytest.approx(ratios[1], rel=1e-3)


def test_a_side_is_started_by_its_kind_or_by_any_command() -> None:
    vllm = ["/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
    for kind, words in (("vllm:/env/bin/python", vllm), ("llama.cpp:/llama-server", ["/llama-server", "-m", "M"])):
        assert compare.command_of(kind, "M") == [*words, "--port", "{port}"]
        with pytest.raises(SystemExit, match="model: none given"):
            compare.command_of(kind, None)
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


def test_every_script_can_be_imported_and_replaces_what_exists() -> None:
    for path in pairs.HERE.glob("*.py"):
        if path.stem != "eplb_peer":  # for the environment of vLLM
            importlib.import_module(path.stem)
    answers = importlib.import_module("bench_answers")
    with answers.WITHOUT_JUMPING, answers.WITHOUT_DRAFTS:
        pass


def test_answers_agree_up_to_the_first_difference_or_the_end_of_one() -> None:
    reference = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [], [1, 2]]
    lengths = agreement.agreement(reference, [[1, 2, 3], [1, 9, 3], [1, 2], [], [1, 2, 3]])
    assert lengths == [-1, 1, 2, -1, 2]
    figures = agreement.line("ours", lengths, 3)
    assert (figures["of"], figures["identical"], figures["median"]) == (5, 2, 2)


def test_longer_files_of_prompts_make_up_for_shorter_ones(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    long.write_text("".join(json.dumps({"question": f"q{number}"}) + "\n" for number in range(9)))
    short.write_text(json.dumps({"turns": ["first", "second"]}) + "\n" + json.dumps({"prompt": "p"}) + "\n")
    assert agreement.texts_of([str(long), str(short)], 6) == ["first", "p", "q0", "q1", "q2", "q3"]


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

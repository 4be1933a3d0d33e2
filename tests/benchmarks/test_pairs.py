"""Ratios of paired measurements and their intervals; servers side by side, answers side by side, and what all scripts need."""

import importlib
import json
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks import pairs
from benchmarks.pairs import Asked, judge, parse, rounded, rounds, summary

from tests.support.bench_endpoint import endpoint
from tests.support.default_file import needs_model
from tests.support.programs import printed


@pytest.mark.parametrize(("sides", "expected"), [("ab", "abbaab"), ("abc", "abcbcacab")])
def test_every_side_begins_in_its_turn(sides: str, expected: str) -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    results = rounds({name: partial(run, name) for name in sides}, 3)
    assert "".join(order) == expected
    assert list(results) == list(sides), "our side is the first one in every order"
    assert results == {name: [turn for turn, side in enumerate(expected, 1) if side == name] for name in sides}


def test_a_ratio_above_one_means_better_in_every_unit(capsys: pytest.CaptureFixture[str]) -> None:
    for unit, ours in (("tok/s", 30.0), ("per CPU second", 30.0), ("s", 10.0 / 3), ("µs", 10.0 / 3)):
        figures = summary("it", {"ours": [ours], "theirs": [10.0]}, unit)
        assert figures["ratio"] == 3.0 and figures["theirs"] == 10.0
    assert summary("cost", {"with": [3.0], "without": [1.0]}, "s", higher_is_better=True)["ratio"] == 3.0
    assert "it: ours 30, theirs 10 tok/s; 3.000×" in capsys.readouterr().out


def test_the_interval_needs_six_pairs_and_ignores_one_stalled_run() -> None:
    assert judge(range(1, 6), [1.0] * 5, higher_is_better=True)[1:] == (None, None, 1.0, 5.0)
    assert judge(range(1, 7), [1.0] * 6, higher_is_better=True)[1:] == (1.0, 6.0, 1.0, 6.0)
    assert judge([2.0] * 9 + [0.01], [1.0] * 10, higher_is_better=True) == (2.0, 2.0, 2.0, 0.01, 2.0)
    assert "interval" not in str(judge([1], [1], higher_is_better=True))


@pytest.mark.parametrize("count", [6, 10, 15, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    held = 0
    for _ in range(2000):
        sample = [rng.lognormvariate(0.5, 0.3) for _ in range(count)]
        verdict = judge(sample, [1.0] * count, higher_is_better=True)
        assert verdict.low is not None and verdict.high is not None
        held += verdict.low <= 1.6487212707 <= verdict.high  # e^0.5
    assert held / 2000 >= 0.94


def one(pairs: int = 6, peer_python: str | None = None) -> dict[str, int]:
    return {"pairs": pairs}


def nothing() -> None: ...


def two(
    required: str,
    pairs: int = 10,
    seconds: float = 2.0,
    batches: list[int] = [8],  # noqa: B006
    peer_python: str | None = None,
    full: bool = False,
) -> None: ...


def test_the_parameters_of_a_mode_are_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    modes: dict[str, Callable[..., Any]] = {"one": one, "two": two}
    words = ["two", "--pairs", "3", "--seconds", "0.5", "--batches", "1", "2", "--peer-python", "x", "--full"]
    expected = {"pairs": 3, "seconds": 0.5, "batches": [1, 2], "peer_python": "x", "full": True}
    assert parse("", modes, words) == ("two", expected)
    assert parse("", modes, []) == ("one", {}), "the first mode, with its own defaults"
    for wrong, option in ((["one", "--full"], "--full"), (["two", "--required", "x"], "--required")):
        with pytest.raises(SystemExit):
            parse("", modes, wrong)
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_a_script_runs_its_mode_and_adds_its_figures_without_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "RESULTS", tmp_path / "results")
    for words in (["one", "--pairs", "4", "--peer-python", "/home/me/env/bin/python"], ["nothing"], []):
        monkeypatch.setattr("sys.argv", ["/home/me/x.py", *words])
        pairs.main("", "script", one, nothing)
    (path,) = (tmp_path / "results").iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert path.name == "script-one.jsonl" and [line["pairs"] for line in lines] == [4, 6]
    assert lines[0]["command"] == "python benchmarks/x.py one --pairs 4 --peer-python …/python"
    assert {"bench", "date", "commit", "machine"} <= set(lines[0])
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == lines[0]


def test_figures_keep_four_digits() -> None:
    assert [rounded(value) for value in (0.00123456, 12.3456, 123456.7, 0, None)] == [0.001235, 12.35, 123457, 0, None]


def side(code: str) -> tuple[str, str, str]:
    path = f"import os, sys; sys.path.insert(0, {str(pairs.HERE)!r})"
    return sys.executable, "-c", f"{path}; from pairs import answer_questions; {code}"


def test_a_process_answers_questions_and_is_stopped_in_between() -> None:
    with Asked(*side("print('a library speaks'); answer_questions(lambda n: [n, os.getpid()], 'ready')")) as asked:
        assert asked.started == "ready"
        number, pid = asked.ask(5)
        assert number == 5
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        assert asked.ask(6)[0] == 6
    assert not Path(f"/proc/{pid}").exists()


def test_a_process_that_ends_is_reported_with_its_last_words() -> None:
    with pytest.raises(SystemExit, match="ended with 1:\nno such model"):
        Asked(*side("raise SystemExit('no such model')"))


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
    code = """
import bench_contact
assert "penstock" in bench_contact.servers(bench_contact.Setup("", bench_contact.ROOT, 1, ()), "")
print("site-packages" in open("/proc/self/maps").read())
"""
    assert printed(code) == "False"

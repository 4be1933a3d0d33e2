"""Ratios of paired measurements and their intervals, as the benchmarks report them."""

import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from benchmarks import pairs
from benchmarks.pairs import Asked, Pair, alternate, arguments, judge, rounded, rounds


def test_both_sides_take_turns_at_going_first() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    measured = alternate(lambda: side("a", 1.0), lambda: side("b", 2.0), 3)
    assert "".join(order) == "abbaab"
    assert measured == [Pair(1.0, 2.0)] * 3, "whatever the order, ours stands first"


def test_a_ratio_above_one_means_better_whatever_the_unit() -> None:
    speeds = [Pair(ours=30.0, theirs=10.0)]
    seconds = [Pair(ours=10.0, theirs=30.0)]
    assert judge(speeds, higher_is_better=True).ratio == judge(seconds, higher_is_better=False).ratio == 3.0


def test_one_stalled_run_does_not_move_the_verdict() -> None:
    verdict = judge([Pair(2.0, 1.0)] * 9 + [Pair(0.01, 1.0)], higher_is_better=True)
    assert (verdict.ratio, verdict.low, verdict.high) == (2.0, 2.0, 2.0)
    assert (verdict.least, verdict.most) == (0.01, 2.0)


def test_few_pairs_have_a_range_but_no_interval() -> None:
    assert judge([Pair(i, 1.0) for i in range(1, 6)], higher_is_better=True)[1:] == (None, None, 1.0, 5.0)
    assert judge([Pair(i, 1.0) for i in range(1, 7)], higher_is_better=True)[1:] == (1.0, 6.0, 1.0, 6.0)
    assert "interval" not in str(judge([Pair(1, 1)], higher_is_better=True))


@pytest.mark.parametrize("count", [6, 10, 15, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    rng = random.Random(count)
    held = 0
    for _ in range(2000):
        sample = [Pair(rng.lognormvariate(0.5, 0.3), 1.0) for _ in range(count)]
        verdict = judge(sample, higher_is_better=True)
        assert verdict.low is not None and verdict.high is not None
        held += verdict.low <= 1.6487212707 <= verdict.high  # e^0.5
    assert held / 2000 >= 0.94


def test_the_verdict_is_the_median_of_the_ratios_and_not_the_ratio_of_the_medians() -> None:
    measured = [Pair(1, 1), Pair(10, 5), Pair(100, 20)]
    assert judge(measured, higher_is_better=True).ratio == statistics.median([1, 2, 5])


def test_a_record_is_one_line_without_anybodys_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pairs, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        "sys.argv", ["/home/me/x.py", "all", "--peer-python", "/home/me/env/bin/python", "--pairs", "3"]
    )
    for ratio in (1.5, 2.5):
        pairs.record("thing", {"ratio": ratio})
    lines = [json.loads(line) for line in (tmp_path / "results" / "thing.jsonl").read_text().splitlines()]
    assert [line["ratio"] for line in lines] == [1.5, 2.5]
    assert lines[0]["command"] == "python benchmarks/x.py all --peer-python …/python --pairs 3"
    assert {"bench", "date", "commit", "machine"} <= set(lines[0])
    assert json.loads(capsys.readouterr().out.splitlines()[0]) == lines[0]


def test_every_side_begins_in_its_turn() -> None:
    order: list[str] = []

    def run(name: str) -> int:
        order.append(name)
        return len(order)

    found = rounds({name: partial(run, name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab" and found == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_options_have_the_types_of_their_defaults() -> None:
    words = ["two", "--pairs", "3", "--seconds", "0.5", "--batches", "1", "2", "--peer-python", "x", "--all"]
    defaults = {"pairs": 6, "seconds": 2.0, "batches": [8], "peer_python": None, "all": False}
    args = arguments("", "one", "two", argv=words, **defaults)
    assert vars(args) == {"mode": "two", "pairs": 3, "seconds": 0.5, "batches": [1, 2], "peer_python": "x", "all": True}
    assert vars(arguments("", "one", "two", argv=[], **defaults)) == {"mode": "one", **defaults}


def test_figures_keep_four_digits() -> None:
    assert [rounded(value) for value in (0.00123456, 12.3456, 123456.7, 0, None)] == [0.001235, 12.35, 123457, 0, None]


SIDE = "import os, sys; sys.path.insert(0, {folder!r}); from pairs import answer_questions; {code}"


def side(code: str) -> tuple[str, str, str]:
    return sys.executable, "-c", SIDE.format(folder=str(pairs.HERE), code=code)


def test_a_process_answers_what_it_is_asked_and_is_stopped_in_between() -> None:
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

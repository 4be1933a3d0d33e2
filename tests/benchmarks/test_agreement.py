"""What is made of prompts and answers by benchmarks/bench_agreement.py."""

import importlib
import json
import sys
from pathlib import Path

from benchmarks import pairs

sys.path.insert(0, str(pairs.HERE))  # its scripts import each other as scripts do
script = importlib.import_module("bench_agreement")


def test_answers_agree_up_to_the_first_difference_or_the_end_of_one() -> None:
    reference = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [], [1, 2]]
    answers = [[1, 2, 3], [1, 9, 3], [1, 2], [], [1, 2, 3]]
    lengths = script.agreement(reference, answers)
    assert lengths == [-1, 1, 2, -1, 2]
    figures = script.line("ours", lengths, 3)
    assert (figures["of"], figures["identical"], figures["median"]) == (5, 2, 2)


def test_files_give_as_many_prompts_as_they_have_and_longer_ones_the_rest(tmp_path: Path) -> None:
    long, short = tmp_path / "long", tmp_path / "short"
    long.write_text("".join(json.dumps({"question": f"q{number}"}) + "\n" for number in range(9)))
    short.write_text(json.dumps({"turns": ["first", "second"]}) + "\n" + json.dumps({"prompt": "p"}) + "\n")
    assert script.texts_of([str(long), str(short)], 6) == ["first", "p", "q0", "q1", "q2", "q3"]

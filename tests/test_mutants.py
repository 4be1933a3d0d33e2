"""Random changes of the product, over a project of one file: an unnoticed change is listed, a noticed one is not."""

from pathlib import Path

import pytest

from tests.mutants import Copy, draw, mutations, report
from tests.support.refusals import cases

PRODUCT = """
def at_least(value, limit):
    return value >= limit


def most(first, second):
    if first > second:
        return first
    return second


def same(value):
    return value * 1
"""
TESTS = """
import subprocess
import sys
import pytest
from product import most, same


@pytest.fixture(scope="module")
def three():
    return same(3)


def test_that_only_prepares(three):
    pass


def test_same(three):
    assert three == 3


def test_at_least():
    code = "from product import at_least; assert at_least(2, 1) and not at_least(1, 2)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_most():
    assert most(3, 2) == 3 and most(2, 3) == 3
    assert most(most(1, 2), 0) == 2
"""


@pytest.mark.slow
def test_unnoticed_changes_are_listed(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for path, text in {"src/product.py": PRODUCT, "checks/test_product.py": TESTS}.items():
        (tree / path).parent.mkdir(parents=True)
        (tree / path).write_text(text)
    (tree / "tests").symlink_to(Path(__file__).parent)  # for the plug-in
    copy = Copy(tree)
    copy.measure(["checks"])
    drawn = [*mutations("src/product.py", PRODUCT.encode())]
    known = {("src/product.py", "if first > second:", "if first >= second:")}
    assert [*report(copy, drawn, known)] == [
        "src/product.py:3: return value >= limit -> return value > limit  (1 tests run this line)",
        "1 of 2 noticed (50.0%); 1 make no difference",
    ]
    assert [*report(copy, drawn[:0], known)] == ["0 of 0 noticed (0.0%); 0 make no difference"]
    wrong = drawn[0]._replace(text="value < limit")
    assert [*report(copy, [wrong], known)] == ["1 of 1 noticed (100.0%); 0 make no difference"]
    assert (tree / "src/product.py").read_text() == PRODUCT


def test_a_seed_draws_the_same_lines_once_each(tmp_path: Path) -> None:
    (tmp_path / "product.py").write_text(PRODUCT)
    first, again = (draw(tmp_path, ["product.py"], seed=5, count=200) for _ in range(2))
    assert first == again and sorted(mutation.last for mutation in first) == [3, 7, 13]


@pytest.mark.parametrize(("line", "changed"), cases(__file__, "changes of lines"))
def test_lines_are_changed_in_these_ways(line: str, changed: list[str]) -> None:
    texts = [mutation.apply(line.encode()).decode() for mutation in mutations("a.py", line.encode())]
    assert sorted(texts) == sorted(changed)

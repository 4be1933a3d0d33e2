"""Names are unique, classes of the product and files of a room; all texts are in plain English; the tests' index is whole."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.size import ROOT, source_files

ROOMS = ("engine", "executor", "cache", "eplb", "router", "prove")
SUPPORT = ROOT / "tests/support"
PLAIN = (*ROOMS, "benchmarks", "csrc", "src", "tests")
CLASS = re.compile(r"^ *class (\w+)", re.MULTILINE)
# Names that do not tell what they hold.
VAGUE = {"found", "place", "given", "known", "wanted", "asked", "what", "made", "numbers", "said", "those", "whose"}
RIDDLE = re.compile(r'(^\s*(""")?|# |// |/\*+ |^ \* )(Of|What|Who|Whose|Whether|Those|As|None of)\b')
# In patterns: a group that is repeated possessively, as in (…)*+. Before 3.11.5 Python matches too little with it.
POSSESSIVE = re.compile(r"""\)(?:[*+?]|\{[\d,]+\})\+['"|[(]""")


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield functions, parameters, attributes that are set, and fields of classes, each with its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ClassDef):
            fields = (each.target for each in node.body if isinstance(each, ast.AnnAssign))
            yield from ((field.lineno, field.id) for field in fields if isinstance(field, ast.Name))


def test_no_two_classes_of_the_product_have_one_name() -> None:
    places = defaultdict(list)
    for path in source_files(*ROOMS):
        if path.suffix == ".py":
            for name in CLASS.findall(path.read_text()):
                places[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_no_file_name_stands_twice_in_a_room() -> None:
    for room in ROOMS:
        names = Counter(path.name for path in source_files(room) if path.name != "__init__.py")
        assert [name for name, count in names.items() if count > 1] == []


def test_no_docstring_or_comment_begins_without_its_subject_and_no_group_is_possessive() -> None:
    lines = [(path, line) for path in source_files(*PLAIN) for line in path.read_text().splitlines()]
    for rule in (RIDDLE, POSSESSIVE):
        assert [f"{path.relative_to(ROOT)}: {line.strip()}" for path, line in lines if rule.search(line)] == []


def test_docstrings_of_functions_begin_with_an_imperative_verb() -> None:
    assert not subprocess.run([sys.executable, "-m", "ruff", "check", "--select=D401", *PLAIN], cwd=ROOT).returncode


def test_every_name_says_something() -> None:
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in source_files(*PLAIN)
        if path.suffix == ".py"
        for line, name in names(path.read_text())
        if name.strip("_") in VAGUE
    ]
    assert vague == [], "name each by what it holds"


def test_every_file_of_support_is_in_its_index_once() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", (SUPPORT / "README.md").read_text(), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`(.+?)`", row)]
    assert sorted(listed) == sorted(path.name for path in SUPPORT.glob("*.[hp]*") if path.name != "__init__.py")


def test_the_folders_and_files_of_tests_that_use_them_exist() -> None:
    users = re.findall(r"\| (`[^|]*`) \|$", (SUPPORT / "README.md").read_text(), re.MULTILINE)
    named = {name for cell in users for name in re.findall(r"`(.+?)`", cell)}
    tests = SUPPORT.parent
    assert {name for name in named if not any(any(at.glob(name)) for at in (tests, SUPPORT, tests.parent))} == set()

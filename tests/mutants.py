"""Changes random lines of the product and lists the changes that no fast test notices: `make mutants SEED=1`.

It works in a copy of the last commit below .venv/mutants. The fast tests run there once under coverage, which notes the
lines that each test executes, in child processes as well. Then, for each change that the seed draws, the tests of its
line run until one fails. A test that hangs has noticed the change.

A change is a comparison that is turned around or shifted by one, a number that is one larger, a statement that is left
out, or a call whose first two arguments are swapped. Assertions, log lines, annotations and decorators are not changed.
A change that makes no difference is listed with the reason in tests/equivalent_mutants.txt.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("engine", "prove", "executor", "cache", "eplb", "router", "src")
EQUIVALENT = ROOT / "tests/equivalent_mutants.txt"
MOST_TEST_S = 60.0  # time of the tests that run for one change; thousands run the lines of every start
LIMIT_S = 120.0  # besides five times the tests' own time
SWAPS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
SYMMETRIC = {"max", "min", "maximum", "minimum"}  # compute the same with swapped arguments
SETTINGS = """[run]
branch = false
source = {tree}
data_file = {data}
parallel = true
patch = fork, _exit
sigterm = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, couldnt-parse, module-not-imported, no-ctracer
"""


class Mutation(NamedTuple):
    """A change of one file: the bytes from `start` to `end` are replaced. The lines are those of the statement."""

    path: str
    first: int
    last: int
    start: int
    end: int
    text: str

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def describe(self, source: bytes) -> tuple[str, str, str]:
        """Return the place, the old line and the new one."""
        line = source[: self.start].count(b"\n")
        old, new = (text.splitlines()[line].decode().strip() for text in (source, self.apply(source)))
        return f"{self.path}:{line + 1}", old, new


def replacements(node: ast.AST) -> Iterator[str]:
    """Yield the texts that may stand in place of a node."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=others) if type(op) in SWAPS:
            yield ast.unparse(ast.Compare(left, [SWAPS[type(op)]()], others))
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield repr(value + 1)
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[_, _]) if name in SYMMETRIC:
            pass
        case ast.Call(func=function, args=[ast.expr() as first, ast.expr() as second, *rest], keywords=keywords):
            is_starred = isinstance(first, ast.Starred) or isinstance(second, ast.Starred)
            if not is_starred and ast.dump(first) != ast.dump(second):
                yield ast.unparse(ast.Call(function, [second, first, *rest], keywords))
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Raise():
            yield "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield "pass"


def changeable(node: ast.AST, statement: ast.stmt | None = None) -> Iterator[tuple[ast.stmt, ast.AST, str]]:
    """Yield (statement, part of it, new text) for everything in a node that may be changed."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.arguments():  # Python 3.11 does not know where parts of f-strings are
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger")))):
            return
    statement = node if isinstance(node, ast.stmt) else statement
    if statement is not None:
        yield from ((statement, node, text) for text in replacements(node))
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from changeable(child, statement)


def mutations(path: str, source: bytes) -> Iterator[Mutation]:
    begins = [0]
    for line in source.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))
    for statement, part, text in changeable(ast.parse(source)):
        assert isinstance(part, ast.stmt | ast.expr) and part.end_lineno and part.end_col_offset is not None
        start, end = begins[part.lineno - 1] + part.col_offset, begins[part.end_lineno - 1] + part.end_col_offset
        yield Mutation(path, statement.lineno, part.end_lineno, start, end, text)


def draw(tree: Path, paths: Sequence[str], seed: int, count: int) -> list[Mutation]:
    """Draw lines, each as likely as any other that can be changed, and a change of each."""
    by_line: dict[tuple[str, int], list[Mutation]] = {}
    for path in paths:
        for file in sorted((tree / path).rglob("*.py")) if (tree / path).is_dir() else [tree / path]:
            for mutation in mutations(str(file.relative_to(tree)), file.read_bytes()):
                by_line.setdefault((mutation.path, mutation.last), []).append(mutation)
    rng = random.Random(seed)
    return [rng.choice(by_line[line]) for line in rng.sample(sorted(by_line), min(count, len(by_line)))]


class Copy:
    """A copy of the project in which tests run, and the knowledge of which of them execute a line."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.work = tree, tree.parent
        self._seconds: dict[str, float] = {}  # test → its time
        self._data = coverage.CoverageData(str(self.work / "lines"))

    def measure(self, tests: Sequence[str]) -> None:
        """Run the fast tests once, unless that has been done."""
        seconds, settings = self.work / "seconds.json", self.work / "settings.ini"
        if not seconds.exists():
            settings.write_text(SETTINGS.format(tree=self.tree, data=self.work / "lines"))
            command = ["-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-q", "-n2"]
            environment = {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_SECONDS": str(seconds)}  # of children, too
            self.run([*command, "-p", "tests.mutants", *tests], 4 * 3600.0, **environment)
            subprocess.run([sys.executable, "-m", "coverage", "combine", "-q", f"--rcfile={settings}"], check=True)
        self._seconds = json.loads(seconds.read_text())
        self._data.read()

    def tests_of(self, mutation: Mutation) -> list[str]:
        """Return the tests that execute the lines, the fastest first, as far as there is time for them; those of files with
        the same names are preferred. For lines that run at import, and for Triton's kernels, which it interprets in
        another copy, these are the tests that execute any line of the file."""
        by_line = self._data.contexts_by_lineno(str((self.tree / mutation.path).resolve()))
        lines = [by_line.get(line, []) for line in range(mutation.first, mutation.last + 1)]
        tests = self._tests_in(lines)
        if not tests or any("" in contexts for contexts in lines):
            tests |= self._tests_in(contexts for contexts in by_line.values() if "" not in contexts)
        chosen: list[str] = []
        passed_s = 0.0

        def turn(file: str, position: int) -> int:
            """Return when a file's test at a position is run: with each name in common it runs four times as many at a time."""
            paths = f"tests/{mutation.path}".removesuffix(".py"), file.replace("test_", "").removesuffix(".py")
            return position >> 2 * len(Path(os.path.commonpath(paths)).parts)

        num_of = Counter[str]()
        turns: list[tuple[int, float, str]] = []
        for test in sorted(tests, key=lambda test: self._seconds[test]):
            file = test.partition("::")[0]
            turns.append((turn(file, num_of[file]), self._seconds[test], test))
            num_of[file] += 1
        for _, seconds, test in sorted(turns):
            passed_s += seconds
            if passed_s < MOST_TEST_S or not chosen:
                chosen.append(test)
        return sorted(chosen, key=lambda test: self._seconds[test])

    def _tests_in(self, contexts: Iterable[list[str]]) -> set[str]:
        """Return the tests of coverage's contexts. What a fixture has done, or a process that it has started, may serve
        all tests of the file."""
        tests = set[str]()
        noted = {names for each in contexts for names in each}
        for name in noted | {name for names in noted for name in names.split("|")}:
            test = name.removesuffix(" (call)")
            if name.endswith(" (setup)"):
                file = test.partition("::")[0]
                tests |= {each for each in self._seconds if each.startswith(f"{file}::")}
            tests.add(test)
        return tests & self._seconds.keys()

    def is_noticed(self, mutation: Mutation, tests: list[str]) -> bool:
        """Run the tests with the change until one fails."""
        file, names = self.tree / mutation.path, self.work / "tests.txt"
        source = file.read_bytes()
        names.write_text("\n".join(tests))
        limit_s = LIMIT_S + 5 * sum(self._seconds[test] for test in tests)
        try:
            file.write_bytes(mutation.apply(source))
            return bool(tests) and self.run(["-m", "pytest", "-x", "-q", f"@{names}"], limit_s) != 0
        finally:
            file.write_bytes(source)

    def run(self, command: Sequence[str], limit_s: float, **environment: str) -> int | None:
        """Run Python in the copy; return its exit code, or None if it had to be ended."""
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
        env |= environment | {"PYTHONPATH": f"{self.tree / 'src'}{os.pathsep}{self.tree}"}
        with (self.work / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, *command, "-p", "no:cacheprovider"],
                cwd=self.tree,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


_passed_s: dict[str, float] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note lines under the name of the test, as a plug-in of the measured run: first of its setup, which may be the
    file's."""
    _note_under(f"{nodeid} (setup)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    _note_under(item.nodeid)


def _note_under(context: str | None = None) -> None:
    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(context or os.environ.get("PYTEST_CURRENT_TEST", ""))


os.register_at_fork(after_in_child=_note_under)  # behind coverage's own, which notes without a test


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.passed:
        _passed_s[report.nodeid] = report.duration


def pytest_sessionfinish() -> None:
    if "MUTANTS_SECONDS" in os.environ:
        Path(os.environ["MUTANTS_SECONDS"]).write_text(json.dumps(_passed_s))


def equivalents(text: str) -> set[tuple[str, str, str]]:
    """Read (path, old line, new line) of the changes that make no difference; the reason follows."""
    rows = [line.split(" | ") for line in text.splitlines() if line and not line.startswith("#")]
    return {(path, old, new) for path, old, new, _ in rows}


def report(copy: Copy, drawn: Sequence[Mutation], harmless: set[tuple[str, str, str]]) -> Iterator[str]:
    """Yield a line for each change that no test notices, and in the end how many were noticed."""
    noticed = equivalent = 0
    for mutation in drawn:
        place, old, new = mutation.describe((copy.tree / mutation.path).read_bytes())
        tests = copy.tests_of(mutation)
        if (mutation.path, old, new) in harmless:
            equivalent += 1
        elif copy.is_noticed(mutation, tests):
            noticed += 1
        else:
            yield f"{place}: {old} -> {new}  ({len(tests)} tests run this line)"
    counted = len(drawn) - equivalent
    yield f"{noticed} of {counted} noticed ({noticed / max(counted, 1):.1%}); {equivalent} make no difference"


def copy_of_last_commit() -> Path:
    """Return the folder of a copy of the last commit, with the files as they are in it."""
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    tree = ROOT / ".venv/mutants" / commit / "tree"
    tree.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive, check=True)
    shutil.copy2(ROOT / "src/penstock/_csrc.abi3.so", tree / "src/penstock")
    if not (tree / ".venv").exists():
        (tree / ".venv").symlink_to(ROOT / ".venv")  # has Triton for the kernels' tests
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--paths", nargs="+", default=PRODUCT, help="files and folders that are changed")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests that are measured and run")
    options = parser.parse_args()
    copy = Copy(copy_of_last_commit())
    copy.measure(options.tests)
    for line in report(
        copy, draw(copy.tree, options.paths, options.seed, options.count), equivalents(EQUIVALENT.read_text())
    ):
        print(line, flush=True)


if __name__ == "__main__":
    main()

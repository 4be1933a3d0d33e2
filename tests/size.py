"""Counts the lines of Python, C, JavaScript, CSS and HTML of each room and compares them with the budgets.

`python -m tests.size` prints them beside the budgets of pyproject.toml and fails beyond one: `make size`, and part of
`make check`. A budget is a limit with room for a fix and its test; a feature that needs more removes something else.
"""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COUNTED = (".py", ".c", ".h", ".js", ".css", ".html")
ROOMS = ("engine", "prove", "executor", "cache", "eplb", "router", "csrc", "src")


def lines(paths: list[Path]) -> int:
    return sum(path.read_text().count("\n") for path in paths)


def source_files(*folders: str) -> list[Path]:
    """Return the source files in folders of the project, also where it is no git checkout."""
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*")))
    return [path for path in paths if path.name.endswith(COUNTED) and path.is_file()]


def sizes() -> dict[str, int]:
    found = {room: lines(source_files(room)) for room in ROOMS}
    found["product"] = sum(found.values())
    found |= {folder: lines(source_files(folder)) for folder in ("benchmarks", "tests")}
    return found


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["penstock"]["size"]
    found = sizes()
    assert budgets.keys() == found.keys(), "pyproject.toml has a budget for every line of this table, and no other"
    for name, size in found.items():
        print(f"{name:<12}{size:>8,} of {budgets[name]:>7,}{'   beyond its budget' if size > budgets[name] else ''}")
    return int(any(size > budgets[name] for name, size in found.items()))


if __name__ == "__main__":
    sys.exit(main())

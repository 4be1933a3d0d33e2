"""Reads tables of cases from text files: a folder of tests has what is refused in refusals.txt, the rest in cases.txt."""

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest


def table(file: str, section: str, **names: Any) -> list[Any]:
    """Return the cases of a section of the refusals.txt beside `file`, each a Python expression over `names`."""
    return _read(Path(file).with_name("refusals.txt"), section, names)


def cases(file: str, section: str, **names: Any) -> list[Any]:
    """Return the cases of a section of the cases.txt beside `file`, each a Python expression over `names`."""
    return _read(Path(file).with_name("cases.txt"), section, names)


def hardest(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Return the values of a parameter; all but the hardest are left to the slow suite."""
    return [value if value in fast else pytest.param(value, marks=pytest.mark.slow) for value in values]


def hardest_rows(rows: Iterable[tuple[Any, ...]], fast: Collection[tuple[Any, ...]]) -> list[Any]:
    """Return values of several parameters; all but the hardest are left to the slow suite."""
    return [row if row in fast else pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def _read(path: Path, section: str, names: dict[str, Any]) -> list[Any]:
    lines = path.read_text().partition(f"[{section}]\n")[2].partition("\n\n")[0].splitlines()
    assert lines, f"{section} is not in {path}"
    return [eval(line, {"json": json, **names}) for line in lines]

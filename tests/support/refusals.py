"""Reads tables of cases: each folder of tests has its own refusals.txt."""

import json
from pathlib import Path
from typing import Any


def table(file: str, section: str, **names: Any) -> list[Any]:
    """Return the cases of a section of the refusals.txt beside `file`, each a Python expression over `names`."""
    text = Path(file).with_name("refusals.txt").read_text()
    lines = text.partition(f"[{section}]\n")[2].partition("\n\n")[0].splitlines()
    assert lines, f"{section} is not in the refusals.txt beside {file}"
    return [eval(line, {"json": json, **names}) for line in lines]

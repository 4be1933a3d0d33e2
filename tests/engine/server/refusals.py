"""Reads the tables of refusals.txt."""

import json
from pathlib import Path
from typing import Any


def table(section: str, **names: Any) -> list[Any]:
    """Return the cases of a section, each a Python expression over `names`."""
    text = Path(__file__).with_name("refusals.txt").read_text()
    lines = text.partition(f"[{section}]\n")[2].partition("\n\n")[0].splitlines()
    return [eval(line, {"json": json, **names}) for line in lines]

"""Reads the tables of this package, which are JSON files beside its modules."""

import json
from pathlib import Path
from typing import Any


def load_table(name: str) -> Any:
    return json.loads((Path(__file__).parent / f"{name}.json").read_text())

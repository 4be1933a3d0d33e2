"""Commands and options of earlier versions, with their replacements (removed.json).

The command line and `LLM(...)` refuse them with these texts; no other code refers to them.
"""

import json
from pathlib import Path

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))

REMOVED_COMMANDS: dict[str, str] = _TABLES["commands"]
# By the name of the keyword; the flag has dashes. Names with the same replacement share an entry.
REMOVED: dict[str, str] = {name: instead for names, instead in _TABLES["options"].items() for name in names.split()}

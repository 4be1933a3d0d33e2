"""vLLM's names that Penstock does not have (vllm_options.json): flags that would change nothing are accepted without
effect, each with one line that explains why; others are refused with what replaces them.

Flags with the same meaning under another name are additional names of an option (flags.json).
"""

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Only flags that change nothing with any value. In Python, the same names are keywords of `LLM(...)`.
IGNORED: dict[str, str] = _TABLES["flags"] | _TABLES["with_value"]
WITH_VALUE = frozenset(_TABLES["with_value"])
OTHER_VALUES: dict[str, dict[str, str]] = _TABLES["values"]  # of options: other names of a value → its name here
# Maps names to what replaces them; names with the same replacement share an entry.
REPLACED, REPLACED_SAMPLING = (
    {name: instead for names, instead in _TABLES[table].items() for name in names.split()}
    for table in ("replaced", "sampling")
)


def add_ignored_options(parser: argparse.ArgumentParser) -> None:
    """Add the ignored flags, hidden from `--help`."""
    for name in IGNORED:
        num_values = None if name in WITH_VALUE else 0
        flag = "--" + name.replace("_", "-")
        parser.add_argument(
            flag, action=_Ignore, nargs=num_values, dest=name, help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )


def split_ignored(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options that have an effect, and a remark about each ignored option."""
    kept = {name: value for name, value in options.items() if name not in IGNORED}
    return kept, [f"{name}: without effect: {IGNORED[name]}" for name in options if name in IGNORED]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message that suggests the most similar one of these; empty if there is none."""
    found = difflib.get_close_matches(name, list(names), 1, 0.75)
    return f"; did you mean {found[0]}?" if found else ""


def unknown_option(name: str, names: Iterable[str], replaced: Mapping[str, str] = REPLACED) -> str:
    """Return the end of an error message about an unknown flag or Python keyword: what replaces it, or a similar name."""
    instead = replaced.get(name.removeprefix("--").removeprefix("no-").replace("-", "_"))
    if instead is None:
        return f"there is no such option{nearest(name, names)}"
    if not name.startswith("-"):
        instead = re.sub("--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), instead)
    return f"there is no such option; {instead}"


class _Ignore(argparse.Action):
    """Prints that the flag has no effect. argparse calls it with the parser, the namespace, the values and the flag."""

    def __call__(self, *arguments: Any, **_: Any) -> None:
        print(f"penstock: {arguments[-1]}: without effect: {IGNORED[self.dest]}", file=sys.stderr)

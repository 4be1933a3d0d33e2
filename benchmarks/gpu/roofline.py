"""Writes the table in docs/performance.md: the time of a decoding step and the time to read its bytes at copy speed.

python -m benchmarks.gpu.roofline DIR/ladder.jsonl
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pairs import ROOT

PAGE = ROOT / "docs" / "performance.md"
MARKS = "<!-- roofline: written by benchmarks/gpu/roofline.py -->", "<!-- end of the roofline -->"


def table(lines: list[dict[str, Any]]) -> list[str]:
    """Return Markdown lines from the rungs' lines: device and copy speed from the first one, steps from the last."""
    rungs = {line["name"]: line for line in lines if not line["tiny"]}
    device, suite = (rungs.get(name, {}).get("figures", {}) for name in ("device", "suite"))
    copy = device.get("copy", {}).get("gb_per_s")
    rows = []
    for name, figure in suite.items():
        model, _, what = name.partition(": ")
        if copy and what.startswith("decode ") and "gb" in figure:
            least_ms = figure["gb"] / copy * 1e3
            rows.append(
                f"| {model} | {what.removeprefix('decode ')} | {figure['gb']:.3g} | {least_ms:.3g} "
                f"| {figure['step_ms']:.3g} | {least_ms / figure['step_ms']:.0%} | {figure['tokens_per_s']:,.0f} |"
            )
    if not rows:
        return []
    versions = ", ".join(f"{name} {device['versions'][name]}" for name in ("torch", "triton", "transformers"))
    return [
        f"{device['device']['model']}, {rungs['suite']['date']}, {versions}; a copy moves {copy:,.0f} GB/s. Made-up weights.",
        "",
        "| model | requests at positions | GB to read | ms at the copy's speed | ms a step | share | tokens/s |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def main(path: Path) -> None:
    lines = table([json.loads(line) for line in path.read_text().splitlines()])
    if not lines:
        raise SystemExit(
            f"{path}: has no decoding steps (rung 9) beside the speed of a copy (rung 1), but for tiny shapes"
        )
    print("\n".join(lines))
    write_between(PAGE, MARKS, [*lines, ""])


def write_between(page: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Replace the part of a page between two markers."""
    head, _, rest = page.read_text().partition(marks[0])
    assert rest, f"{page.name} has lost its mark: {marks[0]}"
    page.write_text("\n".join([head + marks[0], "", *lines]) + marks[1] + rest.partition(marks[1])[2])


if __name__ == "__main__":
    main(Path(sys.argv[1]))

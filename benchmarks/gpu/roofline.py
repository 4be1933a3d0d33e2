"""The table in docs/performance.md: what a decoding step takes, beside what reading its bytes at a copy's speed would."""

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
MARKS = "<!-- roofline: written by benchmarks/gpu_suite.py -->", "<!-- end of the roofline -->"


def table(result: dict[str, Any]) -> list[str]:
    """Lines of Markdown from the JSON of a run; none without the copy's speed or without decoding steps."""
    copy = result["figures"].get("kernels", {}).get("copy", {}).get("gb_per_s")
    rows = []
    for model, found in result["figures"].items():
        for name, figure in found.items():
            if copy and name.startswith("decode ") and "gb" in figure:
                least_ms = figure["gb"] / copy * 1e3
                rows.append(
                    f"| {model} | {name.removeprefix('decode ')} | {figure['gb']:.3g} | {least_ms:.3g} "
                    f"| {figure['step_ms']:.3g} | {least_ms / figure['step_ms']:.0%} | {figure['tokens_per_s']:,.0f} |"
                )
    if not rows:
        return []
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return [
        f"{result['device']}, {result['date']}, {versions}; a copy moves {copy:,.0f} GB/s. Made-up weights.",
        "",
        "| model | requests at positions | GB to read | ms at the copy's speed | ms a step | share | tokens/s |",
        "|---|---|---|---|---|---|---|",
        *rows,
    ]


def write_page(path: Path) -> None:
    """Put the table of a saved result between the page's marks."""
    result = json.loads(path.read_text())
    if result["tiny"]:
        raise SystemExit(f"{path}: tiny shapes measure nothing")
    lines = table(result)
    if not lines:
        raise SystemExit(f"{path}: has no decoding steps beside the speed of a copy (--parts kernels,decode)")
    head, _, rest = PAGE.read_text().partition(MARKS[0])
    assert rest, f"{PAGE.name} has lost its mark: {MARKS[0]}"
    PAGE.write_text("\n".join([head + MARKS[0], "", *lines, ""]) + MARKS[1] + rest.partition(MARKS[1])[2])

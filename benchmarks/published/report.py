"""What a reproduction found, and how it is shown: a table, a plot, a page."""

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.pairs import machine, record

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "img"
PAGE = ROOT / "docs" / "benchmarks.md"
MARKS = "<!-- published results: written by make bench -->", "<!-- end of the published results -->"


class Row(NamedTuple):
    """One figure, before the change and after it."""

    what: str
    before: float
    after: float
    unit: str
    higher_is_better: bool = True

    @property
    def ratio(self) -> float:
        """How many times as good it is after."""
        if min(self.before, self.after) <= 0:
            return float("nan")
        return self.after / self.before if self.higher_is_better else self.before / self.after


class Report(NamedTuple):
    name: str
    title: str
    before: str  # what stands for the way it was
    after: str
    published: str  # what others saw, and where they said so
    rows: Sequence[Row]
    note: str = ""


def run_script(*command: str) -> list[dict[str, Any]]:
    """Run another benchmark and pass on what it prints; the JSON lines among that."""
    found = []
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found.append(json.loads(line))
        else:
            print("  " + line, end="", flush=True)
    if process.wait() != 0:
        raise SystemExit(f"{command[0]} ended with {process.returncode}")
    return found


def script(make: Callable[[bool], Report]) -> None:
    """What a reproduction does when it is run by itself."""
    show(make("--full" in sys.argv[1:]))


def show(report: Report) -> None:
    """The table, the JSON line and the plot."""
    print(f"\n{report.title}\n  before: {report.before}\n  after:  {report.after}")
    width = max(len(row.what) for row in report.rows)
    for row in report.rows:
        print(
            f"  {row.what:{width}}  {figure(row.before):>12} → {figure(row.after):>12} {row.unit:12} {row.ratio:8.2f}×"
        )
    record(
        f"published-{report.name}",
        {"rows": [{**row._asdict(), "ratio": round(row.ratio, 3)} for row in report.rows], "note": report.note},
    )
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / f"published-{report.name}.svg").write_text(plot(report))


def figure(value: float) -> str:
    """Four digits, and no exponent."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def plot(report: Report) -> str:
    """Two bars for every figure, as long as their share of the longer one; readable on light and on dark."""
    left, right, bar, gap = 250, 470, 16, 46
    height = 66 + gap * len(report.rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {height}" font-family="system-ui, sans-serif"'
        ' font-size="14" fill="#7d8590">',
        f'<text x="0" y="18" font-size="16" font-weight="600">{escape(report.title)}</text>',
        f'<text x="0" y="40"><tspan fill="#9aa4af">■</tspan> {escape(report.before)}   '
        f'<tspan fill="#2f81f7">■</tspan> {escape(report.after)}</text>',
    ]
    for number, row in enumerate(report.rows):
        top = 58 + gap * number
        parts.append(f'<text x="0" y="{top + 20}">{escape(row.what)}</text>')
        longest = max(row.before, row.after) or 1
        for place, (value, colour) in enumerate(((row.before, "#9aa4af"), (row.after, "#2f81f7"))):
            y, width = top + place * (bar + 2), max(1, right * value / longest)
            parts.append(f'<rect x="{left}" y="{y}" width="{width:.1f}" height="{bar}" rx="2" fill="{colour}"/>')
            parts.append(f'<text x="{left + width + 8:.1f}" y="{y + 13}">{figure(value)} {escape(row.unit)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_page(reports: Sequence[Report], is_full: bool) -> None:
    """Put the figures between the marks of docs/benchmarks.md; those that were not run again stay out."""
    found = machine()
    lines = [
        f"Of {datetime.now(UTC):%Y-%m-%d}, {'full sizes' if is_full else 'the short form'}, {found['cores']} cores "
        f"({found['cpu']}), {found['memory_gib']:g} GiB, load before {found['load_before']:g}, "
        f"Python {platform.python_version()}. Medians; a ratio above 1 is better after.",
        "",
    ]
    for report in reports:
        lines += [
            f"### {report.title}",
            "",
            f"Before: {report.before}. After: {report.after}. Published: {report.published}",
            "",
            "| | before | after | | ratio |",
            "|---|---|---|---|---|",
            *(
                f"| {row.what} | {figure(row.before)} | {figure(row.after)} | {row.unit} | {row.ratio:.2f} |"
                for row in report.rows
            ),
            "",
            f"![{report.title}](img/published-{report.name}.svg)",
            "",
            *([report.note, ""] if report.note else []),
        ]
    head, _, rest = PAGE.read_text().partition(MARKS[0])
    assert rest, f"{PAGE.name} has lost its mark: {MARKS[0]}"
    tail = rest.partition(MARKS[1])[2]
    PAGE.write_text("\n".join([head + MARKS[0], "", *lines]) + MARKS[1] + tail)

"""The published results that this project set out to reproduce: each before and after, in one run.

    python -m benchmarks.published [keys broadcast disk hasher eplb] [--full]
    python -m benchmarks.published [keys broadcast disk hasher eplb] [--full] --against REVISION [--rounds 3]

The short form of all of them takes under ten minutes on two cores; --full runs the real sizes. Every result ends in a
JSON line, a plot in docs/img and, when all are run, the figures in docs/benchmarks.md. Most run another script of this
folder and take their figures from its line.

--against asks what a change has cost: the same figures, those after, by this checkout and by that revision in turn, each
by its own scripts. Both are unpacked elsewhere, with an extension of their own; changes count, files that git does not
know do not. Its ratios are in its JSON line alone.
"""

import argparse
import io
import json
import math
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.shapes import LLAMA, model_folder
from benchmarks.pairs import ROOT, cpu_ms, machine, record, rounds, summary

IMAGES = ROOT / "docs" / "img"
PAGE = ROOT / "docs" / "benchmarks.md"
MARKS = "<!-- published results: written by make bench -->", "<!-- end of the published results -->"
# As much to keep for each token as a model of 8 billion parameters has, 128 KiB, and little to compute: with
# an accelerator's speed a disk has to follow, and a CPU's would hide what the disk costs.
KV_HEAVY = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096}
KV_HEAVY |= {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 256, "tie_word_embeddings": True}
KV_HEAVY |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 4096}


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
    published: str  # what others saw
    rows: Sequence[Row]
    note: str = ""


# -- the five results --------------------------------------------------------------------------------------------


def run_script(name: str, *options: str) -> dict[str, Any]:
    return run(f"benchmarks/{name}.py", *options)


def run(*words: str, root: Path = ROOT) -> dict[str, Any]:
    """Run a benchmark of a checkout and pass on what it prints; its last JSON line."""
    found = {}
    env = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, *words]
    with subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                print("  " + line, end="", flush=True)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode}")
    return found


def keys(is_full: bool) -> Report:
    found = run_script("bench_scheduler", "keys", *(() if is_full else ("--requests", "4000", "--pairs", "5")))
    before, after = (found["loop"]["medians"][design] for design in ("objects", "digests"))
    hashing = found["hashing_us"]
    hashed = hashing["prompt: objects, built-in hash"], hashing["prompt: block_keys, int32 buffer"]
    return Report(
        "keys",
        "Keys of cached blocks",
        "a hash and a tuple of tokens",
        "32 bytes of SHA-256, made in C",
        "digests in place of objects, for fewer collections and more throughput (vLLM's change to bytes keys).",
        [
            Row("scheduled requests", before["requests_per_s"], after["requests_per_s"], "per second"),
            Row("garbage collections", before["gc_collections"], after["gc_collections"], "", False),
            Row("seconds in the collector", before["gc_seconds"], after["gc_seconds"], "s", False),
            Row("objects it has to walk", before["tracked_objects"], after["tracked_objects"], "", False),
            Row("39,000 tokens", *hashed, "µs", False),
        ],
        "Scheduling alone, with an executor that answers at once; a run of each in turn, each in a process of its own.",
    )


def broadcast(is_full: bool) -> Report:
    size = ("--readers", "1", "2", "--pairs", "6") if is_full else ("--readers", "2", "--pairs", "4")
    load = ("--pairs", "6") if is_full else ("--pairs", "4", "--requests", "128", "--output-len", "16")
    served = run_script("bench_answers", "masks", *load)["requests"]
    found = run_script("bench_ring", *size)
    times = found["ours_against"]["ours-inband"]
    rows = [Row("constrained answers, 2 ranks", served["in the pickle"], served["out of band"], "per second")]
    rows += [
        Row(f"a mask of {name} to {found['readers']} readers", pair["other_us"], pair["ours_us"], "µs", False)
        for name, pair in times.items()
        if "MB" in name
    ]
    return Report(
        "broadcast",
        "Arrays through the shared-memory ring",
        "inside the pickle",
        "out of band, read in place",
        "59.6 → 70.2 requests/s of structured output served (vLLM's out-of-band broadcast).",
        rows,
        "Answers from a model of one layer over a vocabulary of 152,064, on the cores that the masks are copied by; a mask "
        "of 256 rows over it has 4.9 MB. Masks of a size are round trips through the ring, the least of each side's times.",
    )


def disk(is_full: bool) -> Report:
    size = ("--pairs", "10", "--prompts", "16") if is_full else ("--pairs", "6", "--prompts", "8")
    with model_folder(KV_HEAVY) as folder:
        model = ("--model", folder, "--load-format", "dummy", "--vocab", "4000", "--output-len", "4")
        seconds = run_script("bench_tiers", "cost", *model, *size)["median_s"]
    caller = seconds["host+disk, caller writes"]
    return Report(
        "disk",
        "A batch of new prompts with the tiers on",
        "the caller writes to the disk",
        "the tier as it is, or less of it",
        "123.6 s with writes in the caller, 92.4 s in workers; 91.3 s with memory only, 83.6 s with nothing (LMCache).",
        [
            Row("host and disk", caller, seconds["host+disk"], "s", False),
            Row("host alone", caller, seconds["host"], "s", False),
            Row("no tiers", caller, seconds["none"], "s", False),
        ],
        "A small model with 128 KiB for every token, as 8 billion parameters have; every prompt is new, so nothing is "
        "found again and all of it is cost. The first figure of each row is the same run.",
    )


def hasher(is_full: bool) -> Report:
    rows = []
    for clients in (1, 16, 128):
        size = ("256", "--pairs", "2") if is_full else (str(max(16, clients)), "--pairs", "3")
        found = run_script("bench_route", "hash", "--clients", str(clients), "--requests", *size)
        first_byte, requests = ((found[what]["Python"], found[what]["C"]) for what in ("first_byte_p95", "requests"))
        name = f"{clients} at once" if clients > 1 else "one at a time"
        rows.append(Row(f"first byte p95, {name}", *first_byte, "s", False))
        rows.append(Row(f"requests, {name}", *requests, "per second"))
    return Report(
        "hasher",
        "Prompts of 39,000 tokens through the router",
        "block keys in Python, on the loop",
        "block keys in C",
        "p95 to the first token from 3.1 s to 10.7 s at 128 at once, with the hash in Python.",
        rows,
        "The replicas answer at once, so the router's CPU is the only variable; router, replica and clients share the "
        "two cores.",
    )


def eplb(is_full: bool) -> Report:
    from penstock.eplb import workloads
    from penstock.eplb.bench import make
    from penstock.eplb.maps import Plan

    def by_definition(cell: workloads.Cell, load: Any) -> Plan:
        placed = workloads.plan_by_definition(load, cell.slots, cell.ranks, cell.groups, cell.nodes)
        return Plan.of(placed, cell.experts, cell.ranks)

    rows = []
    for cell in workloads.CELLS if is_full else workloads.CELLS[:4]:
        load = workloads.load(cell, "zipf", 0)
        before = cpu_ms(partial(by_definition, cell, load), 5 if is_full else 3)
        rows.append(Row(cell.name, before, cpu_ms(partial(make, cell, load), 20), "ms", False))
    return Report(
        "eplb",
        "A plan for the experts, with its tables",
        "the published algorithm as loops",
        "arrays",
        "80 → 10 ms for DeepSeek-V2-Lite on 8 GPUs (vLLM's planner in numpy).",
        rows,
        "CPU time of one thread. The planner in numpy that vLLM 0.32 has is the peer of benchmarks/bench_eplb.py. The "
        "second half of the published change, index tables copied from the device once and not for every layer, needs "
        "a GPU and is not measured here; ours never leave the host.",
    )


RESULTS = {"keys": keys, "broadcast": broadcast, "disk": disk, "hasher": hasher, "eplb": eplb}


# -- how they are shown ------------------------------------------------------------------------------------------


def show(report: Report) -> None:
    """What the page will say, the JSON line and the plot."""
    print("\n".join(section(report)))
    rows = [{**row._asdict(), "ratio": round(row.ratio, 3)} for row in report.rows]
    record(f"published-{report.name}", {"rows": rows, "note": report.note})
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


def section(report: Report) -> list[str]:
    rows = [
        f"| {row.what} | {figure(row.before)} | {figure(row.after)} | {row.unit} | {row.ratio:.2f} |"
        for row in report.rows
    ]
    what = f"Before: {report.before}. After: {report.after}. Published: {report.published}"
    lines = [f"### {report.title}", "", what, "", "| | before | after | | ratio |", "|---|---|---|---|---|", *rows, ""]
    return [
        *lines,
        f"![{report.title}](img/published-{report.name}.svg)",
        "",
        *([report.note, ""] if report.note else []),
    ]


def write_page(reports: Sequence[Report], is_full: bool) -> None:
    """Put the figures between the marks of docs/benchmarks.md; those that were not run again stay out."""
    found = machine()
    head = (
        f"Of {datetime.now(UTC):%Y-%m-%d}, {'full sizes' if is_full else 'the short form'}, {found['cores']} cores "
        f"({found['cpu']}), {found['memory_gib']:g} GiB, load before {found['load_before']:g}, "
        f"Python {platform.python_version()}. Medians; a ratio above 1 is better after."
    )
    write_between(PAGE, MARKS, [head, "", *(line for report in reports for line in section(report))])


def write_between(page: Path, marks: tuple[str, str], lines: Sequence[str]) -> None:
    """Replace what a page has between two marks."""
    head, _, rest = page.read_text().partition(marks[0])
    assert rest, f"{page.name} has lost its mark: {marks[0]}"
    page.write_text("\n".join([head + marks[0], "", *lines]) + marks[1] + rest.partition(marks[1])[2])


# -- this checkout against a revision ----------------------------------------------------------------------------


def compare(names: Sequence[str], revision: str, is_full: bool, count: int) -> None:
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        here = git("stash", "create").decode().strip() or "HEAD"  # a commit of all changes, kept nowhere
        trees = {"here": unpacked(here, Path(folder) / "0"), revision: unpacked(revision, Path(folder) / "1")}
        for name in names:
            words = "-m", "benchmarks.published", name, *(["--full"] if is_full else [])
            found = rounds({side: partial(run, *words, root=tree) for side, tree in trees.items()}, count)
            for row in found["here"][0]["rows"]:
                both = {side: [after(line, row["what"]) for line in lines] for side, lines in found.items()}
                title = f"{name}, {row['what']}"
                figures[title] = summary(title, both, row["unit"], row["higher_is_better"])
    record("published-against", {"against": revision, "rounds": count, "figures": figures})


def after(line: dict[str, Any], what: str) -> float:
    """NaN where that revision does not measure it."""
    return next((row["after"] for row in line["rows"] if row["what"] == what), math.nan)


def unpacked(commit: str, folder: Path) -> Path:
    print(f"building {commit}", flush=True)
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as archive:
        archive.extractall(folder, filter="tar")
    subprocess.run([sys.executable, "csrc/build.py"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def git(*words: str) -> bytes:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, stdout=subprocess.PIPE).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RESULTS)} (default: all)")
    parser.add_argument("--full", action="store_true", help="the real sizes")
    parser.add_argument("--against", metavar="REVISION", help="compare this checkout with another one")
    parser.add_argument("--rounds", type=int, default=3, help="of a comparison")
    args = parser.parse_args()
    for name in args.names:
        if name not in RESULTS:
            parser.error(f"{name!r} given; known are {', '.join(RESULTS)}")
    if args.against:
        compare(args.names or list(RESULTS), args.against, args.full, args.rounds)
        return
    started_s = time.monotonic()
    reports = []
    for name in args.names or RESULTS:
        print(f"== {name}, {time.monotonic() - started_s:.0f} s after the start", flush=True)
        reports.append(RESULTS[name](args.full))
        show(reports[-1])
    if len(reports) == len(RESULTS):
        write_page(reports, args.full)
    print(f"{time.monotonic() - started_s:.0f} s in all")


if __name__ == "__main__":
    main()

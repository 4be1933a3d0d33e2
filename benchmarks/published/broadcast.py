"""Grammar masks to the workers: inside the pickle of a message, or out of band.

python -m benchmarks.published.broadcast [--full]
"""

import statistics

from benchmarks.published.report import Report, Row, run_script, script


def make(is_full: bool) -> Report:
    size = ("--readers", "1", "2", "--pairs", "6") if is_full else ("--readers", "2", "--pairs", "4")
    load = ("--pairs", "6") if is_full else ("--pairs", "4", "--requests", "128", "--output-len", "16")
    (served,) = run_script("benchmarks/bench_masks.py", *load)
    before, after = (statistics.median(served[side]) for side in ("in_band_req_s", "out_of_band_req_s"))
    found = run_script("benchmarks/bench_ring.py", *size)[-1]
    times = found["ours_against"]["ours-inband"]["time"]
    rows = [Row("constrained answers, 2 ranks", before, after, "per second")]
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


if __name__ == "__main__":
    script(make)

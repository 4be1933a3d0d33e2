"""Block keys as digests in place of tuples: what the garbage collector gives back.

python -m benchmarks.published.keys [--full]
"""

from benchmarks.published.report import Report, Row, run_script, script


def make(is_full: bool) -> Report:
    size = () if is_full else ("--requests", "4000", "--pairs", "5")
    (found,) = run_script("benchmarks/bench_keys.py", *size)
    before, after = (found["loop"]["medians"][design] for design in ("objects", "digests"))
    hashing = found["hashing_us"]
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
            Row(
                "39,000 tokens",
                hashing["prompt: objects, built-in hash"],
                hashing["prompt: block_keys, int32 buffer"],
                "µs",
                False,
            ),
        ],
        "Scheduling alone, with an executor that answers at once; a run of each by turns, each in a process of its own.",
    )


if __name__ == "__main__":
    script(make)

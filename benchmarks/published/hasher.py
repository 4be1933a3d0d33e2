"""A router that hashes 39,000 tokens in Python before each decision, and one that does it in C.

python -m benchmarks.published.hasher [--full]
"""

from benchmarks.published.report import Report, Row, run_script, script


def make(is_full: bool) -> Report:
    rows = []
    for clients in (1, 16, 128):
        size = (
            ("--requests", "256", "--pairs", "2") if is_full else ("--requests", str(max(16, clients)), "--pairs", "3")
        )
        (found,) = run_script("benchmarks/route_hash_case.py", "--clients", str(clients), *size)
        slow, fast = found["slow"], found["c"]
        name = f"{clients} at once" if clients > 1 else "one at a time"
        rows += [
            Row(f"first byte p95, {name}", slow["first_byte_p95_s"], fast["first_byte_p95_s"], "s", False),
            Row(f"requests, {name}", slow["requests_per_s"], fast["requests_per_s"], "per second"),
        ]
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


if __name__ == "__main__":
    script(make)

"""Plans for the experts of a model: the published loops, and arrays.

python -m benchmarks.published.eplb [--full]
"""

import statistics
import time
from collections.abc import Callable

from benchmarks.published.report import Report, Row, script

from penstock.eplb import workloads
from penstock.eplb.bench import make as plan_cell
from penstock.eplb.maps import Plan
from penstock.eplb.workloads import plan_by_definition


def make(is_full: bool) -> Report:
    rows = []
    for cell in workloads.CELLS if is_full else workloads.CELLS[:4]:
        load = workloads.load(cell, "zipf", 0)

        def by_definition() -> object:
            placed = plan_by_definition(load, cell.slots, cell.ranks, cell.groups, cell.nodes)  # noqa: B023
            return Plan.of(placed, cell.experts, cell.ranks)  # noqa: B023

        before = cpu_ms(by_definition, 5 if is_full else 3)
        after = cpu_ms(lambda: plan_cell(cell, load), 20)  # noqa: B023
        rows.append(Row(cell.name, before, after, "ms", False))
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


def cpu_ms(call: Callable[[], object], times: int) -> float:
    found = []
    for _ in range(times):
        started_s = time.thread_time()
        call()
        found.append((time.thread_time() - started_s) * 1e3)
    return statistics.median(found)


if __name__ == "__main__":
    script(make)

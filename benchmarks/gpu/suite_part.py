"""benchmarks/gpu_suite.py as the last rung: its JSON and its plot go beside the ladder's lines."""

import json
import sys
from typing import Any

from benchmarks import gpu_suite
from benchmarks.gpu.figures import open_device, tell

MARGIN_S = 15.0  # of the rung's time


def main(job: dict[str, Any]) -> None:
    open_device(job)
    budget_s = job["limit_s"] - MARGIN_S
    sys.argv = ["gpu_suite", "--output", job["output"], "--budget-s", str(budget_s), "--device", job["device"]]
    sys.argv += ["--tiny"] * job["tiny"] + job["suite"]
    tell("suite", ok=gpu_suite.main() == 0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

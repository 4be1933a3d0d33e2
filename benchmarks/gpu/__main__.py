"""A part in this process: `python -m benchmarks.gpu MODULE JOB`, the job as JSON."""

import importlib
import json
import sys

if __name__ == "__main__":
    importlib.import_module(f"benchmarks.gpu.{sys.argv[1]}").main(json.loads(sys.argv[2]))

"""All tensor computation. The environment variable set here must be set before torch is first imported."""

import os

# The number of loop iterations that an OpenMP thread spins at the end of a parallel region before it sleeps. By default
# it spins for milliseconds; if another process uses the same cores, each of a step's 200 regions then waits for a
# thread that is not running: 218 ms per step instead of 13 (SmolLM2-135M, two cores, load 4). A short spin costs 4 %
# on an idle machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

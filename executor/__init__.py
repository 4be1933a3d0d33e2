"""Everything that computes with tensors. What is set here must be set before torch is first imported."""

import os

# How long (loop turns) an OpenMP thread spins at the end of a parallel region before it sleeps. The default spins
# for milliseconds; where another process wants the same cores, each of a step's 200 regions then waits for a
# thread that is not running: 218 ms a step instead of 13 (SmolLM2-135M, two cores, load 4). A short spin costs 4 %
# on a quiet machine.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

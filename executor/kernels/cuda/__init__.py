"""Kernels in Triton for NVIDIA GPUs: written for compute capability 9.0 (Hopper), compiled in the tests for 8.0, 8.9, 10.0
and 12.0 too. `ops.choose_ops` hands them out as `Ops`.

A folder of its own because triton is imported here and nowhere else. Each kernel stands beside the function that
launches it, and that function has the signature of its plain-torch twin. Tile sizes are in `tiles`: nothing is tuned
while requests wait.
"""

"""Kernels in Triton for NVIDIA GPUs of compute capability 9.0 (Hopper). `ops.make_ops` hands them out as `Ops`.

A folder of its own because triton is imported here and nowhere else. Each kernel stands beside the function that
launches it, and that function has the signature of its plain-torch twin. Tile sizes are in `tiles`: nothing is tuned
while requests wait.
"""

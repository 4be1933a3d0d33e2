"""Triton kernels for NVIDIA GPUs, written for compute capability 9.0 (Hopper); tests also compile them for 8.0, 8.9,
10.0 and 12.0. `ops.choose_ops` returns them as `Ops`.

Only this folder imports triton. Each kernel stands next to the function that launches it, and that function has the
signature of its plain-torch reference implementation. Tile sizes are fixed in `tiles`, so nothing is tuned while
requests wait.
"""

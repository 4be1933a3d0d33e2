"""Programmatic dependent launch: a kernel's programs may start while the previous kernel still runs, and wait there.

This hides the gap between two kernels, a large part of a small model's decoding step. It is correct because every such
kernel waits before it accesses memory that another kernel accesses. The wait ends when the whole previous kernel has
finished and its writes are visible. The previous kernel waited likewise, so all earlier ones have finished too. Kernels
launched in the usual way wait for all earlier kernels anyway.

On an H100 a step of one request of Qwen3-0.6B takes 1.09 ms with it and 1.13 ms without; 256 requests gain nothing.
"""

import triton
import triton.language as tl  # noqa: F401  (the interpreter looks it up in the module of a kernel)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.executor.kernels.card import current_card

ENABLED = not triton.knobs.runtime.interpret  # the interpreter runs kernels one after another


def is_dependent(_semantic: object = None) -> bool:
    """Tell whether kernels now use dependent launch. The compiler treats this as a builtin that returns a constant."""
    return ENABLED and current_card().has_dependent_launch


is_dependent.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def wait_and_allow_next():
    """Wait for the previous kernel, then let the next one start. Every kernel must call this first (or
    `wait_for_previous`): otherwise the next kernel would not wait for it. `launch.Kernel` passes `launch_pdl` to the
    launch."""
    if is_dependent():
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def allow_next():
    """Let the next kernel start. For a kernel that works before `wait_for_previous`; that work must not access memory
    that other kernels write."""
    if is_dependent():
        gdc_launch_dependents()


@triton.jit
def wait_for_previous():
    """Wait until the previous kernel has finished."""
    if is_dependent():
        gdc_wait()

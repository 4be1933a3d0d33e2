"""Programmatic dependent launch: a kernel's programs may start while the one before it still runs, and wait there.

What is saved is the time from one kernel's end to the next one's start, a large part of a small model's decoding step.
It is right because every such kernel takes its turn before anything else: whatever it reads, writes or returns from
comes after the whole kernel before it, memory included. That one waited likewise, so all earlier ones are over as well,
and kernels that are launched in the usual way wait for everything by themselves.
"""

import triton
import triton.language as tl  # noqa: F401  (the interpreter asks for it where a kernel is)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from penstock.executor.kernels.card import current_card

ENABLED = False  # no GPU has shown what it gains: the seventh rung of `make gpu-first` measures that


def is_dependent(_semantic: object = None) -> bool:
    """What is launched now; to the compiler a function like its own, whose answer is a constant."""
    return ENABLED and current_card().has_dependent_launch


is_dependent.__triton_builtin__ = True  # type: ignore[attr-defined]


@triton.jit
def take_turn():
    """To be the first thing that a kernel does: where no program of it waited, the next would not wait for this one. Its
    launch is given `launch_pdl`, by launch.Kernel."""
    if is_dependent():
        gdc_wait()
        gdc_launch_dependents()

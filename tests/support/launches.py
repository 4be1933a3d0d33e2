"""Kernels compiled and launched over a driver library that notes what it is given: tests/support/idle_gpu.py.

A process of its own, as where kernels are interpreted they cannot be compiled. Run as

    python tests/support/launches.py FOLDER

it writes what came of it as one JSON object.
"""

import ctypes
import json
import sys
import warnings
from typing import Any

import torch

from tests.support import idle_gpu

LIBRARY, GPU = idle_gpu.install(sys.argv[1])
ctypes.c_uint32.in_dll(LIBRARY, "num_given").value = 5

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from penstock.executor.kernels.cuda import launch  # noqa: E402
from tests.support.variants import variants  # noqa: E402

GIVEN = {"WIDTH": 3, "BLOCK": 64, "num_warps": 2, "launch_pdl": True}
X, Y = torch.zeros(64), torch.zeros(64)


def noted(x_ptr, y_ptr, WIDTH: tl.constexpr, stride, scale, BLOCK: tl.constexpr, count):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at * stride + WIDTH, mask=at < count)
    tl.store(y_ptr + at, x * scale)


def last() -> list[int]:
    """Grid, block, shared memory, stream, function, number of attributes, the five arguments."""
    return list((ctypes.c_uint32 * 64).in_dll(LIBRARY, "last"))[:15]


def both_ways(kernel: launch.Kernel) -> list[tuple[list[int], list[int]]]:
    """Triton's own, and ours once the variant is known."""
    found = []
    for grid, x, stride, scale, count in (
        ((3,), X, 1, 0.5, 16),
        ((2, 5), Y, 7, -1.5, 1),
        ((2, 3, 4), X[16:], 9, 2.0, -3),
    ):
        kernel._jit[grid](x, Y, stride=stride, scale=scale, count=count, **GIVEN)
        theirs = last()
        for _ in range(2):
            kernel[grid](x, Y, stride, scale, count, **GIVEN)
        found.append((theirs, last()))
    assert None not in kernel._known.values()
    return found


def refusals(kernel: launch.Kernel) -> list[str]:
    """By a variant that is known. Last, tensors that are not on the device."""
    found = []
    for x, stride, GPU.device in ((X, 2**31, -1), (X, 0.5, -1), (X[1:], 1, -1), (X, 1, 0)):
        try:
            kernel[(1,)](x, Y, stride, 1.0, 1, **GIVEN)
        except (AssertionError, OverflowError, TypeError) as error:
            found.append(str(error))
    GPU.device = -1
    return found


def devices(kernel: launch.Kernel) -> list[list[int]]:
    """Stream and function where two devices take turns."""
    found = []
    launch._devices = lambda _: int(GPU.device)  # type: ignore[assignment]
    for GPU.device in (-1, 0, -1, 0):
        for _ in range(2):
            kernel[(1,)](X, Y, 1, 1.0, 1, **GIVEN)
        found.append(last()[7:9])
    GPU.device, launch._devices = -1, torch.Tensor.get_device
    return found


def watched(kernel: launch.Kernel) -> list[str]:
    seen: list[str] = []
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(note := lambda metadata: seen.append(metadata.get()["name"]))
    kernel[(1,)](X, Y, 1, 1.0, 1, **GIVEN)
    hook.remove(note)
    kernel[(1,)](X, Y, 1, 1.0, 1, **GIVEN)
    return seen


def unknown() -> tuple[list[int], list[str]]:
    """With a Triton whose launcher is another."""
    launch.KNOWN_INTERFACE = "another"
    launch._runtime.cache_clear()
    kernel = launch.kernel(noted)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            kernel[(2, 5)](Y, Y, 7, -1.5, 1, **GIVEN)
    return last()[:7], [str(warning.message).split(":")[0] for warning in warned]


def main() -> None:
    kernel = launch.kernel(noted)
    found: dict[str, Any] = {}
    for what in (both_ways, devices, refusals, watched):
        found[what.__name__] = what(kernel)
    found["variants"] = [(variant.kernel, variant.device) for variant in variants()]
    print(json.dumps(found | {"unknown": unknown()}))


if __name__ == "__main__":
    main()

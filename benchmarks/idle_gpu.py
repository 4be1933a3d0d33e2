"""A GPU that takes no time: kernels are compiled for Hopper and launched by Triton's launcher in C, over a driver library
whose calls return at once. What is left is the host's own work. Tensors are the CPU's, and no kernel ever runs.

The Triton is that of the GPU machines, from .venv/triton. A product of tiny matrices on the CPU stands for the call of
cuBLAS, a tensor on the CPU for one on the GPU: near to their cost for the host, but not the same.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PINNED = Path(sys.prefix) / "triton"
DRIVER = r"""
#include <stddef.h>
#include <stdint.h>
int cuLaunchKernelEx(const void *config, void *function, void **given, void **extra) { return 0; }
int cuPointerGetAttribute(uint64_t *out, int attribute, uint64_t pointer) { *out = pointer; return 0; }
int cuGetErrorString(int code, const char **out) { *out = "error"; return 0; }
int cuCtxGetCurrent(void **out) { *out = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuDeviceGet(int *out, int ordinal) { *out = 0; return 0; }
int cuDevicePrimaryCtxRetain(void **out, int device) { *out = (void *)1; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
"""


def install(folder: str) -> None:
    """Before anything imports triton; the driver is built in `folder`."""
    library = Path(folder) / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O2", "-x", "c", "-", "-o", str(library), f"-Wl,-soname,{library.name}"]
    subprocess.run(command, input=DRIVER.encode(), check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = folder
    if PINNED.is_dir():
        sys.path.insert(0, str(PINNED))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    driver.PyCUtensorMap = object

    class Idle:
        launcher_cls = driver.CudaLauncher

        def __init__(self) -> None:
            self.utils = self

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return -1  # the CPU's number as torch has it: a launch asserts that its tensors are on the device

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 227 << 10}

        def load_binary(self, *given: Any) -> tuple[int, ...]:
            return 1, 1, 32, 0, 1024  # module, function, registers, spills, most threads

    triton.runtime.driver.set_active(Idle())

"""Builds every C source of this folder into one extension, `penstock._csrc` (cffi API mode, stable ABI).

A unit is `<name>.c` plus `<name>.cdef.h`: plain declarations, without preprocessor lines, which the C file includes and
cffi parses, so the two cannot diverge; to Python, the types of addresses.h are integers. A new pair needs no
registration. Kernels are compiled for every level of instructions and chosen at run time. `python csrc/build.py` builds
in place, setup.py into the wheel: on all cores, without debug information. A build in place leaves out AVX-512 if this
machine lacks it: `make serve` waits for the compiler, and AVX-512 is more than half of its work.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cffi import FFI
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

FOLDER = Path(__file__).resolve().parent
MODULE = "penstock._csrc"
ADDRESSES = "typedef uintptr_t inputs, outputs, floats, int32s, int64s, uint8s;"
FLAGS = ("-O3", "-g0", "-std=c11", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden")


class BuildOnAllCores(build_ext):
    """A build_ext that runs one compiler per core; setuptools compiles one source after the other."""

    def build_extensions(self) -> None:
        compile_sources = self.compiler.compile

        def compile_each(sources: Sequence[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(num_cores()) as pool:
                objects = pool.map(lambda source: compile_sources([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_each
        super().build_extensions()


def num_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lacks_avx512() -> bool:
    """Tell whether no kernel for AVX-512 can run on this machine."""
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "avx512_vnni" not in cpus.read_text()


def describe(source_root: str, macros: Sequence[tuple[str, str]] = ()) -> FFI:
    """Describe the extension. setuptools requires sources relative to setup.py, an in-place build absolute ones."""
    cdefs = sorted(FOLDER.glob("*.cdef.h"))
    ffi = FFI()
    ffi.cdef(ADDRESSES)
    for cdef in cdefs:
        ffi.cdef(cdef.read_text())
    headers = "\n".join(f'#include "{cdef.name}"' for cdef in cdefs)
    ffi.set_source(
        MODULE,
        f"#include <stddef.h>\n#include <stdint.h>\n{ADDRESSES}\n{headers}",
        sources=[os.path.join(source_root, source.name) for source in sorted(FOLDER.glob("*.c"))],
        depends=[os.path.join(source_root, header.name) for header in sorted(FOLDER.glob("*.h"))],
        include_dirs=[source_root],
        define_macros=[("Py_LIMITED_API", "0x030B0000"), *macros],
        py_limited_api=True,
        extra_compile_args=list(FLAGS),
        libraries=["m"],
    )
    return ffi


def build_in_place() -> Path:
    """Compile into src/penstock. The file is replaced by a rename: running processes keep the file they have mapped."""
    package = FOLDER.parent / "src" / "penstock"
    macros = [("PENSTOCK_WITHOUT_AVX512", "1")] if lacks_avx512() else []
    with tempfile.TemporaryDirectory() as scratch:
        extension = describe(str(FOLDER), macros).distutils_extension(scratch, verbose=False)
        command = BuildOnAllCores(Distribution({"ext_modules": [extension]}))
        command.build_lib = command.build_temp = scratch
        command.ensure_finalized()
        command.run()
        built = Path(command.get_ext_fullpath(MODULE))
        fresh = package / (built.name + f".{os.getpid()}")
        shutil.copy(built, fresh)
    return fresh.replace(package / built.name)


if __name__ == "__main__":
    print(f"built {build_in_place()}", file=sys.stderr)
else:
    ffibuilder = describe(os.path.relpath(FOLDER))  # setup.py: cffi_modules=["csrc/build.py:ffibuilder"]

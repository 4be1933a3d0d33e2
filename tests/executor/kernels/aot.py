"""Compiles for compute capability 9.0 whatever the launchers launch, with no GPU, and reports on the machine code.

A process of its own: where kernels are interpreted they cannot be compiled. The launchers run on CPU tensors, so that
dtypes, alignment and tile sizes are the ones a GPU would see; the launch itself is left out. Run as

    python tests/executor/kernels/aot.py GROUP

it writes one JSON line per compiled kernel: the case, the kernel, registers, stack, shared memory, tensor-core and
copy instructions. The cases of each group are in aot_cases.py.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PINNED = Path(sys.prefix) / "triton"
if PINNED.is_dir():
    sys.path.insert(0, str(PINNED))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTIONS = ("HGMMA", "QGMMA", "HMMA", "LDGSTS", "LDL", "STL")


class Hopper:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise AssertionError("compiling needs no device")


def main(group: str) -> None:
    triton.runtime.driver.set_active(Hopper())
    compiled: dict[int, tuple[str, Any]] = {}  # those of one case, each once

    def launch(self: JITFunction, grid: Any) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **options)
            compiled[id(kernel)] = (self.__name__, kernel)

        return compile_only

    JITFunction.__getitem__ = launch

    from tests.executor.kernels.aot_cases import GROUPS

    for case, call in GROUPS[group].items():
        compiled.clear()
        call()
        for name, kernel in compiled.values():
            print(json.dumps({"case": case, "kernel": name, **describe(kernel)}), flush=True)


def describe(kernel: Any) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = run(TOOLS / "nvdisasm", file.name)
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS}
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "STACK"))
    # Before its turn a kernel may neither read nor write what other kernels do, and not leave.
    before, wait, _ = code.partition("ACQBULK")
    early = len(re.findall(r"\b(LDG|LDGSTS|STG|ATOMG|ATOM|RED|REDG|EXIT)\b", before)) if wait else None
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "is_dependent": bool(kernel.metadata.launch_pdl),
        "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
        "launches": kernel.asm["ptx"].count("griddepcontrol.launch_dependents"),
        "early": early,
        **counts,
    }


def run(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(sys.argv[1])

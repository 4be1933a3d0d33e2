"""Compiles for a GPU that is not there whatever the launchers launch, and reports on the machine code.

A process of its own: where kernels are interpreted they cannot be compiled. The launchers run on CPU tensors, so that
dtypes, alignment and tile sizes are the ones a GPU would see; the launch itself is left out. Run as

    python tests/support/aot.py GROUP CARD …

it writes one JSON line per card, case and compiled kernel: registers, stack, shared memory, copy instructions, how warps
share a product, accesses of 16 bytes; or what the card lacks for a case, or what the compiler said. The cases of each
group are in aot_cases.py, the cards in cards.py.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

PINNED = Path(sys.prefix) / "triton"
if PINNED.is_dir():
    sys.path.insert(0, str(PINNED))

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INSTRUCTIONS = ("LDGSTS", "LDL", "STL")
ACCESSES = {  # of 16 bytes, and of one or two
    "wide_loads": r"\b(?:LDG|LDGSTS)\.E\S*\.128",
    "wide_stores": r"\bSTG\.E\S*\.128",
    "narrow": r"\b(?:LDG|STG)\.E\S*\.[US](?:8|16)\b",
}


class Absent:
    """As much of a driver as compiling asks for. A card is a device of its own: each has its own variants."""

    def __init__(self) -> None:
        self.index, self.capability = 0, (0, 0)

    def get_current_target(self) -> GPUTarget:
        major, minor = self.capability
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        raise AssertionError("compiling needs no device")


def main(group: str, *names: str) -> None:
    driver = Absent()
    triton.runtime.driver.set_active(driver)
    compiled: dict[int, tuple[str, Any]] = {}  # those of one case, each once

    def launch(self: JITFunction, grid: Any) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **options)
            compiled[id(kernel)] = (self.__name__, kernel)

        return compile_only

    JITFunction.__getitem__ = launch

    from penstock.executor.kernels import card as card_module
    from penstock.executor.kernels.cuda import dependent

    dependent.ENABLED = False  # but for cases that say so
    from tests.support import cards
    from tests.support.aot_cases import GROUPS, lack

    for driver.index, name in enumerate(names):
        card = getattr(cards, name)
        driver.capability = card.capability
        with mock.patch.object(card_module, "_WITHOUT_GPU", card):
            for case, call in GROUPS[group].items():
                found = {"card": name, "case": case}
                if lacking := lack(case, card):
                    print(json.dumps(found | {"lacking": lacking}), flush=True)
                    continue
                compiled.clear()
                try:
                    call()
                except Exception as error:
                    print(json.dumps(found | {"error": f"{type(error).__name__}: {error}"[:1000]}), flush=True)
                for kernel, code in compiled.values():
                    print(json.dumps(found | {"kernel": kernel} | describe(code)), flush=True)


def describe(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = run(TOOLS / "nvdisasm", file.name)
    counts = {name: len(re.findall(rf"\b{name}\b", code)) for name in INSTRUCTIONS}
    counts |= {name: len(re.findall(pattern, code)) for name, pattern in ACCESSES.items()}
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[0]) for what in ("REG", "STACK"))
    # Before its turn a kernel may neither read nor write what other kernels do, and not leave.
    before, wait, _ = code.partition("ACQBULK")
    early = len(re.findall(r"\b(LDG|LDGSTS|STG|ATOMG|ATOM|RED|REDG|EXIT)\b", before)) if wait else None
    return {
        "registers": registers,
        "stack": stack,
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        # What reaches a sum of a product: the instruction, and how a program's warps share its output.
        "products": sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.\S+", kernel.asm["ptx"]))),
        "layouts": sorted(set(re.findall(r"#mma\d* = #ttg\.nvidia_mma<(.*)>", kernel.asm["ttgir"]))),
        "joins": kernel.asm["ptx"].count("atom.global.gpu.acq_rel.add"),
        # The largest number of copies that a loop leaves in flight while it waits for the others.
        "in_flight": max(map(int, re.findall(r"async_wait .*num = (\d+)", kernel.asm["ttgir"])), default=0),
        "prefetches": kernel.asm["ptx"].count("prefetch.global.L2"),
        "narrows": kernel.asm["ptx"].count("cvt.rn.satfinite.e4m3x2"),
        "keeps_nan": len(re.findall(r"\b(?:min|max)\S*\.NaN", kernel.asm["ptx"])),
        "is_dependent": bool(kernel.metadata.launch_pdl),
        "waits": kernel.asm["ptx"].count("griddepcontrol.wait"),
        "launches": kernel.asm["ptx"].count("griddepcontrol.launch_dependents"),
        "early": early,
        **counts,
    }


def run(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compiles the kernels for a GPU that is not there, as the launchers launch them, and reports on the machine code.

This is a process of its own, because where kernels are interpreted they cannot be compiled. The launchers run on CPU
tensors, so that dtypes, alignment and tile sizes are the ones a GPU would see; the launch itself is left out. Run as

    python -m tests.support.aot GROUP CARD

it writes one JSON line per case and compiled kernel, or what the card lacks for a case, or the compiler's error. There is
one card, because Triton's conversions of eight-bit numbers stay those of the first that its process compiles for.
The cases are the lines of tests/executor/kernels/cases.txt, which are calls of benchmarks/gpu/cases.py; `quick` has a
few, `all` has every line, and `few` is what other cards than an H200 compile in the slow suite. A case's name says what
is special about it: "float32" and "float16", "dependent" (programs start before the previous kernel's end), "fixed"
(sums as with batch_invariant), "every size" (products of few rows whose weights are not prefetched), "by codes", "by row
scales" and "grouped" (products that are off, by `TAKES_CODES`, `MULTIPLIES_BY_ROW_SCALES` and `USES_GROUPED_MM`).
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

PINNED = Path(sys.prefix) / "triton"
if PINNED.is_dir():
    sys.path.insert(0, str(PINNED))

import torch  # noqa: E402
import triton  # noqa: E402
from benchmarks.gpu import cases  # noqa: E402
from benchmarks.gpu.switch_part import switched  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from penstock.executor.kernels import card as card_module  # noqa: E402
from penstock.executor.kernels.card import Card  # noqa: E402
from penstock.executor.kernels.cuda import adapter_products, rows, step_inputs  # noqa: E402
from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS, InvariantOps  # noqa: E402
from tests.support import cards, refusals  # noqa: E402
from tests.support.idle_gpu import IdleDriver  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FEW = {"Qwen3-0.6B: one row", "Qwen3-0.6B: prompts", "Qwen3-0.6B: rows", "Qwen3-0.6B: adapters"}
SWITCHES: dict[str, str] = dict(refusals.cases(__file__, "switches of kernels"))  # by words in the name of a case
KERNELS = cases.Kernels(OPS, SAMPLING_OPS, step_inputs, adapter_products.add_lora, is_held=False)


def block_copies(kit: cases.Kit, name: str, num_bytes: int) -> Iterator[cases.Case]:
    """Yield copies between blocks on the device and blocks of the host, which are further apart."""
    blocks, hosts = torch.zeros(2, num_bytes, dtype=torch.uint8), torch.zeros(2, num_bytes + 4096, dtype=torch.uint8)
    pairs = torch.zeros(1, 2, dtype=torch.int32)
    yield cases.Case(name, lambda _: step_inputs.copy_blocks(blocks, hosts[:, :num_bytes], pairs))


def read_group(group: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the call of each case of a group."""
    beside = str(Path(__file__).parents[1] / "executor/kernels/x")
    names = vars(cases) | {"block_copies": block_copies, "partial": partial}
    for section in ("compiled: quick", "compiled: all")[: 1 if group == "quick" else 2]:
        for build, name, *shape in refusals.cases(beside, section, **names):
            if group != "few" or name in FEW:
                yield name, partial(launch, name, build, shape)


def launch(name: str, build: Any, shape: list[Any]) -> None:
    dtype = torch.float32 if "float32" in name else torch.float16 if "float16" in name else torch.bfloat16
    kernels = KERNELS._replace(ops=InvariantOps(rows)) if "fixed" in name else KERNELS
    with switched({switch: words in name for switch, words in SWITCHES.items()}):
        for case in build(cases.Kit(torch.device("cpu"), dtype, layers=4, is_empty=True), name, *shape):
            case.call(kernels)


def lacks(name: str, card: Card) -> str | None:
    """Return what the card would need for the case."""
    if "eight" in name and not card.has_eight_bits:
        return "numbers of eight bits"
    if "fixed" in name and card.capability[0] == 10:
        return "fixed sums"  # InvariantOps refuses it
    if "dependent" in name and not card.has_dependent_launch:
        return "launches before the last kernel's end"
    return None


def main(group: str, card_name: str) -> None:
    card, driver = getattr(cards, card_name), IdleDriver()
    driver.index, driver.capability = 0, card.capability
    triton.runtime.driver.set_active(driver)
    compiled: dict[int, tuple[str, Any]] = {}  # the kernels of one case, each once

    def compile_instead(self: JITFunction, grid: Any) -> Any:
        def compile_only(*arguments: Any, **options: Any) -> None:
            kernel = self.run(*arguments, grid=grid, warmup=True, **options)
            compiled[id(kernel)] = (self.__name__, kernel)

        return compile_only

    JITFunction.__getitem__ = compile_instead
    with mock.patch.object(card_module, "_WITHOUT_GPU", card):
        for case, call in read_group(group):
            line = {"card": card_name, "case": case}
            if lacking := lacks(case, card):
                print(json.dumps(line | {"lacking": lacking}), flush=True)
                continue
            compiled.clear()
            try:
                call()
            except Exception as error:
                print(json.dumps(line | {"error": f"{type(error).__name__}: {error}"[:1000]}), flush=True)
            for kernel, code in compiled.values():
                print(json.dumps(line | {"kernel": kernel} | describe(code)), flush=True)


def describe(kernel: Any) -> dict[str, Any]:
    ptx, ttgir = kernel.asm["ptx"], kernel.asm["ttgir"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run(TOOLS / "cuobjdump", "-res-usage", file.name)
        code = run(TOOLS / "nvdisasm", file.name)
    # Before its turn a kernel may neither read nor write what other kernels do, and not leave.
    before, wait, _ = code.partition("ACQBULK")
    early = len(re.findall(r"\b(LDG|LDGSTS|STG|ATOMG|ATOM|RED|REDG|EXIT)\b", before)) if wait else None
    return {
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "shared": kernel.metadata.shared,
        # The instructions of products, and how a program's warps share its output: both determine a sum.
        "products": sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma)\.sync\.aligned\.\S+", ptx))),
        "layouts": sorted(set(re.findall(r"#mma\d* = #ttg\.nvidia_mma<(.*)>", ttgir))),
        "joins": ptx.count("atom.global.gpu.acq_rel.add"),
        "is_dependent": bool(kernel.metadata.launch_pdl),
        "turns": (ptx.count("griddepcontrol.wait"), ptx.count("griddepcontrol.launch_dependents"), early),
    }


def run(*command: Any) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Compares one call of every kernel at the shapes of popular models with its torch reference on the same device.

    python -m benchmarks.gpu twin_part '{"device": "cuda", "tiny": false, "dependent": false, "share": [0, 1]}'

The calls are the lines of cases.txt. Cheaper than the tests. Several processes each take a share of the lines, so that
kernels are compiled on many cores. On a CPU the kernels are interpreted.
"""

import traceback
from typing import Any

import torch
from benchmarks.gpu import cases
from benchmarks.gpu.cases import TWINS, Case, Kernels, open_kit
from benchmarks.gpu.figures import report
from tests.support import refusals

ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # norm of the difference / norm, unless a case has its own limit


@torch.inference_mode()
def main(job: dict[str, Any]) -> None:
    kit = open_kit(job)
    kernels = open_kernels(kit.device)
    if kernels is None:
        report("twins", skipped="no triton here")
        return
    index, count = job["share"]
    section = "tiny" if kit.is_tiny else "shapes of popular models"
    for build, *shape in refusals.cases(__file__, section, **vars(cases))[index::count]:
        for case in build(kit, *shape):
            compare(case, kernels, kit.dtype)


def open_kernels(device: torch.device) -> Kernels | None:
    if device.type == "cpu":
        from tests.executor.kernels import conftest  # as it is imported, kernels become interpreted

        if not conftest.HAS_TRITON:
            return None
    from penstock.executor.kernels.cuda import adapter_products, step_inputs
    from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS

    return Kernels(OPS, SAMPLING_OPS, step_inputs, adapter_products.add_lora)


def compare(case: Case, kernels: Kernels, dtype: torch.dtype) -> None:
    """Report the largest difference of a number, and the relative difference of the whole; NaN is always wrong."""
    allowed = ERROR[dtype] if case.error is None else case.error
    try:
        pairs = list(zip(flat(case.call(kernels)), flat(case.call(TWINS)), strict=True))
        if case.is_choice:  # 1 where both chose the same, compared with ones
            pairs = [((got == wanted).double(), torch.ones_like(wanted)) for got, wanted in pairs]
        largest = max(float((got - wanted).abs().max()) for got, wanted in pairs)
        error = max(float((got - wanted).norm() / wanted.norm().clamp(min=1e-30)) for got, wanted in pairs)
    except Exception as error_:  # a kernel that fails must not hide the others
        traceback.print_exc()
        report(case.name, ok=False, problem=f"{type(error_).__name__}: {str(error_)[:300]}")
        return
    report(case.name, ok=error <= allowed, error=error, allowed=allowed, largest=largest)


def flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors.double()]
    return [tensor for part in tensors for tensor in flat(part)]

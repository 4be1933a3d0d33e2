"""Compares one call of every kernel at the shapes of popular models with its torch reference on the same device.

    python -m benchmarks.gpu twin_part '{"device": "cuda", "tiny": false, "dependent": false, "share": [0, 1]}'

Cheaper than the tests. Several processes each take a share of the cases, so that kernels are compiled on many cores. On
a CPU the kernels are interpreted.
"""

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from benchmarks.gpu import cases
from benchmarks.gpu.batches import Rows
from benchmarks.gpu.cases import TWINS, Case, Kernels, Kit, open_kit
from benchmarks.gpu.figures import report

ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # norm of the difference / norm, unless a case has its own limit


@torch.inference_mode()
def main(job: dict[str, Any]) -> None:
    kit = open_kit(job)
    kernels = open_kernels(kit.device)
    if kernels is None:
        report("twins", skipped="no triton here")
        return
    index, count = job["share"]
    for place, make in enumerate(MAKERS):
        if place % count == index:
            for case in make(kit):
                compare(case, kernels, kit.dtype)


def open_kernels(device: torch.device) -> Kernels | None:
    if device.type == "cpu":
        from tests.executor.kernels import conftest  # as it is imported, kernels become interpreted

        if not conftest.HAS_TRITON:
            return None
    from penstock.executor.kernels.cuda import step_inputs
    from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS

    return Kernels(OPS, SAMPLING_OPS, step_inputs)


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


def decodes(kit: Kit) -> Rows:
    contexts = (1, 16, 17, 50) if kit.is_tiny else (1, 15, 16, 17, 129, 1000, 4095, 8192)
    return [(1, context) for context in contexts]


def chunks(kit: Kit) -> Rows:
    return [(5, 5), (3, 40)] if kit.is_tiny else [(2, 700), (200, 200), (512, 4096), (1001, 1001)]


def decode_cases(kit: Kit) -> Iterator[Case]:
    many = [(1, 1024)] * (4 if kit.is_tiny else 256)
    yield from cases.attention(kit, "decode, Qwen3-0.6B", decodes(kit), (16, 8, 128), 40_960)
    yield from cases.attention(kit, "decode, Llama-3.1-8B, 256 rows", many, (32, 8, 128))


def chunk_cases(kit: Kit) -> Iterator[Case]:
    mixed = [*decodes(kit), *chunks(kit)]
    yield from cases.attention(kit, "prompts, Llama-3.1-8B", chunks(kit), (32, 8, 128))
    yield from cases.attention(kit, "mixed, Qwen3-0.6B", mixed, (16, 8, 128), 8192)


def other_head_cases(kit: Kit) -> Iterator[Case]:
    mixed, window = [*decodes(kit), *chunks(kit)], 17 if kit.is_tiny else 1024
    yield from cases.attention(kit, "mixed, SmolLM2", mixed, (9, 3, 64))
    yield from cases.attention(kit, "mixed, Gemma 3, windowed", mixed, (8, 4, 256), 0, window)
    yield from cases.attention(kit, "mixed, OPT-2.7B", mixed, (32, 32, 80))


def latent_cases(kit: Kit) -> Iterator[Case]:
    for heads in (4,) if kit.is_tiny else (16, 128):
        yield from cases.latents(kit, f"latents, {heads} heads", [*decodes(kit), *chunks(kit)[:1]], heads)


def coded_cases(kit: Kit) -> Iterator[Case]:
    yield from cases.coded_cases(kit, (1, 20) if kit.is_tiny else (1, 32, 256, 509, 4096))


def expert_cases(kit: Kit, counts: tuple[int, ...], tiny: tuple[int, ...]) -> Iterator[Case]:
    yield from cases.experts(kit, tiny if kit.is_tiny else counts)


MAKERS: tuple[Callable[[Kit], Iterator[Case]], ...] = (
    *(decode_cases, chunk_cases, other_head_cases, latent_cases, cases.expanded_cases),
    *(partial(cases.rope_cases, num_tokens=1001), partial(cases.row_cases, num_rows=509)),
    *(partial(expert_cases, counts=(1, 32), tiny=(1, 9)), partial(expert_cases, counts=(509, 4096), tiny=(40,))),
    *(coded_cases, cases.block_cases, cases.sampling_cases, cases.input_cases),
)

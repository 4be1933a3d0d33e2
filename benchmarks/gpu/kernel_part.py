"""Kernels against what the device can do: bytes per second beside a read, operations beside a matrix product.

    python -m benchmarks.gpu kernel_part '{"device": "cuda", "tiny": false, "dependent": false}'

The calls are like those of the twins' table, at sizes that fill the device: attention over pages with the stride of
Llama-3.1-8B's cache, contexts cut as its graphs cut them, torch's own attention and products beside them, and the lines of
cases.txt.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu import cases
from benchmarks.gpu.batches import PAGE, Rows, num_blocks
from benchmarks.gpu.cases import TWINS, Case, Kernels, Kit, open_kit
from benchmarks.gpu.figures import Timer, ceilings, report
from tests.support import refusals
from tests.support.twins import changed
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.executor.kernels.select import select_input_ops, select_ops, select_sampling_ops


@torch.inference_mode()
def main(job: dict[str, Any]) -> None:
    kit = open_kit(job)
    timer = Timer(kit.device, 3 if kit.is_tiny else 30)
    read, product = ceilings(timer, kit.device, kit.dtype, kit.is_tiny)
    ops = select_ops(kit.device, kit.dtype, 128)
    if ops.fused_experts is None:
        ops = changed(ops, fused_experts=TWINS.ops.fused_experts)
    sampling = select_sampling_ops(kit.device) or TWINS.sampling
    inputs = select_input_ops(kit.device) or TWINS.inputs
    kernels = Kernels(ops, sampling, inputs, TWINS.add_lora, is_held=False)
    for case in table(kit):
        if case.num_bytes:
            measure(case, kernels, timer, read, product)
        del case  # frees its cache, because the next case may need the memory


def measure(case: Case, kernels: Kernels, timer: Timer, read: float, product: float) -> None:
    try:
        seconds = timer.seconds(functools.partial(case.call, kernels))
    except Exception as error:  # a call that this device or torch refuses must not hide the others
        report(case.name, skipped=f"{type(error).__name__}: {str(error)[:300]}")
        return
    rates = {"gb_per_s": case.num_bytes / seconds / 1e9, "tflop_per_s": case.operations / seconds / 1e12}
    shares = {"gb_per_s": rates["gb_per_s"] * 1e9 / read, "tflop_per_s": rates["tflop_per_s"] * 1e12 / product}
    bound = max(shares, key=lambda unit: shares[unit])  # the nearer of the two ceilings is the one that counts
    report(case.name, "", us=seconds * 1e6, **rates, bound=bound, of_ceiling=shares[bound])


def table(kit: Kit) -> Iterator[Case]:
    yield from attention_cases(kit._replace(layers=2 if kit.is_tiny else 32))
    yield from latent_cases(kit._replace(layers=2 if kit.is_tiny else 27))
    yield from linear_cases(kit)
    for build, *shape in refusals.cases(__file__, "measured, tiny" if kit.is_tiny else "measured", **vars(cases)):
        yield from build(kit, *shape)


def attention_cases(kit: Kit) -> Iterator[Case]:
    """Yield attention of Llama-3.1-8B, on a cache of at most half of the memory."""
    heads = (4, 2, 16) if kit.is_tiny else (32, 8, 128)
    decodes = [
        (rows, 1, context)
        for context in ((48,) if kit.is_tiny else (1024, 8192))
        for rows in (1, 3 if kit.is_tiny else 32)
    ]
    prompts = [(2, 24, 24)] if kit.is_tiny else [(1, 8192, 8192), (4, 2048, 2048), (1, 2048, 32_768)]
    block_bytes = kit.layers * 2 * PAGE * heads[1] * heads[2] * kit.dtype.itemsize
    room = 1 << 24 if kit.is_tiny else torch.cuda.get_device_properties(kit.device).total_memory // 2
    for rows, count, context in [*decodes, *([] if kit.is_tiny else [(256, 1, 1024)]), *prompts]:
        given: Rows = [(count, context)] * rows
        if num_blocks(given) * block_bytes > room:
            continue
        name = f"{'decode' if count == 1 else 'prefill'} {rows} × {count} at {context}"
        for case in cases.attention(kit, name, given, heads, 8192 if count == 1 else 0):
            yield case
            if count == context:
                yield from torch_attention(kit, rows, count, heads, case)
            del case


def torch_attention(kit: Kit, rows: int, count: int, heads: tuple[int, int, int], case: Case) -> Iterator[Case]:
    """Yield whole prompts through torch's attention on contiguous keys and values: cuDNN and FlashAttention 2."""
    num, kv_heads, dim = heads
    q, k, v = (kit.random(rows, part, count, dim) for part in (num, kv_heads, kv_heads))
    on_gpu = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
    for backend in on_gpu if q.is_cuda else (SDPBackend.MATH,):

        def attend(_: Kernels, backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        name = backend.name.removesuffix("_ATTENTION").lower()
        yield case._replace(name=f"torch's prefill by {name}, {rows} × {count}", call=attend)


def latent_cases(kit: Kit) -> Iterator[Case]:
    """Yield attention of DeepSeek-V2-Lite."""
    shapes = [(1, 48), (3, 48)] if kit.is_tiny else [(1, 1024), (32, 1024), (256, 1024), (32, 8192)]
    for rows, context in shapes:
        name, sizes = f"latent decode {rows} at {context}", (4, 16, 64) if kit.is_tiny else (16, 64, 512)
        yield from cases.latents(kit, name, [(1, context)] * rows, sizes, 8192)


def linear_cases(kit: Kit) -> Iterator[Case]:
    """Yield the four products of a Qwen3-8B layer for few rows, computed by the device's library."""
    for depth, width in [(32, 64)] if kit.is_tiny else [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]:
        weight = kit.random(width, depth)
        for rows in (1, 2, 4, 8, 16, 24, 32):
            x = kit.random(rows, depth)
            num_bytes = weight.nbytes + x.nbytes + rows * width * kit.dtype.itemsize

            def multiply(_: Kernels, x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
                return F.linear(x, weight)

            name = f"linear {rows} × {depth} to {width}"
            yield Case(name, multiply, None, num_bytes, 2 * rows * depth * width)

"""Kernels against what the device can do: bytes per second beside a copy, operations beside a matrix product.

    python -m benchmarks.gpu kernel_part '{"device": "cuda", "tiny": false, "dependent": false}'

The bytes are those that have to move, each input read and each output written once; the operations those of the result.
"""

import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from benchmarks.gpu.batches import PAGE, Rows, make_batch, make_cache, num_blocks, pages_of
from benchmarks.gpu.figures import Timer, ceilings, open_device, report, set_launch
from torch.nn.attention import SDPBackend, sdpa_kernel

from penstock.executor.kernels import Ops, select_ops, select_sampling_ops, torch_ops, torch_sampling

Case = tuple[str, Callable[[], object], float, float]  # name, call, bytes, operations


@torch.inference_mode()
def main(job: dict) -> None:
    device, is_tiny = open_device(job), job["tiny"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    set_launch(job)
    timer = Timer(device, 3 if is_tiny else 30)
    copy, product = ceilings(timer, device, dtype, is_tiny)
    report("copy", gb_per_s=copy / 1e9)
    report("matrix product", tflop_per_s=product / 1e12)
    ops = select_ops(device, dtype, 128)
    for make in (attention_cases, latent_cases, linear_cases, row_cases, expert_cases, sampling_cases):
        for name, call, num_bytes, operations in make(ops, device, dtype, is_tiny):
            try:
                seconds = timer.seconds(call)
            except Exception as error:  # one that this device or this torch refuses must not hide the others
                report(name, skipped=f"{type(error).__name__}: {str(error)[:300]}")
                continue
            rates = {"gb_per_s": num_bytes / seconds / 1e9, "tflop_per_s": operations / seconds / 1e12}
            shares = {"gb_per_s": rates["gb_per_s"] * 1e9 / copy, "tflop_per_s": rates["tflop_per_s"] * 1e12 / product}
            bound = max(shares, key=lambda unit: shares[unit])  # the nearer of the two ceilings is the one that counts
            report(name, us=seconds * 1e6, **rates, bound=bound, of_ceiling=shares[bound])


def attention_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    """Llama-3.1-8B's, on a cache that lies as its engine's would and takes half of the memory at most, with contexts cut
    as its graphs cut them. What that cache cannot hold, no engine could."""
    heads, kv_heads, dim, layers, longest = (4, 2, 16, 2, 64) if is_tiny else (32, 8, 128, 32, 8192)
    decodes = [
        (rows, context) for context in ((48,) if is_tiny else (1024, 8192)) for rows in (1, 3 if is_tiny else 32)
    ]
    decodes += [] if is_tiny else [(256, 1024)]
    prompts = [(2, 24, 24)] if is_tiny else [(1, 8192, 8192), (4, 2048, 2048), (1, 2048, 32_768)]
    shapes = [(rows, 1, context) for rows, context in decodes] + prompts
    block_bytes = layers * 2 * PAGE * kv_heads * dim * dtype.itemsize
    room = 1 << 24 if is_tiny else torch.cuda.get_device_properties(device).total_memory // 2
    fitting = [shape for shape in shapes if num_blocks(rows_of(*shape)) * block_bytes <= room]
    kv = make_cache(max(num_blocks(rows_of(*shape)) for shape in fitting), layers, 2, kv_heads * dim, dtype, device)
    for rows, count, context in fitting:
        batch = make_batch(rows_of(rows, count, context), device, longest if count == 1 else 0)
        q = torch.randn(rows * count, heads, dim, dtype=dtype, device=device)
        pairs = rows * (count * context - count * (count - 1) // 2)  # of a query and a position that it sees
        num_bytes = dtype.itemsize * (2 * rows * context * kv_heads * dim + 2 * q.numel())
        call = functools.partial(ops.paged_attention, q, *pages_of(kv, layers // 2), batch, dim**-0.5)
        what = "decode" if count == 1 else "prefill"
        yield f"{what} {rows} × {count} at {context}", call, num_bytes, 4 * pairs * heads * dim
        if count == context:
            yield from peers_of(q.view(rows, count, heads, dim), kv_heads, num_bytes, 4 * pairs * heads * dim)


def rows_of(rows: int, count: int, context: int) -> Rows:
    return [(count, context)] * rows


def peers_of(q: torch.Tensor, kv_heads: int, num_bytes: float, operations: float) -> Iterator[Case]:
    """Whole prompts through torch's attention, keys and values side by side: by cuDNN, and by FlashAttention 2."""
    rows, count, _, dim = q.shape
    k, v = torch.randn(2, rows, kv_heads, count, dim, dtype=q.dtype, device=q.device)
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if q.is_cuda else (SDPBackend.MATH,):

        def attend(backend: SDPBackend = backend) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True, enable_gqa=True)

        name = backend.name.removesuffix("_ATTENTION").lower()
        yield f"torch's prefill by {name}, {rows} × {count}", attend, num_bytes, operations


def latent_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    """DeepSeek-V2-Lite's, likewise."""
    heads, rope, rank, layers, longest = (4, 16, 64, 2, 64) if is_tiny else (16, 64, 512, 27, 8192)
    shapes = [(1, 48), (3, 48)] if is_tiny else [(1, 1024), (32, 1024), (256, 1024), (32, 8192)]
    blocks = max(num_blocks(rows_of(rows, 1, context)) for rows, context in shapes)
    kv = make_cache(blocks, layers, 1, rope + rank, dtype, device)
    for rows, context in shapes:
        batch = make_batch(rows_of(rows, 1, context), device, longest)
        q = torch.randn(rows, heads, rope + rank, dtype=dtype, device=device)
        num_bytes = dtype.itemsize * (rows * context * (rope + rank) + 2 * q.numel())
        call = functools.partial(ops.latent_attention, q, pages_of(kv, layers // 2)[0], batch, 0.1, rope)
        yield f"latent decode {rows} at {context}", call, num_bytes, 4 * rows * context * heads * (rope + rank)


def linear_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    """The four products of a layer of Qwen3-8B for few rows, as the device's library computes them."""
    shapes = [(32, 64)] if is_tiny else [(4096, 6144), (4096, 4096), (4096, 24_576), (12_288, 4096)]
    for depth, width in shapes:
        weight = torch.randn(width, depth, dtype=dtype, device=device)
        for rows in (1, 8, 32):
            x = torch.randn(rows, depth, dtype=dtype, device=device)
            num_bytes = weight.nbytes + x.nbytes + rows * width * dtype.itemsize
            call = functools.partial(F.linear, x, weight)
            yield f"linear {rows} × {depth} to {width}", call, num_bytes, 2 * rows * depth * width


def row_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    rows, width, heads, kv_heads, dim = (8, 64, 4, 2, 16) if is_tiny else (4096, 4096, 32, 8, 128)
    x, residual = torch.randn(2, rows, width, dtype=dtype, device=device)
    weight = torch.ones(width, device=device)
    yield "add and norm", lambda: ops.add_rms_norm(x, residual, weight, 1e-6), 4 * x.nbytes, 0
    gate_up = torch.randn(rows, 2 * width, dtype=dtype, device=device)
    yield "silu and multiply", lambda: ops.silu_mul(gate_up), 3 * x.nbytes, 0
    merged = torch.randn(rows, heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = torch.randn(2, rows, dim // 2, device=device)
    positions = torch.arange(rows, dtype=torch.int32, device=device)
    layers = 2 if is_tiny else 32
    pages = pages_of(make_cache(rows // PAGE + 2, layers, 2, kv_heads * dim, dtype, device), layers // 2)
    kv_slots, norm = positions.long() + PAGE, torch.ones(dim, device=device)
    yield (
        "rotate and store",
        lambda: ops.rope_and_store(q, k, v, cos, sin, positions, *pages, kv_slots, norm, norm, 1e-6),
        2 * merged.nbytes + 2 * cos.nbytes,
        0,
    )


def expert_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    experts, width, inner, top_k = (8, 32, 16, 2) if is_tiny else (128, 2048, 768, 8)
    gate_up = torch.randn(experts, 2 * inner, width, dtype=dtype, device=device) * width**-0.5
    down = torch.randn(experts, width, inner, dtype=dtype, device=device) * inner**-0.5
    fused = ops.fused_experts or torch_ops.fused_experts
    for tokens in (1, 4) if is_tiny else (1, 32, 256, 4096):
        hidden = torch.randn(tokens, width, dtype=dtype, device=device)
        slots = torch.rand(tokens, experts, device=device).topk(top_k).indices
        shares = torch.full((tokens, top_k), 1 / top_k, device=device)
        used = slots.unique().numel()

        def compute(hidden=hidden, slots=slots, shares=shares) -> object:
            return fused(hidden, slots, shares, gate_up, down, 0, "silu")

        num_bytes = used * (gate_up[0].nbytes + down[0].nbytes) + 2 * hidden.nbytes
        yield f"experts, {tokens} tokens", compute, num_bytes, 6 * tokens * top_k * width * inner


def sampling_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    rows, vocab_size = (4, 512) if is_tiny else (256, 151_936)
    choose = (select_sampling_ops(device) or torch_sampling.SAMPLING_OPS).choose
    logits = torch.randn(rows, vocab_size, dtype=dtype, device=device) * 4
    seeds = torch.arange(rows, device=device)
    for name, temperature, top_k, top_p in (("greedy", 0.0, 0, 1.0), ("drawn", 1.0, 0, 1.0), ("top-p", 1.0, 50, 0.9)):
        options = [torch.full((rows,), value, device=device) for value in (temperature, 0.0, top_p)]
        top_ks = torch.full((rows,), top_k, dtype=torch.int32, device=device)

        def call(options=options, top_ks=top_ks) -> object:
            return choose(logits, options[0], options[1], top_ks, options[2], seeds, seeds)

        yield f"sampling, {name}", call, logits.nbytes, 0

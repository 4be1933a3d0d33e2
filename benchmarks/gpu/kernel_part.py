"""Kernels against what the device can do: bytes per second beside a copy, operations beside a matrix product.

    python -m benchmarks.gpu.kernel_part '{"device": "cuda", "tiny": false, "dependent": false}'

The bytes are those that have to move, each input read and each output written once; the operations those of the result.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from benchmarks.gpu.figures import Timer, set_launch, tell

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import Ops, select_ops, select_sampling_ops, torch_ops, torch_sampling

PAGE = 16
Case = tuple[str, Callable[[], object], float, float]  # name, call, bytes, operations


def main(job: dict) -> None:
    device, is_tiny = torch.device(job["device"]), job["tiny"]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    set_launch(job)
    timer = Timer(device, 3 if is_tiny else 30)
    copy, product = ceilings(timer, device, dtype, is_tiny)
    tell("copy", gb_per_s=copy / 1e9)
    tell("matrix product", tflop_per_s=product / 1e12)
    ops = select_ops(device, dtype, 128)
    for make in (attention_cases, linear_cases, row_cases, expert_cases, sampling_cases):
        for name, call, num_bytes, operations in make(ops, device, dtype, is_tiny):
            seconds = timer.seconds(call)
            rates = {"gb_per_s": num_bytes / seconds / 1e9, "tflop_per_s": operations / seconds / 1e12}
            shares = {"gb_per_s": rates["gb_per_s"] * 1e9 / copy, "tflop_per_s": rates["tflop_per_s"] * 1e12 / product}
            bound = max(shares, key=lambda unit: shares[unit])  # the nearer of the two ceilings is the one that counts
            tell(name, us=seconds * 1e6, **rates, bound=bound, of_ceiling=shares[bound])


def ceilings(timer: Timer, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> tuple[float, float]:
    """Bytes per second of a copy, read and written ones; operations per second of a product of square matrices."""
    source = torch.randint(0, 255, (1 << 16 if is_tiny else 2 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.numel() / timer.seconds(lambda: target.copy_(source))
    side = 64 if is_tiny else 8192
    a, b = torch.randn(2, side, side, dtype=dtype, device=device)
    return copy, 2 * side**3 / timer.seconds(lambda: a @ b)


def make_batch(rows: int, count: int, context: int, device: torch.device) -> ForwardBatch:
    """`rows` rows of `count` tokens that end at `context`, each with pages of its own in a random order."""
    blocks = -(-context // PAGE)
    tables = (1 + torch.randperm(rows * blocks, device=device)).int().view(rows, blocks)
    positions = torch.arange(context - count, context, device=device)
    slots = tables[:, positions // PAGE].long() * PAGE + positions % PAGE
    singles = rows if count == 1 else 0
    return ForwardBatch(
        tokens=torch.zeros(rows * count, dtype=torch.int32, device=device),
        positions=positions.int().repeat(rows),
        kv_slots=slots.flatten(),
        query_starts=torch.arange(0, rows * count + 1, count, dtype=torch.int32, device=device),
        context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
        block_tables=tables,
        wanted=None,
        num_single_rows=singles,
        query_lens=() if singles else (count,) * rows,
        query_contexts=() if singles else (context,) * rows,
        max_context_len=context,
        max_single_context=context if singles else 0,
    )


def attention_cases(ops: Ops, device: torch.device, dtype: torch.dtype, is_tiny: bool) -> Iterator[Case]:
    heads, kv_heads, dim = (4, 2, 16) if is_tiny else (16, 8, 128)
    latent = 24 if is_tiny else 576
    contexts = (48,) if is_tiny else (1024, 8192)
    item = dtype.itemsize
    shapes = [(rows, 1, context) for rows in ((1, 3) if is_tiny else (1, 32, 256)) for context in contexts]
    shapes += [(2, 24, 24)] if is_tiny else [(1, 8192, 8192), (4, 2048, 2048), (1, 2048, 32_768)]
    for rows, count, context in shapes:
        batch = make_batch(rows, count, context, device)
        pages = torch.randn(2, int(batch.block_tables.max()) + 1, PAGE, kv_heads * dim, dtype=dtype, device=device)
        q = torch.randn(rows * count, heads, dim, dtype=dtype, device=device)
        pairs = rows * (count * context - count * (count - 1) // 2)  # of a query and a position that it sees
        num_bytes = item * (2 * rows * context * kv_heads * dim + 2 * q.numel())

        def attend(q=q, pages=pages, batch=batch) -> object:
            return ops.paged_attention(q, pages[0], pages[1], batch, dim**-0.5)

        what = "decode" if count == 1 else "prefill"
        yield f"{what} {rows} × {count} at {context}", attend, num_bytes, 4 * pairs * heads * dim
        del pages
        if context != contexts[0] or count > 1:
            continue
        latents = torch.randn(int(batch.block_tables.max()) + 1, PAGE, latent, dtype=dtype, device=device)
        wide = torch.randn(rows, heads, latent, dtype=dtype, device=device)

        def attend_latent(wide=wide, latents=latents, batch=batch) -> object:
            return ops.latent_attention(wide, latents, batch, 0.1, latent // 9)

        num_bytes = item * (rows * context * latent + 2 * wide.numel())
        yield f"latent decode {rows} at {context}", attend_latent, num_bytes, 4 * pairs * heads * latent


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
    pages = torch.zeros(2, rows // PAGE + 2, PAGE, kv_heads * dim, dtype=dtype, device=device)
    norm = torch.ones(dim, device=device)
    yield (
        "rotate and store",
        lambda: ops.rope_and_store(
            q, k, v, cos, sin, positions, pages[0], pages[1], positions.long() + PAGE, norm, norm, 1e-6
        ),
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


if __name__ == "__main__":
    with torch.inference_mode():
        main(json.loads(sys.argv[1]))

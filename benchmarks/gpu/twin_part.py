"""One call of every kernel at the shapes of models people serve, beside its plain-torch twin on the same device.

    python -m benchmarks.gpu twin_part '{"device": "cuda", "tiny": false, "dependent": false, "share": [0, 1]}'

Cheaper than the tests and nearer to the engine: its pages, its contexts, its numbers of tokens. Several processes each
take a share of the cases, so that kernels are compiled on many cores. On a CPU the kernels are interpreted.
"""

import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.batches import PAGE, Rows, make_batch, make_cache, num_blocks, pages_of
from benchmarks.gpu.figures import open_device, report, set_launch

from penstock.executor.kernels import InputOps, Ops, SamplingOps, torch_fp8, torch_inputs, torch_ops, torch_sampling
from penstock.executor.kernels.state import OPTIONS, Places

ERROR = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # norm of the difference / norm, where nothing else is said
Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    name: str
    got: Callable[[], Any]
    wanted: Callable[[], Any]
    error: float | None = None


class Kit(NamedTuple):
    """What cases are made with."""

    ops: Ops
    sampling: SamplingOps
    inputs: InputOps
    device: torch.device
    dtype: torch.dtype
    is_tiny: bool

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def cache(self, rows: Rows, parts: int, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Three layers, of which only the middle one holds numbers: another stride finds NaN."""
        kv = make_cache(num_blocks(rows), 3, parts, width, self.dtype, self.device)
        kv[:, ::2] = torch.nan
        return kv if dtype is None else kv.to(dtype)


@torch.inference_mode()
def main(job: dict) -> None:
    device = open_device(job)
    set_launch(job)
    torch.manual_seed(0)
    kit = open_kit(device, job["tiny"])
    if kit is None:
        report("twins", skipped="no triton here")
        return
    index, count = job["share"]
    for place, make in enumerate(MAKERS):
        if place % count == index:
            for case in make(kit):
                compare(case, kit.dtype)


def open_kit(device: torch.device, is_tiny: bool) -> Kit | None:
    if device.type == "cpu":
        from tests.executor.kernels import conftest  # as it is imported, kernels become interpreted

        if not conftest.HAS_TRITON:
            return None
    from penstock.executor.kernels.cuda.ops import INPUT_OPS, OPS, SAMPLING_OPS

    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Kit(OPS, SAMPLING_OPS, INPUT_OPS, device, dtype, is_tiny)


def compare(case: Case, dtype: torch.dtype) -> None:
    """One figure: the largest difference of a number, and the difference beside the whole; NaN is never right."""
    allowed = ERROR[dtype] if case.error is None else case.error
    try:
        pairs = list(zip(flat(case.got()), flat(case.wanted()), strict=True))
        largest = max(float((got - wanted).abs().max()) for got, wanted in pairs)
        error = max(float((got - wanted).norm() / wanted.norm().clamp(min=1e-30)) for got, wanted in pairs)
    except Exception as error_:  # one kernel that fails must not hide the others
        traceback.print_exc()
        report(case.name, ok=False, problem=f"{type(error_).__name__}: {str(error_)[:300]}")
        return
    report(case.name, ok=error <= allowed, error=error, allowed=allowed, largest=largest)


def flat(made: Any) -> list[torch.Tensor]:
    if isinstance(made, torch.Tensor):
        return [made.double()]
    return [tensor for part in made for tensor in flat(part)]


def decode_cases(kit: Kit) -> Iterator[Case]:
    yield from attention(kit, "decode, Qwen3-0.6B", decodes(kit), (16, 8, 128), 40_960)
    yield from attention(kit, "decode, Llama-3.1-8B, 256 rows", [(1, 1024)] * (4 if kit.is_tiny else 256), (32, 8, 128))


def chunk_cases(kit: Kit) -> Iterator[Case]:
    yield from attention(kit, "prompts, Llama-3.1-8B", chunks(kit), (32, 8, 128))
    yield from attention(kit, "mixed, Qwen3-0.6B", [*decodes(kit), *chunks(kit)], (16, 8, 128), 8192)


def other_head_cases(kit: Kit) -> Iterator[Case]:
    for name, heads, window in (
        ("SmolLM2", (9, 3, 64), None),
        ("Gemma 3, windowed", (8, 4, 256), 17 if kit.is_tiny else 1024),
        ("OPT-2.7B", (32, 32, 80), None),
    ):
        yield from attention(kit, f"mixed, {name}", [*decodes(kit), *chunks(kit)], heads, 0, window)


def decodes(kit: Kit) -> Rows:
    contexts = (1, 16, 17, 50) if kit.is_tiny else (1, 15, 16, 17, 129, 1000, 4095, 8192)
    return [(1, context) for context in contexts]


def chunks(kit: Kit) -> Rows:
    return [(5, 5), (3, 40)] if kit.is_tiny else [(2, 700), (200, 200), (512, 4096), (1001, 1001)]


def attention(
    kit: Kit, name: str, rows: Rows, heads: tuple[int, int, int], longest: int = 0, window: int | None = None
) -> Iterator[Case]:
    """heads: of queries, of keys and values, dimension. The twin computes in float32 from the same numbers."""
    num, kv_heads, dim = (4, 2, 16) if kit.is_tiny else heads
    rows = [(count, min(context, 50)) for count, context in rows] if kit.is_tiny else rows
    batch = make_batch(rows, kit.device, min(longest, 64) if kit.is_tiny else longest)
    kv = kit.cache(rows, 2, kv_heads * dim)
    q = kit.random(sum(count for count, _ in rows), num, dim)
    yield Case(
        name,
        lambda: kit.ops.paged_attention(q, *pages_of(kv, 1), batch, dim**-0.5, window),
        lambda: torch_ops.paged_attention(q.float(), *pages_of(kv.float(), 1), batch, dim**-0.5, window),
    )


def latent_cases(kit: Kit) -> Iterator[Case]:
    rope, rank = (16, 64) if kit.is_tiny else (64, 512)
    rows = [*decodes(kit), *chunks(kit)[:1]]
    batch = make_batch(rows, kit.device)
    kv = kit.cache(rows, 1, rope + rank)
    for heads in (4,) if kit.is_tiny else (16, 128):
        q = kit.random(sum(count for count, _ in rows), heads, rope + rank)
        yield Case(
            f"latents, {heads} heads",
            lambda q=q: kit.ops.latent_attention(q, pages_of(kv, 1)[0], batch, 0.1, rope),
            lambda q=q: torch_ops.latent_attention(q.float(), pages_of(kv.float(), 1)[0], batch, 0.1, rope),
        )


def expanded_cases(kit: Kit) -> Iterator[Case]:
    assert kit.ops.expanded_attention is not None
    heads, rope, nope, value, rank = (3, 16, 32, 16, 64) if kit.is_tiny else (16, 64, 128, 128, 512)
    rows = [(1, 20), (2, 9), *((40, 40), (41, 60))] if kit.is_tiny else [(1, 300), (2, 9), (512, 4096), (1001, 1001)]
    batch, first = make_batch(rows, kit.device), 2
    kv = kit.cache(rows, 1, rope + rank)
    q = kit.random(sum(count for count, _ in rows[first:]), heads, rope + nope)
    expand = kit.random(heads, nope + value, rank, scale=rank**-0.5)
    calls = [
        lambda ops=ops, wide=wide: ops.expanded_attention(
            q.to(wide), pages_of(kv.to(wide), 1)[0], expand.to(wide), batch, first, 0.1, rope
        )
        for ops, wide in ((kit.ops, kit.dtype), (torch_ops.OPS, torch.float32))
    ]
    yield Case("expanded latents", *calls)


def rope_cases(kit: Kit) -> Iterator[Case]:
    tokens, heads, kv_heads, dim = (7, 4, 2, 16) if kit.is_tiny else (1001, 32, 8, 128)
    rows = [(tokens, tokens)]
    batch = make_batch(rows, kit.device)
    angles = torch.randn(tokens, dim // 2, device=kit.device)
    merged = kit.random(tokens, heads + 2 * kv_heads, dim)
    norms = [1 + 0.1 * torch.randn(dim, device=kit.device) for _ in range(2)]
    for name, weights, page_dtype, error in (
        ("rotate and store", (None, None, 0.0), None, None),
        ("rotate and store, normed", (*norms, 1e-6), None, None),
        ("rotate and store, eight-bit pages", (*norms, 1e-6), torch.float8_e4m3fn, 5e-2),
    ):
        # Cells that are not written are the same on both sides.
        kv = torch.zeros_like(make_cache(num_blocks(rows), 3, 2, kv_heads * dim, page_dtype or kit.dtype, kit.device))

        def call(ops: Ops, kv: torch.Tensor = kv, weights: Any = weights) -> Tensors:
            mine = kv.clone()
            q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
            tables = angles.cos(), angles.sin(), batch.positions
            return ops.rope_and_store(q, k, v, *tables, *pages_of(mine, 1), batch.kv_slots, *weights), mine.float()

        yield Case(name, lambda call=call: call(kit.ops), lambda call=call: call(torch_ops.OPS), error)


def row_cases(kit: Kit) -> Iterator[Case]:
    rows, width = (3, 64) if kit.is_tiny else (509, 4096)
    x, residual, gate_up = kit.random(rows, width), kit.random(rows, width), kit.random(rows, 2 * width)
    weight = 1 + 0.1 * torch.randn(width, device=kit.device)
    for name, call in (
        ("norm", lambda ops: ops.rms_norm(x, weight, 1e-6)),
        ("add and norm", lambda ops: ops.add_rms_norm(x, residual, weight, 1e-6)),
        ("silu and multiply", lambda ops: ops.silu_mul(gate_up)),
        ("gelu and multiply", lambda ops: ops.gelu_tanh_mul(gate_up)),
    ):
        yield Case(name, lambda call=call: call(kit.ops), lambda call=call: call(torch_ops.OPS))


def few_expert_cases(kit: Kit) -> Iterator[Case]:
    yield from experts(kit, (1, 9) if kit.is_tiny else (1, 32))


def many_expert_cases(kit: Kit) -> Iterator[Case]:
    yield from experts(kit, (40,) if kit.is_tiny else (509, 4096))


def experts(kit: Kit, counts: tuple[int, ...]) -> Iterator[Case]:
    """As Qwen3-30B-A3B's, in the model's dtype and in eight bits; a favourite makes some tiles full and some empty."""
    assert kit.ops.blocks is not None
    num, width, inner, top_k = (5, 128, 128, 2) if kit.is_tiny else (128, 2048, 768, 8)
    gate_up, down = (
        kit.random(num, 2 * inner, width, scale=width**-0.5),
        kit.random(num, width, inner, scale=inner**-0.5),
    )
    eight = [tensor for weight in (gate_up, down) for tensor in in_blocks(weight)]
    for tokens in counts:
        hidden, wishes = kit.random(tokens, width), torch.rand(tokens, num, device=kit.device)
        wishes[:, 0] += 0.5
        slots = wishes.topk(top_k).indices
        shares = torch.rand(tokens, top_k, device=kit.device)
        for name, ours, twin, weights in (
            ("experts", kit.ops.fused_experts, torch_ops.fused_experts, [gate_up, down]),
            ("eight-bit experts", kit.ops.blocks.fused_experts, torch_fp8.fused_block_experts, eight),
        ):
            assert ours is not None
            given = hidden, slots, shares, *weights, 0, "silu"
            yield Case(f"{name}, {tokens} tokens", lambda f=ours, g=given: f(*g), lambda f=twin, g=given: f(*g), 2e-2)


def block_cases(kit: Kit) -> Iterator[Case]:
    """Eight bits. 509 and 1001 rows are no multiple of anything; above 256 the product is cuBLAS's."""
    assert kit.ops.blocks is not None
    width, depth = (256, 384) if kit.is_tiny else (6144, 4096)
    ours, twins = kit.ops.blocks, torch_fp8.OPS
    weight, scales = in_blocks(kit.random(width, depth, scale=depth**-0.5))
    norm = 1 + 0.1 * torch.randn(depth, device=kit.device)
    for rows in (1, 20) if kit.is_tiny else (1, 64, 256, 509, 1001):
        x, residual, gate_up = kit.random(rows, depth), kit.random(rows, depth), kit.random(rows, 2 * depth)

        def calls(ops: Any, x: Any = x, residual: Any = residual, gate_up: Any = gate_up) -> list[Any]:
            made, total = ops.add_rms_norm_quantize(x, residual, norm, 1e-6)
            quantized = ops.quantize(x), ops.silu_mul_quantize(gate_up), made
            return [total, *(values.float() * widen(scales) for values, scales in quantized)]

        def multiply(ops: Any, x: Any = x) -> torch.Tensor:
            return ops.block_linear(torch_fp8.quantize(x), weight, scales, kit.dtype)

        yield Case(f"quantize {rows} rows", lambda c=calls: c(ours), lambda c=calls: c(twins), 2e-2)
        yield Case(f"eight-bit product of {rows} rows", lambda m=multiply: m(ours), lambda m=multiply: m(twins))


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[…, N, K], multiples of 128 -> eight bits, and the scales as the kernels take them."""
    blocks = weight.float().unflatten(-2, (-1, 128)).unflatten(-1, (-1, 128))  # […, N / 128, 128, K / 128, 128]
    scales = blocks.abs().amax((-3, -1)) / torch_fp8.FP8_MAX
    values = (blocks / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(weight.shape), torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def widen(scales: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(torch_fp8.BLOCK, 1)


def sampling_cases(kit: Kit) -> Iterator[Case]:
    """Drawn tokens are numbers that must be the same; of 256 rows two may fall otherwise, by near ties."""
    rows, vocab_size = (4, 5000) if kit.is_tiny else (256, 151_936)
    logits, device = kit.random(rows, vocab_size, scale=4.0), kit.device
    seeds = torch.arange(rows, device=device) * -(2**40) + 12345
    for name, temperature, min_p, top_k, top_p in (
        ("greedy", 0.0, 0.0, 0, 1.0),
        ("drawn", 1.0, 0.0, 0, 1.0),
        ("top-k and top-p", 0.8, 0.0, 50, 0.9),
        ("min-p", 1.0, 0.05, 0, 1.0),
    ):
        floats = [torch.full((rows,), value, device=device) for value in (temperature, min_p, top_p)]
        top_ks = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        given = logits, *floats[:2], top_ks, floats[2], seeds, seeds.abs() % 1000

        def pick(ops: SamplingOps, given: Any = given) -> torch.Tensor:
            """The share of rows, as ones and zeros beside the twin's tokens, that chose as the twin did."""
            return (ops.choose(*given)[0] == torch_sampling.choose(*given)[0]).float()

        yield Case(
            f"choose, {name}", lambda p=pick: p(kit.sampling), lambda p=pick: p(torch_sampling.SAMPLING_OPS), 0.1
        )
    numbers = torch.randperm(rows, device=device)[: rows // 2]
    counts = torch.randint(0, 3, (rows, vocab_size), dtype=torch.int32, device=device)
    coefficients = 1 + torch.rand(len(numbers), 3, device=device)
    masks = torch.randint(-(2**31), 2**31, (len(numbers), -(-vocab_size // 32)), device=device).int()

    def edit(ops: SamplingOps) -> Tensors:
        penalized, masked = logits.clone(), logits.clone()
        ops.penalize(penalized, numbers, numbers, counts, 1 << 30, coefficients)
        ops.mask(masked, numbers, masks)
        return penalized, masked.isinf()

    yield Case("penalize and mask", lambda: edit(kit.sampling), lambda: edit(torch_sampling.SAMPLING_OPS))


def input_cases(kit: Kit) -> Iterator[Case]:
    slots, length = 8, 700 if kit.is_tiny else 8192
    blocks = -(-length // PAGE)
    places = Places(length + 1, (slots + 1) * (length + 1), blocks, 0, slots * (length + 1), PAGE)
    places = places._replace(options_at=places.blocks_at + slots * blocks)
    state = torch.randint(0, 2**20, (places.options_at + slots * OPTIONS,), dtype=torch.int32, device=kit.device)
    counts, first = [1, 1, 3, 400, 1], [17, 600, 100, 200, 0]  # the last one only pads
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    numbers = [4, 0, 0, 0, *starts, 3, 0, 4, 1, 0, *first, 0, 601, 102, 390, 0]
    packed = torch.tensor(numbers, dtype=torch.int32, device=kit.device)
    runs = torch.tensor([10, 6, 300, 650, 306, 7, *range(307)], dtype=torch.int32, device=kit.device)

    def prepare(ops: InputOps) -> list[torch.Tensor]:
        mine = state.clone()
        ops.apply_runs(runs, mine, 0, 2, 300)
        return [mine, *ops.prepare(packed, mine, places, len(counts), sum(counts), max(counts), blocks)]

    yield Case("a step's inputs", lambda: prepare(kit.inputs), lambda: prepare(torch_inputs.INPUT_OPS), 0.0)


MAKERS = (
    *(decode_cases, chunk_cases, other_head_cases, latent_cases, expanded_cases, rope_cases, row_cases),
    *(few_expert_cases, many_expert_cases, block_cases, sampling_cases, input_cases),
)

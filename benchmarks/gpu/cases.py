"""Calls of every kernel at the shapes of popular models, for the rung that compares them with their reference
implementations and the rung that measures them. Their pages, contexts and numbers of tokens are closer to the engine's
than those of the tests."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from benchmarks.gpu.batches import PAGE, Rows, make_batch, make_cache, num_blocks, pages_of
from benchmarks.gpu.figures import open_device, set_launch
from tests.support.twins import changed, eight_bits, sampling, torch_inputs, torch_ops
from tests.support.twins.experts import fused_experts

from penstock.executor.kernels import (
    NO_NORMS,
    Activation,
    Fp8Rows,
    HeadNorms,
    InputOps,
    KeyStore,
    Ops,
    Rotation,
    SamplingOps,
    ScoreExtras,
)
from penstock.executor.kernels.eight_bits import FP8_MAX
from penstock.executor.kernels.gpu_formats import MXFP4, Packed
from penstock.executor.kernels.state import OPTIONS, StateLayout
from penstock.executor.kernels.stored_formats import BLOCK, BLOCKS
from penstock.executor.kernels.weight import Weight, plain_weight

Tensors = tuple[torch.Tensor, ...]
Heads = tuple[int, int, int]  # query heads, key-value heads, dimension


class Kernels(NamedTuple):
    """A set of kernels, or their reference implementations."""

    ops: Ops
    sampling: SamplingOps
    inputs: InputOps
    attends_in: torch.dtype | None = None  # dtype of attention's inputs; None: unchanged
    is_held: bool = True  # compared with the reference: each writes to its own pages

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.attends_in is None else x.to(self.attends_in)


# Attention's reference computes in float32 from the same numbers.
TWINS = Kernels(
    changed(torch_ops, fused_experts=fused_experts, blocks=eight_bits),
    sampling,
    torch_inputs,
    torch.float32,
)


class Case(NamedTuple):
    name: str
    call: Callable[[Kernels], Any]
    error: float | None = None  # allowed difference from the reference; None: by dtype
    num_bytes: float = 0  # bytes that have to move: each input read once, each output written once
    operations: float = 0  # operations for the result
    is_choice: bool = False  # results are tokens, which are equal or not


class Kit(NamedTuple):
    """The materials of cases: device, dtype, kernels and cache size."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool
    layers: int = 3  # of a cache; only the middle one holds numbers, so a wrong stride reads NaN

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, device=self.device) * scale).to(self.dtype)

    def cache(self, rows: Rows, parts: int, width: int) -> torch.Tensor:
        kv = make_cache(num_blocks(rows), self.layers, parts, width, self.dtype, self.device)
        kv[:, : self.middle] = kv[:, self.middle + 1 :] = torch.nan
        return kv

    @property
    def middle(self) -> int:
        return self.layers // 2


def open_kit(job: dict[str, Any]) -> Kit:
    """Return the kit for a part's job: its device, and how kernels are launched there."""
    device = open_device(job)
    set_launch(job)
    torch.manual_seed(0)
    return Kit(device, torch.float32 if device.type == "cpu" else torch.bfloat16, job["tiny"])


def work(rows: Rows, q: torch.Tensor, width: int) -> tuple[float, float]:
    """Return attention's work: the bytes of contexts of that width, queries and results, and the operations of all
    visible (query, position) pairs."""
    seen = sum(count * context - count * (count - 1) // 2 for count, context in rows)
    num_bytes = q.itemsize * (sum(context for _, context in rows) * width + 2 * q.numel())
    return num_bytes, 4 * seen * q[0].numel()


def attention(
    kit: Kit, name: str, rows: Rows, heads: Heads, longest: int = 0, window: int | None = None
) -> Iterator[Case]:
    num, kv_heads, dim = (4, 2, 16) if kit.is_tiny else heads
    rows = [(count, min(context, 50)) for count, context in rows] if kit.is_tiny else rows
    batch = make_batch(rows, kit.device, min(longest, 64) if kit.is_tiny else longest)
    kv = kit.cache(rows, 2, kv_heads * dim)
    q = kit.random(sum(count for count, _ in rows), num, dim)

    def attend(kernels: Kernels) -> torch.Tensor:
        k, v = (kernels.wide(pages) for pages in pages_of(kv, kit.middle))
        return kernels.ops.paged_attention(kernels.wide(q), (k, v), batch, dim**-0.5, ScoreExtras(window=window))

    yield Case(name, attend, None, *work(rows, q, 2 * kv_heads * dim))


def latents(kit: Kit, name: str, rows: Rows, num_heads: int, longest: int = 0) -> Iterator[Case]:
    heads, rope, rank = (4, 16, 64) if kit.is_tiny else (num_heads, 64, 512)
    batch = make_batch(rows, kit.device, longest)
    kv = kit.cache(rows, 1, rope + rank)
    q = kit.random(sum(count for count, _ in rows), heads, rope + rank)

    def attend(kernels: Kernels) -> torch.Tensor:
        pages = kernels.wide(pages_of(kv, kit.middle)[0])
        return kernels.ops.latent_attention(kernels.wide(q), pages, batch, 0.1, rope)

    yield Case(name, attend, None, *work(rows, q, rope + rank))


def expanded_cases(kit: Kit) -> Iterator[Case]:
    heads, rope, nope, value, rank = (3, 16, 32, 16, 64) if kit.is_tiny else (16, 64, 128, 128, 512)
    rows = [(1, 20), (2, 9), *((40, 40), (41, 60))] if kit.is_tiny else [(1, 300), (2, 9), (512, 4096), (1001, 1001)]
    batch, first = make_batch(rows, kit.device), 2
    kv = kit.cache(rows, 1, rope + rank)
    q = kit.random(sum(count for count, _ in rows[first:]), heads, rope + nope)
    expand = kit.random(heads, nope + value, rank, scale=rank**-0.5)

    def attend(kernels: Kernels) -> torch.Tensor:
        assert kernels.ops.expanded_attention is not None
        arguments = kernels.wide(q), kernels.wide(pages_of(kv, kit.middle)[0]), kernels.wide(expand)
        return kernels.ops.expanded_attention(*arguments, batch, first, 0.1, rope)

    yield Case("expanded latents", attend)


def rope_cases(kit: Kit, num_tokens: int) -> Iterator[Case]:
    tokens, heads, kv_heads, dim = (7, 4, 2, 16) if kit.is_tiny else (num_tokens, 32, 8, 128)
    rows = [(tokens, tokens)]
    batch = make_batch(rows, kit.device)
    angles = torch.randn(tokens, dim // 2, device=kit.device)
    rotation = Rotation(angles.cos(), angles.sin(), batch.positions)
    merged = kit.random(tokens, heads + 2 * kv_heads, dim)
    weights = [1 + 0.1 * torch.randn(dim, device=kit.device) for _ in range(2)]
    head_norms: HeadNorms = weights[0], weights[1], 1e-6
    for name, norms, page_dtype, error in (
        ("rotate and store", NO_NORMS, None, None),
        ("rotate and store, normed", head_norms, None, None),
        ("rotate and store, eight-bit pages", head_norms, torch.float8_e4m3fn, 5e-2),
    ):
        # Cells that are not written are the same on both sides.
        dtype = page_dtype or kit.dtype
        kv = torch.zeros_like(make_cache(num_blocks(rows), kit.layers, 2, kv_heads * dim, dtype, kit.device))

        def call(kernels: Kernels, kv: torch.Tensor = kv, norms: HeadNorms = norms) -> Tensors:
            q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
            mine = kv.clone() if kernels.is_held else kv
            pages = pages_of(mine, kit.middle)
            return kernels.ops.rope_and_store(q, k, v, KeyStore(rotation, pages, batch.kv_cells, norms)), mine

        yield Case(name, call, error, 2 * merged.nbytes + 2 * angles.nbytes)


def row_cases(kit: Kit, num_rows: int) -> Iterator[Case]:
    rows, width = (3, 64) if kit.is_tiny else (num_rows, 4096)
    x, residual, gate_up = kit.random(rows, width), kit.random(rows, width), kit.random(rows, 2 * width)
    weight = 1 + 0.1 * torch.randn(width, device=kit.device)
    yield Case("norm", lambda kernels: kernels.ops.rms_norm(x, weight, 1e-6), None, 2 * x.nbytes)
    yield Case("add and norm", lambda kernels: kernels.ops.add_rms_norm(x, residual, weight, 1e-6), None, 4 * x.nbytes)
    yield Case("silu and multiply", lambda kernels: kernels.ops.gate(gate_up, "silu"), None, 3 * x.nbytes)
    yield Case("gelu and multiply", lambda kernels: kernels.ops.gate(gate_up, "gelu_tanh"), None, 3 * x.nbytes)


def experts(kit: Kit, counts: tuple[int, ...]) -> Iterator[Case]:
    """Yield the experts of Qwen3-30B-A3B in the model's dtype and in FP8; a hot expert fills some tiles."""
    num, width, inner, top_k = (5, 128, 128, 2) if kit.is_tiny else (128, 2048, 768, 8)
    gate_up = kit.random(num, 2 * inner, width, scale=width**-0.5)
    down = kit.random(num, width, inner, scale=inner**-0.5)
    sixteen = plain_weight(gate_up), plain_weight(down)
    eight = Weight(BLOCKS, *in_blocks(gate_up)), Weight(BLOCKS, *in_blocks(down))
    activation: Activation = "silu"

    for tokens in counts:
        hidden, wishes = kit.random(tokens, width), torch.rand(tokens, num, device=kit.device)
        wishes[:, 0] += 0.5
        slots = wishes.topk(top_k).indices
        shares = torch.rand(tokens, top_k, device=kit.device)
        for name, weights in (("experts", sixteen), ("eight-bit experts", eight)):
            arguments = hidden, slots, shares, *weights, 0, activation

            def multiply(kernels: Kernels, arguments: Any = arguments) -> torch.Tensor:
                assert kernels.ops.fused_experts is not None
                return kernels.ops.fused_experts(*arguments)

            read = [tensor for weight in weights for tensor in weight.tensors()]
            num_bytes = slots.unique().numel() * sum(tensor[0].nbytes for tensor in read) + 2 * hidden.nbytes
            yield Case(f"{name}, {tokens} tokens", multiply, 2e-2, num_bytes, 6 * tokens * top_k * width * inner)


def coded_cases(kit: Kit, counts: tuple[int, ...]) -> Iterator[Case]:
    """Yield the MXFP4 experts of gpt-oss-20b, and a layer of Qwen3-8B in four bits."""
    num, width, rows, depth, top_k = (4, 96, 256, 384, 2) if kit.is_tiny else (32, 2880, 6144, 4096, 4)
    codes = partial(torch.randint, 256, dtype=torch.uint8, device=kit.device)
    stacks = [
        Weight(MXFP4, codes((num, height, width // 2)), codes((num, height, width // 32)) // 64 + 117)
        for height in (2 * width, width)
    ]
    scales = torch.rand(depth // 128, rows, dtype=torch.float16, device=kit.device) / 100
    layer = Weight(Packed(4, 64), codes((rows, depth // 2)), scales)
    expert_bytes, layer_bytes = (sum(part.nbytes for part in weight.tensors()) for weight in (stacks[0], layer))
    for tokens in counts:
        slots = torch.rand(tokens, num, device=kit.device).topk(top_k).indices
        shares, x = torch.rand(tokens, top_k, device=kit.device) / 64, kit.random(tokens, depth)

        def multiply_experts(kernels: Kernels, slots: Any = slots, shares: Any = shares, x: Any = x) -> torch.Tensor:
            assert kernels.ops.fused_experts is not None
            return kernels.ops.fused_experts(x[:, :width].contiguous(), slots, shares, *stacks, 0, "clamped_swish")

        def multiply(kernels: Kernels, x: Any = x) -> torch.Tensor:
            return kernels.ops.linear(x, layer)

        num_bytes = 1.5 * expert_bytes * slots.unique().numel() / num + 2 * tokens * width * kit.dtype.itemsize
        operations = 6 * tokens * top_k * width * width
        yield Case(f"MXFP4 experts, {tokens} tokens", multiply_experts, 2e-2, num_bytes, operations)
        num_bytes = layer_bytes + tokens * (rows + depth) * kit.dtype.itemsize
        yield Case(f"four-bit product of {tokens} rows", multiply, 2e-2, num_bytes, 2 * tokens * rows * depth)


def block_cases(kit: Kit) -> Iterator[Case]:
    """Yield FP8 cases. 509 and 1001 rows are no multiple of anything; above 256 cuBLAS computes the product."""
    width, depth = (256, 384) if kit.is_tiny else (6144, 4096)
    weight, scales = in_blocks(kit.random(width, depth, scale=depth**-0.5))
    norm = 1 + 0.1 * torch.randn(depth, device=kit.device)
    for rows in (1, 20) if kit.is_tiny else (1, 64, 256, 509, 1001):
        x, residual, gate_up = kit.random(rows, depth), kit.random(rows, depth), kit.random(rows, 2 * depth)

        def quantize(
            kernels: Kernels, x: Any = x, residual: Any = residual, gate_up: Any = gate_up
        ) -> list[torch.Tensor]:
            ops = kernels.ops.blocks
            assert ops is not None
            made, total = ops.add_rms_norm_quantize(x, residual, norm, 1e-6)
            quantized = ops.quantize(x), ops.silu_mul_quantize(gate_up), made
            return [total, *map(eight_bits.widen_rows, quantized)]

        def multiply(kernels: Kernels, x: Any = x) -> torch.Tensor:
            return kernels.ops.linear(Fp8Rows(eight_bits.quantize(x), kit.dtype), Weight(BLOCKS, weight, scales))

        yield Case(f"quantize {rows} rows", quantize, 2e-2)
        yield Case(f"eight-bit product of {rows} rows", multiply)


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize […, N, K], multiples of 128, to FP8; return the values and scales in the kernels' layout."""
    blocks = weight.float().unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))  # […, N / 128, 128, K / 128, 128]
    scales = blocks.abs().amax((-3, -1)) / FP8_MAX
    values = (blocks / scales[..., :, None, :, None]).to(torch.float8_e4m3fn)
    return values.reshape(weight.shape), torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 4))


def sampling_cases(kit: Kit) -> Iterator[Case]:
    """Yield sampling cases. Two of 256 rows may draw another token than the reference, because of near ties."""
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
        arguments = logits, *floats[:2], top_ks, floats[2], seeds, seeds.abs() % 1000

        def choose(kernels: Kernels, arguments: Any = arguments) -> torch.Tensor:
            return kernels.sampling.choose(*arguments)[0]

        yield Case(f"choose, {name}", choose, 0.1, logits.nbytes, is_choice=True)
    numbers = torch.randperm(rows, device=device)[: rows // 2]
    counts = torch.randint(0, 3, (rows, vocab_size), dtype=torch.int32, device=device)
    coefficients = 1 + torch.rand(len(numbers), 3, device=device)
    masks = torch.randint(-(2**31), 2**31, (len(numbers), -(-vocab_size // 32)), device=device).int()

    def edit(kernels: Kernels) -> Tensors:
        penalized, masked = logits.clone(), logits.clone()
        kernels.sampling.penalize(penalized, numbers, numbers, counts, coefficients)
        kernels.sampling.mask(masked, numbers, masks)
        return penalized, masked.isinf()

    yield Case("penalize and mask", edit)


def input_cases(kit: Kit) -> Iterator[Case]:
    slots, length = 8, 700 if kit.is_tiny else 8192
    blocks = -(-length // PAGE)
    offsets = StateLayout(length + 1, (slots + 1) * (length + 1), blocks, 0, slots * (length + 1), PAGE)
    offsets = offsets._replace(options_at=offsets.blocks_at + slots * blocks)
    state = torch.randint(0, 2**20, (offsets.options_at + slots * OPTIONS,), dtype=torch.int32, device=kit.device)
    counts, first = [1, 1, 3, 400, 1], [17, 600, 100, 200, 0]  # the last row is padding
    starts = torch.tensor([0, *counts]).cumsum(0).tolist()
    numbers = [4, 0, 0, 0, *starts, 3, 0, 4, 1, 0, *first, 0, 601, 102, 390, 0]
    packed = torch.tensor(numbers, dtype=torch.int32, device=kit.device)
    runs = torch.tensor([10, 6, 300, 650, 306, 7, *range(307)], dtype=torch.int32, device=kit.device)

    def prepare(kernels: Kernels) -> list[torch.Tensor]:
        mine = state.clone()
        kernels.inputs.apply_runs(runs, mine, 0, 2, 300)
        return [mine, *kernels.inputs.prepare(packed, mine, offsets, len(counts), sum(counts), max(counts), blocks)]

    yield Case("a step's inputs", prepare, 0.0)

"""Calls of the launchers with the shapes of models people serve, by group; `aot.py` compiles what they launch.

`quick` is compiled for an H200 with every run of the suite, and `few` for the other cards; `all` with `-m slow` for all of
them. A case's name says what is special about it: "eight-bit", "dependent", "float32", "prompts", "a batch".
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_NORMS, KeyStore, LatentStore, Narrow, Rotation, ScoreExtras
from penstock.executor.kernels.card import Card
from penstock.executor.kernels.cuda import adapter_products, fp8, step_inputs
from penstock.executor.kernels.cuda import dependent as launch
from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS, InvariantOps
from penstock.executor.kernels.state import StateLayout
from penstock.executor.kernels.weight import BLOCKS, MXFP4, Packed, Weight, numbers
from penstock.executor.moe_spec import MoeSpec
from tests.support.recurrent import Layer, States, batch_of

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PAGE = 16
INVARIANT = InvariantOps(has_eight_bits=True)
LAYERS = 4


def batch(singles: int, prompts: int, context: int = 4096) -> ForwardBatch:
    rows = singles + prompts
    return ForwardBatch(
        tokens=torch.zeros(rows, dtype=torch.int32),
        positions=torch.zeros(rows, dtype=torch.int32),
        kv_slots=torch.zeros(rows, dtype=torch.int64),
        query_starts=torch.zeros(rows + 1, dtype=torch.int32),
        context_lens=torch.zeros(rows, dtype=torch.int32),
        block_tables=torch.zeros(rows, context // PAGE, dtype=torch.int32),
        wanted=None,
        num_single_rows=singles,
        query_lens=(64,) * prompts,
        query_contexts=(context,) * prompts,
        max_single_context=context if singles else 0,
    )


def pages(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    kv = torch.zeros(2, LAYERS, 2, PAGE, width).to(dtype)
    return kv[:, 1, 0], kv[:, 1, 1]


def attention(
    singles: int,
    prompts: int,
    dim: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = BF16,
    page_dtype: torch.dtype | None = None,
    window: int | None = None,
    has_sinks: bool = False,
    cap: float | None = None,
) -> Callable[[], None]:
    def call() -> None:
        q = torch.zeros(singles + 64 * prompts, heads, dim, dtype=dtype)
        cache = pages(kv_heads * dim, page_dtype or dtype)
        extras = ScoreExtras(cap, torch.zeros(heads) if has_sinks else None, window)
        OPS.paged_attention(q, cache, batch(singles, prompts), dim**-0.5, extras)

    return call


def fixed(call: Callable[[], None]) -> Callable[[], None]:
    """The same with what `batch_invariant` computes with."""

    def changed() -> None:
        with mock.patch(f"{__name__}.OPS", INVARIANT):
            call()

    return changed


def linear(tokens: int, make: Callable[[], Weight], dtype: torch.dtype = BF16) -> Callable[[], None]:
    def call() -> None:
        weight = make()
        OPS.linear(torch.zeros(tokens, weight.shape[1], dtype=dtype), weight)

    return call


def fixed_linear(tokens: int, width: int, depth: int, dtype: torch.dtype = BF16) -> Callable[[], None]:
    return fixed(linear(tokens, lambda: numbers(torch.empty(width, depth, dtype=dtype)), dtype))


def latent(
    singles: int, prompts: int, heads: int, dtype: torch.dtype = BF16, page_dtype: torch.dtype | None = None
) -> Callable[[], None]:
    def call() -> None:
        q = torch.zeros(singles + 64 * prompts, heads, 64 + 512, dtype=dtype)
        OPS.latent_attention(q, pages(64 + 512, page_dtype or dtype)[0], batch(singles, prompts), 0.1, 64)

    return call


def expanded(
    prompts: int, heads: int, dtype: torch.dtype = BF16, page_dtype: torch.dtype | None = None
) -> Callable[[], None]:
    def call() -> None:
        given, latents = batch(4, prompts), pages(64 + 512, page_dtype or dtype)[0]
        q, expand = torch.zeros(64 * prompts, heads, 64 + 128, dtype=dtype), torch.zeros(heads, 256, 512, dtype=dtype)
        OPS.expanded_attention(q, latents, expand, given, 4, 0.1, 64)

    return call


def latent_rope(heads: int, is_whole: bool, page_dtype: torch.dtype = BF16) -> Callable[[], None]:
    def call() -> None:
        q, down = torch.zeros(8, heads * 192 + 576, dtype=BF16).split((heads * 192, 576), dim=1)
        goal = torch.zeros(8, heads, 64 + (128 if is_whole else 512), dtype=BF16)
        tables, index, latents = torch.zeros(64, 32), torch.zeros(8).long(), pages(576, page_dtype)[0]
        rotation = Rotation(tables, tables, index.int())
        store = LatentStore((torch.zeros(512), 1e-6), rotation, latents, index)
        OPS.latent_rope_and_store(goal, q.unflatten(1, (heads, 192)), down, store, 0, is_whole)

    return call


def gated(tokens: int, width: int, inner: int, dtype: torch.dtype = BF16) -> Callable[[], None]:
    def call() -> None:
        x, weight = torch.zeros(tokens, width, dtype=dtype), torch.empty(2 * inner, width, dtype=dtype)
        OPS.gated_linear(x, weight, "silu")

    return call


def adapters(
    tokens: int, depth: int, widths: list[int], rank: int = 16, dtype: torch.dtype = BF16
) -> Callable[[], None]:
    def call() -> None:
        x, y = torch.zeros(tokens, depth, dtype=dtype), torch.zeros(tokens, sum(widths), dtype=dtype)
        down, up = torch.zeros(2, len(widths), rank, depth, dtype=dtype), torch.zeros(2, sum(widths), rank, dtype=dtype)
        adapter_products.add_lora(x, y, torch.zeros(4, 3, dtype=torch.int32), down, up, widths)

    return call


def rope(dim: int, heads: int, kv_heads: int, normed: bool, page_dtype: torch.dtype = BF16) -> Callable[[], None]:
    def call() -> None:
        merged = torch.zeros(8, heads + 2 * kv_heads, dim, dtype=BF16)
        q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
        tables = torch.zeros(64, dim // 2)
        index = torch.zeros(8, dtype=torch.int64)
        norms = (torch.zeros(dim), torch.zeros(dim), 1e-6) if normed else NO_NORMS
        rotation = Rotation(tables, tables, index.int())
        OPS.rope_and_store(q, k, v, KeyStore(rotation, pages(kv_heads * dim, page_dtype), index, norms))

    return call


def rows(width: int, inner: int) -> Callable[[], None]:
    def call() -> None:
        x, weight = torch.zeros(8, width, dtype=BF16), torch.zeros(width)
        OPS.rms_norm(x, weight, 1e-6)
        OPS.add_rms_norm(x, x, weight, 1e-6)
        OPS.gate(torch.zeros(8, 2 * inner, dtype=BF16), "silu")
        OPS.gate(torch.zeros(8, 2 * inner, dtype=BF16), "gelu_tanh")

    return call


def router(experts: int, top_k: int, num_shared: int, **given: Any) -> Callable[[], None]:
    def call() -> None:
        moe = MoeSpec(num_experts=experts, top_k=top_k, intermediate_size=1, renormalize=True, **given)
        bias = torch.zeros(experts) if moe.has_bias else None
        OPS.choose_experts(torch.zeros(8, experts + moe.has_shared_gate), bias, moe, num_shared)

    return call


def experts(tokens: int, num: int, top_k: int, width: int, inner: int, dtype: torch.dtype = BF16) -> Callable[[], None]:
    def call() -> None:
        slots = torch.zeros(tokens, top_k, dtype=torch.int32)
        gate_up = torch.empty(num, 2 * inner, width, dtype=dtype)
        down = torch.empty(num, width, inner, dtype=dtype)
        hidden = torch.zeros(tokens, width, dtype=dtype)
        OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), numbers(gate_up), numbers(down), 0, "silu")

    return call


def block_experts(tokens: int, num: int, top_k: int, width: int, inner: int) -> Callable[[], None]:
    def call() -> None:
        slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
        gate_up, down = (
            Weight(BLOCKS, torch.empty(shape, dtype=FP8), torch.empty(num, shape[1] // 128, -(-shape[2] // 512) * 4))
            for shape in ((num, 2 * inner, width), (num, width, inner))
        )
        OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), gate_up, down, 0, "silu")

    return call


def coded_experts(tokens: int, num: int, top_k: int, width: int, inner: int) -> Callable[[], None]:
    """MXFP4, with biases."""

    def call() -> None:
        slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
        shapes = (num, 2 * inner, width), (num, width, inner)
        gate_up, down = (mxfp4(*shape) for shape in shapes)
        biases = torch.zeros(shapes[0][:2], dtype=BF16), torch.zeros(shapes[1][:2], dtype=BF16)
        shares = torch.zeros(tokens, top_k)
        OPS.fused_experts(hidden, slots, shares, gate_up, down, 0, "clamped_swish", None, biases)

    return call


def eight_bits(tokens: int, width: int, depth: int) -> Callable[[], None]:
    def call() -> None:
        x, norm = torch.zeros(tokens, depth, dtype=BF16), torch.zeros(depth)
        fp8.quantize(x)
        fp8.silu_mul_quantize(torch.zeros(tokens, 2 * depth, dtype=BF16))
        quantized, _ = fp8.add_rms_norm_quantize(x, x, norm, 1e-6)
        weight = torch.empty(width, depth, dtype=FP8)
        OPS.linear(Narrow(quantized, BF16), Weight(BLOCKS, weight, torch.zeros(width // 128, depth // 128)))

    return call


def packed(
    tokens: int, width: int, depth: int, bits: int = 4, group: int = 128, below: Any = None
) -> Callable[[], None]:
    return linear(tokens, lambda: codes((), width, depth, bits, group, below))


def codes(
    slots: tuple[int, ...],
    width: int,
    depth: int,
    bits: int,
    group: int,
    below: torch.dtype | None,
    ordered: bool = False,
) -> Weight:
    """bits 0: numbers of eight bits."""
    values = torch.empty(*slots, width, depth * (bits or 8) // 8, dtype=torch.uint8 if bits else FP8)
    scales = torch.empty(*slots, depth // group, width, dtype=F16)
    order = torch.empty(*slots, depth, dtype=torch.int32) if ordered else None
    return Weight(Packed(bits or 8, 64), values, scales, None if below is None else scales.to(below), order)


def packed_experts(tokens: int, num: int, top_k: int, width: int, inner: int, bits: int = 4) -> Callable[[], None]:
    def call() -> None:
        slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
        up, down = (
            codes((num,), *shape, bits, 128 if bits else shape[1], torch.uint8 if bits else None)
            for shape in ((2 * inner, width), (width, inner))
        )
        OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), up, down, 0, "silu")

    return call


def mxfp4(*shape: int) -> Weight:
    *rows, depth = shape
    codes, scales = (torch.empty(*rows, depth // each, dtype=torch.uint8) for each in (2, 32))
    return Weight(MXFP4, codes, scales)


def inputs(rows: int, tokens: int, max_blocks: int) -> Callable[[], None]:
    def call() -> None:
        offsets = StateLayout(16 * max_blocks + 1, 1000, max_blocks, 2000, 0, PAGE)
        packed, state = torch.zeros(4 + 5 * rows, dtype=torch.int32), torch.zeros(4000, dtype=torch.int32)
        step_inputs.apply_runs(packed, state, 9, 3, 100)
        step_inputs.prepare(packed, state, offsets, rows, tokens, tokens // rows, max_blocks)

    return call


def sample(vocab_size: int, dtype: torch.dtype) -> Callable[[], None]:
    def call() -> None:
        logits = torch.zeros(2, vocab_size, dtype=dtype)
        edited = torch.zeros(2, -(-vocab_size // 256) * 256)[:, :vocab_size]
        floats, ints, words = torch.zeros(2), torch.zeros(2, dtype=torch.int64), -(-vocab_size // 32)
        for rows in (logits, edited):
            SAMPLING_OPS.choose(rows, floats, floats, ints.int(), floats, ints, ints)
        counts = torch.zeros(2, vocab_size, dtype=torch.int32)
        SAMPLING_OPS.penalize(edited, ints, ints, counts, 1 << 30, torch.zeros(2, 3))
        SAMPLING_OPS.mask(logits, ints, torch.zeros(2, words, dtype=torch.int32))

    return call


def recurrent(
    singles: int,
    prompts: int,
    key_heads: int,
    value_heads: int,
    dtype: torch.dtype = BF16,
    value_dim: int = 128,
    erases: bool = True,
) -> Callable[[], None]:
    def call() -> None:
        counts = [1] * singles + [64] * prompts
        layer = Layer.random(sum(counts), (key_heads, value_heads, 128, value_dim), dtype, erases=erases)
        states = States(layer, len(counts))
        layer.run(OPS, states.pages, batch_of(counts, states.tables))

    return call


def dependent(call: Callable[[], None]) -> Callable[[], None]:
    """The same with programs that start before the last kernel's end."""

    def changed() -> None:
        with mock.patch.object(launch, "ENABLED", True):
            call()

    return changed


# On an H200 kernels are launched dependently; what no case here says so of is compiled in the usual way as well in `ALL`.
QUICK: dict[str, Callable[[], None]] = {
    "Qwen3-0.6B: prompts": attention(0, 2, 128, 16, 8),
    "Qwen3-0.6B: rope into eight-bit pages": rope(128, 16, 8, True, FP8),
    "Qwen3-0.6B: one row, dependent": dependent(attention(1, 0, 128, 16, 8)),
    "Qwen3-0.6B: rope, dependent": dependent(rope(128, 16, 8, True)),
    "Qwen3-0.6B: rows, dependent": dependent(rows(1024, 3072)),
    "Qwen3-0.6B: gate and up, one row, dependent": dependent(gated(1, 1024, 3072)),
    "Qwen3-0.6B: fixed attention": fixed(attention(1, 1, 128, 16, 8)),
    "Qwen3-0.6B: fixed product, few": fixed_linear(1, 1024, 3072),
    "Qwen3-0.6B: fixed product, many": fixed_linear(4096, 1024, 3072),
}

ALL: dict[str, Callable[[], None]] = QUICK | {
    "Qwen3.5-0.8B: recurrent layers": recurrent(1, 1, 16, 16),
    "Granite-4.0-H-Tiny: recurrent layers": recurrent(1, 1, 1, 48, value_dim=64, erases=False),
    "a step's inputs": inputs(7, 300, 2560),
    "Qwen3-0.6B: adapters": adapters(16, 1024, [2048, 1024, 1024]),
    "Qwen3-0.6B: one row": attention(1, 0, 128, 16, 8),
    "Qwen3-0.6B: rope": rope(128, 16, 8, True),
    "Qwen3-0.6B: rows": rows(1024, 3072),
    "Qwen3-0.6B: gate and up, one row": gated(1, 1024, 3072),
    "Llama-3.1-8B: fixed product, few": fixed_linear(1, 6144, 4096),
    "Llama-3.1-8B: fixed product, many": fixed_linear(4096, 6144, 4096),
    "Qwen3-30B-A3B: fixed product of float32": fixed_linear(1, 128, 2048, F32),
    "Qwen3-0.6B: fixed attention, eight-bit pages": fixed(attention(1, 1, 128, 16, 8, page_dtype=FP8)),
    "Gemma-3-4B: fixed attention in a window": fixed(attention(4, 1, 256, 8, 4, window=1024)),
    "Gemma-4-E2B: fixed attention of full layers": fixed(attention(4, 1, 512, 8, 1)),
    "gpt-oss-20b: fixed attention with sinks": fixed(attention(4, 1, 64, 64, 8, window=128, has_sinks=True)),
    "SmolLM2-135M: fixed attention, float32": fixed(attention(4, 1, 64, 9, 3, dtype=F32)),
    "Qwen3-30B-A3B: fixed experts, few": fixed(experts(1, 128, 8, 2048, 768)),
    "Qwen3-30B-A3B: fixed experts, many": fixed(experts(4096, 128, 8, 2048, 768)),
    "gpt-oss-20b: fixed MXFP4 experts, few": fixed(coded_experts(1, 32, 4, 2880, 2880)),
    "gpt-oss-20b: fixed MXFP4 experts, many": fixed(coded_experts(4096, 32, 4, 2880, 2880)),
    "Qwen3-8B: fixed four bits, few": fixed(packed(1, 6144, 4096, below=torch.uint8)),
    "Qwen3-8B: fixed four bits, many": fixed(packed(2048, 6144, 4096, below=torch.uint8)),
    "Qwen3-30B-A3B: fixed four-bit experts, few": fixed(packed_experts(1, 128, 8, 2048, 768)),
    "Qwen3-30B-A3B: fixed four-bit experts, many": fixed(packed_experts(4096, 128, 8, 2048, 768)),
    "Qwen3-8B: fixed products of eight bits, few": fixed(eight_bits(1, 6144, 4096)),
    "Qwen3-8B: fixed products of eight bits, many": fixed(eight_bits(256, 6144, 4096)),
    "Qwen3-0.6B: sampling": sample(151936, BF16),
    "Qwen3-0.6B: full batch": attention(256, 0, 128, 16, 8),
    "Qwen3-0.6B: eight-bit pages": attention(1, 1, 128, 16, 8, page_dtype=FP8),
    "Llama-3.1-8B: attention": attention(4, 1, 128, 32, 8),
    "Llama-3.1-8B: float16": attention(4, 1, 128, 32, 8, dtype=F16),
    "Llama-3.1-8B: rows": rows(4096, 14336),
    "Llama-3.1-8B: adapters of rank 256": adapters(16, 4096, [14336, 14336], 256),
    "SmolLM2-135M: adapters": adapters(16, 576, [576, 192, 192]),
    "Llama-3.1-8B: adapters, float32": adapters(16, 4096, [4096], 64, F32),
    "Llama-3.1-8B: gate and up, one row": gated(1, 4096, 14336),
    "Llama-3.1-8B: gate and up, 32 rows": gated(32, 4096, 14336),
    "Llama-3.1-70B: rows": rows(8192, 28672),
    "SmolLM2-135M: attention": attention(4, 1, 64, 9, 3),
    "SmolLM2-135M: sampling": sample(49152, F32),
    "Gemma-3-4B: sampling": sample(262208, BF16),
    "GPT-2: sampling, an odd vocabulary": sample(50257, F16),
    "SmolLM2-135M: float32": attention(4, 1, 64, 9, 3, dtype=F32),
    "SmolLM2-135M: rope": rope(64, 9, 3, False),
    "SmolLM2-135M: rows": rows(576, 1536),
    "SmolLM2-135M: gate and up": gated(4, 576, 1536),
    "SmolLM2-135M: gate and up, float32": gated(4, 576, 1536, F32),
    "Gemma-3-4B: rope": rope(256, 8, 4, True),
    "Qwen3-30B-A3B: narrow rows": rows(512, 768),
    "Gemma-3-4B: attention": attention(4, 1, 256, 8, 4),
    "Gemma-3-4B: windowed attention": attention(4, 1, 256, 8, 4, window=1024),
    "Gemma-2-9B: attention with a cap": attention(4, 1, 256, 16, 8, window=4096, cap=50.0),
    "Gemma-4-E2B: attention of full layers": attention(4, 1, 512, 8, 1),
    "Gemma-4-26B-A4B: attention of full layers": attention(4, 1, 512, 16, 2),
    "Gemma-4-E2B: rope of full layers": rope(512, 8, 1, True),
    "Gemma-4-E2B: rope of layers without keys of their own": rope(256, 8, 0, True),
    "gpt-oss-20b: attention with sinks": attention(4, 1, 64, 64, 8, window=128, has_sinks=True),
    "gpt-oss-20b: attention with sinks, dependent": dependent(attention(1, 0, 64, 64, 8, has_sinks=True)),
    "gpt-oss-20b: MXFP4 experts, one row": coded_experts(1, 32, 4, 2880, 2880),
    "gpt-oss-20b: MXFP4 experts, a batch": coded_experts(256, 32, 4, 2880, 2880),
    "gpt-oss-20b: MXFP4 experts, prompts": coded_experts(4096, 32, 4, 2880, 2880),
    "gpt-oss-120b: MXFP4 experts, one row, dependent": dependent(coded_experts(1, 128, 4, 2880, 2880)),
    "gpt-oss-20b: a layer of MXFP4, one row": linear(1, lambda: mxfp4(4096, 2880)),
    "gpt-oss-20b: a layer of MXFP4, prompts": linear(2048, lambda: mxfp4(4096, 2880)),
    "Qwen3-30B-A3B: router": router(128, 8, 0),
    "Qwen2-57B-A14B: router": router(64, 8, 8, has_shared_gate=True),
    "DeepSeek-V2: router": router(160, 6, 2, num_groups=8, top_groups=3),
    "DeepSeek-V3: router": router(256, 8, 1, scoring="sigmoid", num_groups=8, top_groups=4, has_bias=True),
    "Qwen3-30B-A3B: experts, one row": experts(1, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: experts, a batch": experts(512, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: experts, prompts": experts(4096, 128, 8, 2048, 768),
    "DeepSeek-V2-Lite: experts and shared ones, one row": experts(1, 66, 8, 2048, 1408),
    "DeepSeek-V2-Lite: experts and shared ones, prompts": experts(4096, 66, 8, 2048, 1408),
    "Mixtral-8x7B: experts": experts(64, 8, 2, 4096, 14336),
    "SmallMoE: float32 experts": experts(64, 8, 2, 64, 96, F32),
    "Qwen3-30B-A3B: eight-bit experts, one row": block_experts(1, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: eight-bit experts, a batch": block_experts(512, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: eight-bit experts, prompts": block_experts(4096, 128, 8, 2048, 768),
    "DeepSeek-V3: eight-bit experts and a shared one, one row": block_experts(1, 33, 9, 7168, 2048),
    "DeepSeek-V3: eight-bit experts and a shared one, prompts": block_experts(1024, 33, 9, 7168, 2048),
    "Qwen3-8B: eight bits, one row": eight_bits(1, 6144, 4096),
    "Qwen3-8B: eight bits, a batch": eight_bits(64, 6144, 4096),
    "Qwen3-8B: eight bits, prompts": eight_bits(256, 6144, 4096),
    "Qwen3-8B: eight bits, one row, dependent": dependent(eight_bits(1, 4096, 12288)),
    "Qwen3-8B: eight bits over ranks, one row": eight_bits(1, 1024, 4096),
    "Qwen3-8B: four bits, one row": packed(1, 6144, 4096, below=torch.uint8),
    "Qwen3-8B: four bits, a batch": packed(64, 6144, 4096, below=torch.uint8),
    "Qwen3-8B: four bits, prompts": packed(2048, 6144, 4096, below=torch.uint8),
    "Qwen3-8B: four bits, one row, dependent": dependent(packed(1, 6144, 4096, below=torch.uint8)),
    "Qwen3-8B: Q4_K, one row": packed(1, 4096, 12288, group=32, below=F16),
    "Qwen3-8B: Q4_K, prompts": packed(2048, 4096, 12288, group=32, below=F16),
    "Qwen3-8B: Q6_K, one row": packed(1, 4096, 12288, bits=8, group=16),
    "Qwen3-8B: Q6_K, prompts": packed(2048, 4096, 12288, bits=8, group=16),
    "Qwen3-8B: eight-bit channels, one row": packed(1, 4096, 12288, bits=0, group=12288),
    "Qwen3-8B: eight-bit channels, prompts": packed(2048, 4096, 12288, bits=0, group=12288),
    "Qwen3-30B-A3B: four-bit experts, one row": packed_experts(1, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: four-bit experts, a batch": packed_experts(512, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: four-bit experts, prompts": packed_experts(4096, 128, 8, 2048, 768),
    "Qwen3-30B-A3B: eight-bit channels of experts, prompts": packed_experts(4096, 128, 8, 2048, 768, 0),
    "DeepSeek-V2-Lite: attention": latent(4, 1, 16),
    "DeepSeek-V2-Lite: attention, dependent": dependent(latent(4, 1, 16)),
    "Qwen3-30B-A3B: router, dependent": dependent(router(128, 8, 0)),
    "Qwen3-30B-A3B: experts, one row, dependent": dependent(experts(1, 128, 8, 2048, 768)),
    "Qwen3-30B-A3B: experts, a batch, dependent": dependent(experts(512, 128, 8, 2048, 768)),
    "DeepSeek-V2-Lite: full batch": latent(1024, 0, 16),
    "DeepSeek-V2-Lite: float32": latent(4, 1, 16, F32),
    "DeepSeek-V2-Lite: rope": latent_rope(16, False),
    "DeepSeek-V2-Lite: rope of prompts": latent_rope(16, True),
    "DeepSeek-V2-Lite: rope into eight-bit pages": latent_rope(16, False, FP8),
    "DeepSeek-V2-Lite: rope, dependent": dependent(latent_rope(16, False)),
    "DeepSeek-V3: rope": latent_rope(128, False),
    "DeepSeek-V2-Lite: prompts": expanded(2, 16),
    "DeepSeek-V2-Lite: prompts, eight-bit pages": expanded(2, 16, page_dtype=FP8),
    "DeepSeek-V2-Lite: prompts, float32": expanded(2, 16, F32),
    "DeepSeek-V3: attention": latent(4, 1, 128),
    "DeepSeek-V3: eight-bit pages": latent(4, 1, 128, page_dtype=FP8),
    "Qwen3-Next-80B-A3B: recurrent layers": recurrent(4, 1, 16, 32),
    "Qwen3.5-0.8B: recurrent layers, float32": recurrent(1, 1, 16, 16, F32),
    "Granite-4.0-H-Small: recurrent layers": recurrent(4, 1, 1, 128, value_dim=64, erases=False),
    "Granite-4.0-H-Tiny: recurrent layers, float32": recurrent(1, 1, 1, 48, F32, value_dim=64, erases=False),
    "OPT-2.7B: attention": attention(4, 1, 80, 32, 32),
    "Phi: attention": attention(4, 1, 96, 32, 32),
}

FEW = {
    name: ALL[name]
    for name in ("Qwen3-0.6B: one row", "Qwen3-0.6B: prompts", "Qwen3-0.6B: rows", "Qwen3-0.6B: adapters")
}

GROUPS = {"few": FEW, "quick": QUICK, "all": ALL}


def lack(case: str, card: Card) -> str | None:
    """What the card would need for it."""
    if "eight" in case and not card.has_eight_bits:
        return "numbers of eight bits"
    if "dependent" in case and not card.has_dependent_launch:
        return "launches before the last kernel's end"
    return None

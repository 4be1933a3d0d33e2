"""Calls of the launchers with the shapes of models people serve, by group; `aot.py` compiles what they launch.

`quick` and `all` are compiled for an H200, `few` for the other cards, or `all` for all of them (test_triton_compiled.py). A case's name says what is special about it: "eight-bit", "dependent", "float32", "prompts", "a batch".
"""

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_NORMS, Fp8Rows, KeyStore, LatentStore, Rotation, ScoreExtras
from penstock.executor.kernels.card import Card
from penstock.executor.kernels.cuda import adapter_products, few_rows, fp8, step_inputs
from penstock.executor.kernels.cuda import dependent as launch
from penstock.executor.kernels.cuda.ops import OPS, SAMPLING_OPS, InvariantOps
from penstock.executor.kernels.gpu_formats import MXFP4, Packed
from penstock.executor.kernels.state import StateLayout
from penstock.executor.kernels.stored_formats import BLOCKS
from penstock.executor.kernels.weight import Weight, plain_weight
from penstock.executor.moe_spec import MoeSpec
from tests.support.recurrent import Layer, States, batch_of

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PAGE = 16
INVARIANT = InvariantOps(fp8)
LAYERS = 4


def batch(singles: int, prompts: int, context: int = 4096) -> ForwardBatch:
    rows = singles + prompts
    return ForwardBatch(
        tokens=torch.zeros(rows, dtype=torch.int32),
        positions=torch.zeros(rows, dtype=torch.int32),
        kv_cells=torch.zeros(rows, dtype=torch.int64),
        query_starts=torch.zeros(rows + 1, dtype=torch.int32),
        context_lens=torch.zeros(rows, dtype=torch.int32),
        block_tables=torch.zeros(rows, context // PAGE, dtype=torch.int32),
        output_indices=None,
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
) -> None:
    q = torch.zeros(singles + 64 * prompts, heads, dim, dtype=dtype)
    cache = pages(kv_heads * dim, page_dtype or dtype)
    extras = ScoreExtras(cap, torch.zeros(heads) if has_sinks else None, window)
    OPS.paged_attention(q, cache, batch(singles, prompts), dim**-0.5, extras)


def plain_linear(tokens: int, width: int, depth: int, dtype: torch.dtype = BF16) -> None:
    OPS.linear(torch.zeros(tokens, depth, dtype=dtype), plain_weight(torch.empty(width, depth, dtype=dtype)))


def coded_linear(tokens: int, width: int, depth: int) -> None:
    OPS.linear(torch.zeros(tokens, depth, dtype=BF16), mxfp4(width, depth))


def latent(
    singles: int, prompts: int, heads: int, dtype: torch.dtype = BF16, page_dtype: torch.dtype | None = None
) -> None:
    q = torch.zeros(singles + 64 * prompts, heads, 64 + 512, dtype=dtype)
    OPS.latent_attention(q, pages(64 + 512, page_dtype or dtype)[0], batch(singles, prompts), 0.1, 64)


def expanded(prompts: int, heads: int, dtype: torch.dtype = BF16, page_dtype: torch.dtype | None = None) -> None:
    given, latents = batch(4, prompts), pages(64 + 512, page_dtype or dtype)[0]
    q, expand = torch.zeros(64 * prompts, heads, 64 + 128, dtype=dtype), torch.zeros(heads, 256, 512, dtype=dtype)
    OPS.expanded_attention(q, latents, expand, given, 4, 0.1, 64)


def latent_rope(heads: int, is_whole: bool, page_dtype: torch.dtype = BF16) -> None:
    q, down = torch.zeros(8, heads * 192 + 576, dtype=BF16).split((heads * 192, 576), dim=1)
    goal = torch.zeros(8, heads, 64 + (128 if is_whole else 512), dtype=BF16)
    tables, index, latents = torch.zeros(64, 32), torch.zeros(8).long(), pages(576, page_dtype)[0]
    rotation = Rotation(tables, tables, index.int())
    store = LatentStore((torch.zeros(512), 1e-6), rotation, latents, index)
    OPS.latent_rope_and_store(goal, q.unflatten(1, (heads, 192)), down, store, 0, is_whole)


def gated(tokens: int, width: int, inner: int, dtype: torch.dtype = BF16) -> None:
    x, weight = torch.zeros(tokens, width, dtype=dtype), torch.empty(2 * inner, width, dtype=dtype)
    OPS.gated_linear(x, weight, "silu")


def adapters(tokens: int, depth: int, widths: list[int], rank: int = 16, dtype: torch.dtype = BF16) -> None:
    x, y = torch.zeros(tokens, depth, dtype=dtype), torch.zeros(tokens, sum(widths), dtype=dtype)
    down, up = torch.zeros(2, len(widths), rank, depth, dtype=dtype), torch.zeros(2, sum(widths), rank, dtype=dtype)
    adapter_products.add_lora(x, y, torch.zeros(4, 3, dtype=torch.int32), down, up, widths)


def rope(dim: int, heads: int, kv_heads: int, normed: bool, page_dtype: torch.dtype = BF16) -> None:
    merged = torch.zeros(8, heads + 2 * kv_heads, dim, dtype=BF16)
    q, k, v = merged.split((heads, kv_heads, kv_heads), dim=1)
    tables = torch.zeros(64, dim // 2)
    index = torch.zeros(8, dtype=torch.int64)
    norms = (torch.zeros(dim), torch.zeros(dim), 1e-6) if normed else NO_NORMS
    rotation = Rotation(tables, tables, index.int())
    OPS.rope_and_store(q, k, v, KeyStore(rotation, pages(kv_heads * dim, page_dtype), index, norms))


def rows(width: int, inner: int) -> None:
    x, weight = torch.zeros(8, width, dtype=BF16), torch.zeros(width)
    OPS.rms_norm(x, weight, 1e-6)
    OPS.add_rms_norm(x, x, weight, 1e-6)
    OPS.gate(torch.zeros(8, 2 * inner, dtype=BF16), "silu")
    OPS.gate(torch.zeros(8, 2 * inner, dtype=BF16), "gelu_tanh")


def router(experts: int, top_k: int, num_shared: int, **given: Any) -> None:
    moe = MoeSpec(num_experts=experts, top_k=top_k, intermediate_size=1, renormalize=True, **given)
    bias = torch.zeros(experts) if moe.has_bias else None
    OPS.wide_linear(torch.zeros(1, 2048, dtype=BF16), torch.zeros(experts, 2048, dtype=BF16))
    OPS.choose_experts(torch.zeros(8, experts + moe.has_shared_gate), bias, moe, num_shared)


def experts(tokens: int, num: int, top_k: int, width: int, inner: int, dtype: torch.dtype = BF16) -> None:
    slots = torch.zeros(tokens, top_k, dtype=torch.int32)
    gate_up = torch.empty(num, 2 * inner, width, dtype=dtype)
    down = torch.empty(num, width, inner, dtype=dtype)
    hidden = torch.zeros(tokens, width, dtype=dtype)
    OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), plain_weight(gate_up), plain_weight(down), 0, "silu")


def block_experts(tokens: int, num: int, top_k: int, width: int, inner: int) -> None:
    slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
    gate_up, down = (
        Weight(BLOCKS, torch.empty(shape, dtype=FP8), torch.empty(num, shape[1] // 128, -(-shape[2] // 512) * 4))
        for shape in ((num, 2 * inner, width), (num, width, inner))
    )
    OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), gate_up, down, 0, "silu")


def coded_experts(tokens: int, num: int, top_k: int, width: int, inner: int) -> None:
    """MXFP4, with biases."""

    slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
    shapes = (num, 2 * inner, width), (num, width, inner)
    gate_up, down = (mxfp4(*shape) for shape in shapes)
    biases = torch.zeros(shapes[0][:2], dtype=BF16), torch.zeros(shapes[1][:2], dtype=BF16)
    shares = torch.zeros(tokens, top_k)
    OPS.fused_experts(hidden, slots, shares, gate_up, down, 0, "clamped_swish", None, biases)


def eight_bits(tokens: int, width: int, depth: int) -> None:
    x, norm = torch.zeros(tokens, depth, dtype=BF16), torch.zeros(depth)
    fp8.quantize(x)
    fp8.silu_mul_quantize(torch.zeros(tokens, 2 * depth, dtype=BF16))
    quantized, _ = fp8.add_rms_norm_quantize(x, x, norm, 1e-6)
    weight = torch.empty(width, depth, dtype=FP8)
    OPS.linear(Fp8Rows(quantized, BF16), Weight(BLOCKS, weight, torch.zeros(width // 128, depth // 128)))


def packed(tokens: int, width: int, depth: int, bits: int = 4, group: int = 128, below: Any = None) -> None:
    OPS.linear(torch.zeros(tokens, depth, dtype=BF16), codes((), width, depth, bits, group, below))


def codes(slots: tuple[int, ...], width: int, depth: int, bits: int, group: int, below: torch.dtype | None) -> Weight:
    """bits 0: numbers of eight bits."""
    values = torch.empty(*slots, width, depth * (bits or 8) // 8, dtype=torch.uint8 if bits else FP8)
    scales = torch.empty(*slots, depth // group, width, dtype=F16)
    return Weight(Packed(bits or 8, 64), values, scales, None if below is None else scales.to(below))


def packed_experts(tokens: int, num: int, top_k: int, width: int, inner: int, bits: int = 4) -> None:
    slots, hidden = torch.zeros(tokens, top_k, dtype=torch.int32), torch.zeros(tokens, width, dtype=BF16)
    up, down = (
        codes((num,), *shape, bits, 128 if bits else shape[1], torch.uint8 if bits else None)
        for shape in ((2 * inner, width), (width, inner))
    )
    OPS.fused_experts(hidden, slots, torch.zeros(tokens, top_k), up, down, 0, "silu")


def mxfp4(*shape: int) -> Weight:
    *rows, depth = shape
    codes, scales = (torch.empty(*rows, depth // each, dtype=torch.uint8) for each in (2, 32))
    return Weight(MXFP4, codes, scales)


def inputs(rows: int, tokens: int, max_blocks: int) -> None:
    offsets = StateLayout(16 * max_blocks + 1, 1000, max_blocks, 2000, 0, PAGE)
    packed, state = torch.zeros(4 + 5 * rows, dtype=torch.int32), torch.zeros(4000, dtype=torch.int32)
    step_inputs.apply_runs(packed, state, 9, 3, 100)
    step_inputs.prepare(packed, state, offsets, rows, tokens, tokens // rows, max_blocks)


def block_copies(num_bytes: int) -> None:
    blocks, hosts = torch.zeros(2, num_bytes, dtype=torch.uint8), torch.zeros(2, num_bytes + 4096, dtype=torch.uint8)
    step_inputs.copy_blocks(blocks, hosts[:, :num_bytes], torch.zeros(1, 2, dtype=torch.int32))


def sample(vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, vocab_size, dtype=dtype)
    edited = torch.zeros(2, -(-vocab_size // 256) * 256)[:, :vocab_size]
    floats, ints, words = torch.zeros(2), torch.zeros(2, dtype=torch.int64), -(-vocab_size // 32)
    for rows in (logits, edited):
        SAMPLING_OPS.choose(rows, floats, floats, ints.int(), floats, ints, ints)
    counts = torch.zeros(2, vocab_size, dtype=torch.int32)
    SAMPLING_OPS.penalize(edited, ints, ints, counts, torch.zeros(2, 3))
    SAMPLING_OPS.mask(logits, ints, torch.zeros(2, words, dtype=torch.int32))


def recurrent(
    singles: int,
    prompts: int,
    key_heads: int,
    value_heads: int,
    dtype: torch.dtype = BF16,
    value_dim: int = 128,
    erases: bool = True,
    is_padded: bool = False,
) -> None:
    counts = [1] * singles + [64] * prompts
    layer = Layer.random(sum(counts), (key_heads, value_heads, 128, value_dim), dtype, erases=erases)
    states = States(layer, len(counts))
    batch = batch_of(counts, states.tables)
    if is_padded:
        lens = sum(counts), *[0] * (len(counts) - 1)
        batch = replace(batch, num_single_rows=0, query_lens=lens, row_counts=torch.zeros(4, dtype=torch.int32))
    layer.run(OPS, states.pages, batch)


BUILDERS = {
    build.__name__: build
    for build in (
        *(attention, plain_linear, coded_linear, latent, expanded, latent_rope, gated, adapters, rope, rows, router),
        *(experts, block_experts, coded_experts, eight_bits, packed, packed_experts),
        *(inputs, block_copies, sample, recurrent),
    )
}
WORDS = {"BF16": BF16, "F16": F16, "F32": F32, "FP8": FP8, "U8": torch.uint8, "sigmoid": "sigmoid"}


def run(name: str, build: str, *arguments: str) -> None:
    """Launch what a line of aot_cases.txt says."""

    def value(text: str) -> Any:
        return WORDS[text] if text in WORDS else ast.literal_eval(text)

    given = [value(text) for text in arguments if "=" not in text]
    options = {option: value(text) for option, _, text in (each.partition("=") for each in arguments if "=" in each)}
    ops = INVARIANT if "fixed" in name else OPS
    has_any = mock.patch.object(few_rows, "EVERY_SIZE", "every size" in name)
    with has_any, mock.patch.object(launch, "ENABLED", "dependent" in name), mock.patch(f"{__name__}.OPS", ops):
        BUILDERS[build](*given, **options)


def read_cases() -> dict[str, dict[str, Callable[[], None]]]:
    """Return the cases of each section of aot_cases.txt by their names."""
    found: dict[str, dict[str, Callable[[], None]]] = {}
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("["):
            section = found.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, call = line.partition(" | ")
            section[name] = partial(run, name, *call.split())
    return found


# On an H200 kernels are launched dependently; what no case says so of is compiled in the usual way as well in `all`.
QUICK = read_cases()["quick"]
ALL = QUICK | read_cases()["all"]

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

"""Calls of every kernel at given shapes: for the rung that compares them with their reference implementations, the rung
that measures them, the tests of kernels, and the compiler of tests/support/aot.py. A function yields the calls of one
operation; its arguments after the kit and the name are the shapes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from benchmarks.gpu.batches import PAGE, Rows, make_batch, make_cache, num_blocks, pages_of, spoil_unused
from benchmarks.gpu.figures import open_device, set_launch
from tests.support.recurrent import Layer, States, as_in_a_graph, batch_of
from tests.support.twins import changed, eight_bits, lora, sampling, torch_inputs, torch_ops
from tests.support.twins.experts import fused_experts

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import (
    IN_PROMPT,
    NO_NORMS,
    UNGATED,
    Activation,
    Fp8Rows,
    HeadNorms,
    InputOps,
    KeyStore,
    LatentStore,
    NormedRows,
    Ops,
    Rotation,
    SamplingOps,
    ScoreExtras,
)
from penstock.executor.kernels.eight_bits import FP8_MAX, are_quantized
from penstock.executor.kernels.gpu_formats import MXFP4, Packed
from penstock.executor.kernels.state import OPTIONS, StateLayout
from penstock.executor.kernels.stored_formats import BLOCK, BLOCKS, Groups, half_of
from penstock.executor.kernels.weight import Weight, plain_weight
from penstock.executor.moe_spec import MoeSpec

MaybeDtype = torch.dtype | None  # None: the kit's
EPS = 1e-2  # of norms: so large that a kernel which ignores it is found
Heads = tuple[int, int, int]  # query heads, key-value heads, dimension
MakeWeight = Callable[..., Weight]  # of a kit and a shape
ExpertSizes = tuple[int, int, int, int]  # experts, experts per token, width, width inside an expert


class Kernels(NamedTuple):
    """A set of kernels, or their reference implementations."""

    ops: Ops
    sampling: SamplingOps
    inputs: InputOps
    add_lora: Callable[..., None]
    wide_dtype: MaybeDtype = None  # of the inputs of products and of attention; None: unchanged
    is_held: bool = True  # compared with the reference: each writes to its own pages

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.wide_dtype is None else x.to(self.wide_dtype)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor that this set writes to."""
        return x.clone() if self.is_held else x


# The reference of products and of attention computes in float32 from the same numbers.
TWINS = Kernels(
    changed(torch_ops, fused_experts=fused_experts, blocks=eight_bits),
    sampling,
    torch_inputs,
    lora.add_lora,
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
    """The materials of cases: device, dtype, and cache size."""

    device: torch.device
    dtype: torch.dtype
    is_tiny: bool = False  # for the parts, which choose the shapes
    layers: int = 3  # of a cache; only the middle one holds numbers, so a wrong stride reads NaN
    page: int = PAGE
    is_empty: bool = False  # tensors stay uninitialized, which is enough to compile a call and takes no memory

    def random(self, *shape: int, scale: float = 1.0, dtype: MaybeDtype = None) -> torch.Tensor:
        if self.is_empty:
            return torch.empty(shape, dtype=dtype or self.dtype)
        return (torch.randn(shape, device=self.device) * scale).to(dtype or self.dtype)

    def wide(self, *shape: int, scale: float = 0.1, mean: float = 1.0) -> torch.Tensor:
        """Return the weight of a norm, or what else is in float32 beside any dtype."""
        return mean + self.random(*shape, scale=scale, dtype=torch.float32)

    def integers(self, end: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        if self.is_empty:
            return torch.empty(shape, dtype=dtype)
        return torch.randint(end, shape, device=self.device).to(dtype)

    def cache(self, batch: ForwardBatch, rows: Rows, parts: int, width: int, dtype: MaybeDtype) -> torch.Tensor:
        """Return the pages of the rows' contexts; cells that no row uses are NaN."""
        if self.is_empty:
            return torch.empty(2, self.layers, parts, self.page, width, dtype=dtype or self.dtype)
        blocks = num_blocks(rows, self.page)
        kv = make_cache(blocks, self.layers, parts, width, dtype or self.dtype, self.device, self.page)
        kv[:, : self.middle] = kv[:, self.middle + 1 :] = torch.nan
        spoil_unused(kv[:, self.middle], batch)
        return kv

    def blank_pages(self, tokens: int, parts: int, width: int, dtype: MaybeDtype) -> torch.Tensor:
        """Return zeros to write to, so that cells that are not written are the same on both sides."""
        blocks = 2 if self.is_empty else num_blocks([(tokens, tokens)], self.page)
        return torch.zeros(blocks, self.layers, parts, self.page, width, device=self.device).to(dtype or self.dtype)

    def rotation(self, tokens: int, rotated: int) -> Rotation:
        angles = self.wide(2 * tokens, rotated // 2, scale=6.0, mean=0.0)
        return Rotation(angles.cos(), angles.sin(), self.integers(2 * tokens, tokens))

    def cells(self, tokens: int) -> torch.Tensor:
        """Return distinct cells of a cache of `num_blocks([(tokens, tokens)])` blocks, in any order."""
        return torch.randperm(num_blocks([(tokens, tokens)], self.page) * self.page, device=self.device)[:tokens]

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
    kit: Kit,
    name: str,
    rows: Rows,
    heads: Heads,
    longest: int = 0,
    window: int | None = None,
    cap: float | None = None,
    has_sinks: bool = False,
    page_dtype: MaybeDtype = None,
) -> Iterator[Case]:
    num, kv_heads, dim = heads
    batch = make_batch(rows, kit.device, longest, kit.page)
    kv = kit.cache(batch, rows, 2, kv_heads * dim, page_dtype)
    if window is not None:  # blocks that have left every window were given back
        for table, (count, context) in zip(batch.block_tables, rows, strict=True):
            table[: max(0, context - count + 1 - window) // kit.page] = 0
    q = kit.random(sum(count for count, _ in rows), num, dim)
    # Sinks take next to all of the weight, half of it and none.
    sinks = torch.linspace(-3, 12, num, device=kit.device) if has_sinks else None

    def attend(kernels: Kernels) -> torch.Tensor:
        k, v = (kernels.wide(pages) for pages in pages_of(kv, kit.middle))
        return kernels.ops.paged_attention(kernels.wide(q), (k, v), batch, dim**-0.5, ScoreExtras(cap, sinks, window))

    yield Case(name, attend, None, *work(rows, q, 2 * kv_heads * dim))


def latents(
    kit: Kit, name: str, rows: Rows, sizes: tuple[int, int, int], longest: int = 0, page_dtype: MaybeDtype = None
) -> Iterator[Case]:
    """Yield latent attention. `sizes`: heads, and the width of the rotated part and of the latents."""
    heads, rope, rank = sizes
    batch = make_batch(rows, kit.device, longest, kit.page)
    kv = kit.cache(batch, rows, 1, rope + rank, page_dtype)
    q = kit.random(sum(count for count, _ in rows), heads, rope + rank)

    def attend(kernels: Kernels) -> torch.Tensor:
        pages = kernels.wide(pages_of(kv, kit.middle)[0])
        return kernels.ops.latent_attention(kernels.wide(q), pages, batch, 0.1, rope)

    yield Case(name, attend, None, *work(rows, q, rope + rank))


def expanded(
    kit: Kit, name: str, rows: Rows, first: int, sizes: tuple[int, int, int, int, int], page_dtype: MaybeDtype = None
) -> Iterator[Case]:
    """Yield attention over expanded latents, of the rows from `first` on."""
    heads, rope, nope, value, rank = sizes
    batch = make_batch(rows, kit.device, 0, kit.page)
    kv = kit.cache(batch, rows, 1, rope + rank, page_dtype)
    q = kit.random(sum(count for count, _ in rows[first:]), heads, rope + nope)
    expand = kit.random(heads, nope + value, rank, scale=rank**-0.5)

    def attend(kernels: Kernels) -> torch.Tensor:
        assert kernels.ops.expanded_attention is not None
        arguments = kernels.wide(q), kernels.wide(pages_of(kv, kit.middle)[0]), kernels.wide(expand)
        return kernels.ops.expanded_attention(*arguments, batch, first, 0.1, rope)

    yield Case(name, attend)


def rope(
    kit: Kit,
    name: str,
    tokens: int,
    heads: Heads,
    rotated: int | None = None,
    has_norms: bool = False,
    page_dtype: MaybeDtype = None,
    has_values: bool = True,
) -> Iterator[Case]:
    num, kv_heads, dim = heads
    rotation, cells = kit.rotation(tokens, dim if rotated is None else rotated), kit.cells(tokens)
    merged = kit.random(tokens, num + 2 * kv_heads, dim)
    norms: HeadNorms = (kit.wide(dim), kit.wide(dim), EPS) if has_norms else NO_NORMS
    kv = kit.blank_pages(tokens, 2, kv_heads * dim, page_dtype)

    def call(kernels: Kernels) -> tuple[torch.Tensor, ...]:
        q, k, v = merged.split((num, kv_heads, kv_heads), dim=1)
        own = kernels.own(kv)
        k_pages, v_pages = pages_of(own, kit.middle)
        store = KeyStore(rotation, (k_pages, v_pages if has_values else k_pages), cells, norms)
        return kernels.ops.rope_and_store(q, k, v if has_values else None, store), own

    yield Case(name, call, None if page_dtype is None else 5e-2, 2 * merged.nbytes + 2 * rotation.cos.nbytes)


def latent_rope(
    kit: Kit,
    name: str,
    tokens: int,
    sizes: tuple[int, int, int, int],
    first: int = 0,
    is_whole: bool = False,
    page_dtype: MaybeDtype = None,
) -> Iterator[Case]:
    """Yield the way of latents into the pages, with the queries of the tokens from `first` on. `sizes`: heads, and the
    width of the rotated part, of the rest of a query and of the latents."""
    heads, rope_dim, nope, rank = sizes
    rotation, cells, weight = kit.rotation(tokens, rope_dim), kit.cells(tokens), kit.wide(rank)
    widths = heads * (rope_dim + nope), rank + rope_dim
    q, down = kit.random(tokens, sum(widths)).split(widths, dim=1)
    kv = kit.blank_pages(tokens, 1, rope_dim + rank, page_dtype)
    goal = kit.random(tokens - first, heads, rope_dim + (nope if is_whole else rank))

    def call(kernels: Kernels) -> tuple[torch.Tensor, ...]:
        pages, own = kernels.own(kv), kernels.own(goal)
        store = LatentStore((weight, EPS), rotation, pages_of(pages, kit.middle)[0], cells)
        kernels.ops.latent_rope_and_store(own, q.unflatten(1, (heads, -1)), down, store, first, is_whole)
        return own, pages

    yield Case(name, call, None if page_dtype is None else 5e-2)


def rows(kit: Kit, name: str, num_rows: int, width: int, inner: int) -> Iterator[Case]:
    """Yield norms of rows of `width`, which are parts of wider ones, and gates of rows of `inner`."""
    x, residual = kit.random(num_rows, width + 16)[:, 16:], kit.random(num_rows, width)
    weight, gate_up = kit.wide(width), kit.random(num_rows, 2 * inner, scale=4.0)
    norm_bytes, gate_bytes = 2 * residual.nbytes, 3 * gate_up.nbytes / 2

    def add(kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.ops.add_rms_norm(x, residual, weight, EPS)

    yield Case(f"{name}norm", lambda kernels: kernels.ops.rms_norm(x, weight, EPS), None, norm_bytes)
    yield Case(f"{name}add and norm", lambda kernels: add(kernels)[0], None, 2 * norm_bytes)
    yield Case(f"{name}add", lambda kernels: add(kernels)[1], 0.0)
    for activation in [each for each in get_args(Activation) if each not in UNGATED]:

        def gate(kernels: Kernels, activation: Activation = activation) -> torch.Tensor:
            return kernels.ops.gate(gate_up, activation)

        yield Case(f"{name}{activation} and multiply", gate, None, gate_bytes)
    up, opened = gate_up.chunk(2, dim=1)
    yield Case(f"{name}sigmoid and multiply", lambda kernels: kernels.ops.apply_gate(up, opened), None, gate_bytes)


def product(
    kit: Kit, name: str, tokens: int, shape: tuple[int, int], make: MakeWeight | None = None, has_bias: bool = False
) -> Iterator[Case]:
    """Yield a product with a weight of `shape`, which `make` makes: None stands for `plain`."""
    width, depth = shape
    weight = (make or plain)(kit, width, depth)
    x, bias = kit.random(tokens, depth), kit.random(width) if has_bias else None

    def multiply(kernels: Kernels) -> torch.Tensor:
        used = plain_weight(kernels.wide(weight.codes)) if weight.is_numbers else weight
        return kernels.ops.linear(kernels.wide(x), used, None if bias is None else kernels.wide(bias))

    num_bytes = sum(part.nbytes for part in weight.tensors()) + tokens * (width + depth) * kit.dtype.itemsize
    yield Case(name, multiply, 2e-2 if make else None, num_bytes, 2 * tokens * width * depth)


def wide_product(kit: Kit, name: str, tokens: int, shape: tuple[int, int]) -> Iterator[Case]:
    """Yield a router's product, whose result is in float32."""
    x, weight, bias = kit.random(tokens, shape[1]), kit.random(*shape), kit.wide(shape[0])

    def multiply(kernels: Kernels) -> torch.Tensor:
        wide = kernels.ops.wide_linear
        return wide(x, weight, bias) if wide else (x.double() @ weight.double().t() + bias).float()

    yield Case(name, multiply, 1e-5)


def gated(
    kit: Kit,
    name: str,
    tokens: int,
    depth: int,
    inner: int,
    activation: Activation = "silu",
    is_normed: bool = False,
    make: MakeWeight | None = None,
) -> Iterator[Case]:
    """Yield gate and up of an MLP; `is_normed`: with the residual's addition and the norm in front of it."""
    x, residual, norm = kit.random(tokens, depth), kit.random(tokens, depth), kit.wide(depth)
    weight = (make or plain)(kit, 2 * inner, depth)

    def rows(total: torch.Tensor) -> torch.Tensor | NormedRows:
        return NormedRows(x, residual, total, norm, EPS) if is_normed else x

    def multiply(kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.empty_like(residual)
        return kernels.ops.gated_linear(rows(total), weight, activation), total

    yield Case(name, lambda kernels: multiply(kernels)[0])
    if is_normed:
        bias = kit.random(2 * inner)
        yield Case(f"{name}, the sum", lambda kernels: multiply(kernels)[1], 0.0)
        yield Case(f"{name}, without a gate", lambda kernels: kernels.ops.linear(rows(x.clone()), weight, bias))


def adapters(kit: Kit, name: str, depth: int, widths: Sequence[int], rank: int = 16) -> Iterator[Case]:
    """Yield what adapters add to a product: of tiles alone, full, partly filled and empty, and rows of no tile."""
    tokens, slots, width = 40, 3, sum(widths)
    x, y = kit.random(tokens, depth), kit.random(tokens, width)
    down = kit.random(slots, len(widths), rank, depth, scale=depth**-0.5)
    up = kit.random(slots, width, rank, scale=rank**-0.5)
    tiles = torch.tensor([[0, 16, 2], [16, 3, 2], [21, 1, 0], [30, 10, 1], [0, 0, 0]], device=kit.device).int()

    def add(kernels: Kernels) -> torch.Tensor:
        own = kernels.own(y)
        kernels.add_lora(x, own, tiles, down, up, widths)
        return own

    yield Case(name, add)
    outside = torch.tensor([19, 20, *range(22, 30)], device=kit.device)
    yield Case(f"{name}, the other rows", lambda kernels: add(kernels)[outside], 0.0)


def router(kit: Kit, name: str, tokens: int, moe: MoeSpec, num_shared: int = 0) -> Iterator[Case]:
    logits = kit.wide(tokens, moe.num_experts + moe.has_shared_gate, scale=3.0, mean=0.0)
    bias = kit.wide(moe.num_experts, scale=1.0) if moe.has_bias else None

    def choose(kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        return kernels.ops.choose_experts(logits, bias, moe, num_shared)

    yield Case(f"{name}, the choice", lambda kernels: choose(kernels)[0], 0.0)
    yield Case(f"{name}, the weights", lambda kernels: choose(kernels)[1], 1e-5)


def plain(kit: Kit, *shape: int) -> Weight:
    return plain_weight(kit.random(*shape, scale=shape[-1] ** -0.5))


def blocks(kit: Kit, *shape: int) -> Weight:
    """Return eight-bit numbers […, N, K], K a multiple of 128, with a scale for every block of 128 × 128."""
    *leading, width, depth = shape
    if kit.is_empty:
        scales = torch.empty(*leading, -(-width // BLOCK), -(-depth // (4 * BLOCK)) * 4)
        return Weight(BLOCKS, torch.empty(shape, dtype=torch.float8_e4m3fn), scales)
    wide = F.pad(kit.random(*shape, scale=depth**-0.5).float(), (0, 0, 0, -width % BLOCK))
    parts = wide.unflatten(-2, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))  # […, N / 128, 128, K / 128, 128]
    scales = parts.abs().amax((-3, -1)) / FP8_MAX
    values = (parts / scales[..., :, None, :, None]).to(torch.float8_e4m3fn).flatten(-4, -3).flatten(-2)
    return Weight(BLOCKS, values[..., :width, :].contiguous(), F.pad(scales, (0, -depth // BLOCK % 4)))


def mxfp4(kit: Kit, *shape: int) -> Weight:
    *leading, depth = shape
    scales = kit.integers(5, *leading, depth // 32, dtype=torch.uint8) + 117  # 2 ** -10 … 2 ** -6
    return Weight(MXFP4, kit.integers(256, *leading, depth // 2, dtype=torch.uint8), scales)


def packed(kit: Kit, *shape: int, bits: int = 4, group: int | None = 128, below: MaybeDtype = None) -> Weight:
    """Return codes […, N, K] with a scale for each group; bits 0: numbers of eight bits; group None: a whole row. `below`
    is the zeros' dtype: uint8 for zero points, float16 for minima."""
    *leading, width, depth = shape
    if bits:
        codes = kit.integers(256, *leading, width, depth * bits // 8, dtype=torch.uint8)
    else:
        codes = kit.random(*shape, dtype=torch.float8_e4m3fn)
    scaling = *leading, depth // (group or depth), width
    scales = (kit.random(*scaling, dtype=torch.float32).abs() / (60 * (bits + 1))).half()
    zeros = None if below is None else kit.integers(1 << bits, *scaling, dtype=torch.uint8)
    if below is torch.float16:
        zeros = kit.random(*scaling, scale=0.05, dtype=below)
    half = half_of(Weight(Groups(bits or 8), torch.empty(1, depth), torch.empty(1, scaling[-2])))
    return Weight(Packed(bits or 8, half or 0), codes, scales, zeros)


def experts(
    kit: Kit,
    name: str,
    tokens: int,
    sizes: ExpertSizes,
    make: MakeWeight = plain,
    activation: Activation = "silu",
    has_biases: bool = False,
    has_added: bool = False,
    held: tuple[int, int] | None = None,
) -> Iterator[Case]:
    """Yield a layer of experts of which a rank has those from `held[0]` to `held[1]`; a hot expert fills some tiles."""
    num, top_k, width, inner = sizes
    first, end = held or (0, num)
    opening = inner if activation in UNGATED else 2 * inner
    up, down = (make(kit, end - first, *shape) for shape in ((opening, width), (width, inner)))
    hidden, added = kit.random(tokens, width), kit.random(tokens, width) if has_added else None
    favour = torch.rand(tokens, num, device=kit.device)
    favour[:, 0] += 0.5
    slots = favour.topk(top_k).indices.int()
    shares = torch.rand(tokens, top_k, device=kit.device)
    biases = [kit.random(end - first, len_) if has_biases else None for len_ in (opening, width)]
    is_wide = make is not blocks or not are_quantized(slots.numel(), end - first)

    def multiply(kernels: Kernels) -> torch.Tensor:
        def wide(tensor: torch.Tensor | None) -> Any:
            return kernels.wide(tensor) if is_wide and tensor is not None else tensor

        weights = [plain_weight(wide(each.codes)) if each.is_numbers else each for each in (up, down)]
        assert kernels.ops.fused_experts is not None
        entries, given = (wide(hidden), slots, wide(shares)), (wide(added), (wide(biases[0]), wide(biases[1])))
        return kernels.ops.fused_experts(*entries, weights[0], weights[1], first, activation, *given)

    expert_bytes = sum(part[:1].nbytes for weight in (up, down) for part in weight.tensors())
    num_bytes = slots.unique().numel() * expert_bytes + 2 * hidden.nbytes
    yield Case(name, multiply, 2e-2, num_bytes, 6 * tokens * top_k * width * inner)


def block_product(kit: Kit, name: str, tokens: int, shape: tuple[int, int]) -> Iterator[Case]:
    """Yield the product with a weight in blocks, and everything that quantizes rows for it."""
    weight, depth = blocks(kit, *shape), shape[1]
    x, residual, gate_up = kit.random(tokens, depth), kit.random(tokens, depth), kit.random(tokens, 2 * depth)
    norm = kit.wide(depth)

    def quantize(kernels: Kernels) -> list[torch.Tensor]:
        ops = kernels.ops.blocks
        assert ops is not None
        made, total = ops.add_rms_norm_quantize(x, residual, norm, EPS)
        return [total, *map(eight_bits.widen_rows, (ops.quantize(x), ops.silu_mul_quantize(gate_up), made))]

    def multiply(kernels: Kernels) -> torch.Tensor:
        return kernels.ops.linear(Fp8Rows(eight_bits.quantize(x), kit.dtype), weight)

    yield Case(f"quantize{name}", quantize, 2e-2)
    yield Case(f"eight-bit product{name}", multiply)


def sample(kit: Kit, name: str, num_rows: int, vocab_size: int) -> Iterator[Case]:
    """Yield sampling. Two of 256 rows may draw another token than the reference, because of near ties."""
    logits, device = kit.random(num_rows, vocab_size, scale=4.0), kit.device
    # Edited logits are in float32, in rows that begin at aligned addresses.
    edited_rows = kit.random(num_rows, -(-vocab_size // 256) * 256, scale=4.0, dtype=torch.float32)
    edited = edited_rows[:, :vocab_size]
    seeds = torch.arange(num_rows, device=device) * -(2**40) + 12345
    for filters, drawn, temperature, min_p, top_k, top_p in (
        ("greedy", logits, 0.0, 0.0, 0, 1.0),
        ("drawn", logits, 1.0, 0.0, 0, 1.0),
        ("top-k and top-p", edited, 0.8, 0.0, 50, 0.9),
        ("min-p", logits, 1.0, 0.05, 0, 1.0),
    ):
        floats = [torch.full((num_rows,), value, device=device) for value in (temperature, min_p, top_p)]
        top_ks = torch.full((num_rows,), top_k, dtype=torch.int32, device=device)
        arguments = drawn, *floats[:2], top_ks, floats[2], seeds, seeds.abs() % 1000

        def choose(kernels: Kernels, arguments: Any = arguments) -> torch.Tensor:
            return kernels.sampling.choose(*arguments)[0]

        yield Case(f"{name}choose, {filters}", choose, 0.1, drawn.nbytes, is_choice=True)
    changed_rows, slots = (torch.randperm(num_rows, device=device)[: num_rows // 2] for _ in range(2))
    counts = kit.integers(3, num_rows, vocab_size) + IN_PROMPT * kit.integers(2, num_rows, vocab_size)
    coefficients = kit.wide(len(slots), 3, scale=0.3).abs() + 0.1
    masks = torch.randint(-(2**31), 2**31, (len(slots), -(-vocab_size // 32)), device=device).int()

    def edit(kernels: Kernels) -> tuple[torch.Tensor, ...]:
        penalized, masked = edited_rows.clone()[:, :vocab_size], logits.clone()
        kernels.sampling.penalize(penalized, changed_rows, slots, counts, coefficients)
        kernels.sampling.mask(masked, changed_rows, masks)
        return penalized, masked.clamp(min=-1e4)  # two infinities have no difference

    yield Case(f"{name}penalize and mask", edit)


def inputs(kit: Kit, name: str, length: int) -> Iterator[Case]:
    """Yield the inputs of a step of requests of at most `length` tokens, the last of which is padding."""
    slots, width = 8, -(-length // kit.page)
    layout = StateLayout(length + 1, (slots + 1) * (length + 1), width, 0, slots * (length + 1), kit.page)
    layout = layout._replace(options_at=layout.blocks_at + slots * width)
    state = kit.integers(2**20, layout.options_at + slots * OPTIONS)
    counts, first = [1, 1, 3, 400, 1], [17, 600, 100, 200, 0]
    columns = [4, 0, 0, 0, *accumulate(counts, initial=0), 3, 0, 4, 1, 0, *first, 0, 601, 102, 390, 0]
    step = torch.tensor(columns, dtype=torch.int32, device=kit.device)
    runs = torch.tensor([10, 6, 300, 650, 306, 7, *range(307)], dtype=torch.int32, device=kit.device)

    def prepare(kernels: Kernels) -> list[torch.Tensor]:
        own = state.clone()
        kernels.inputs.apply_runs(runs, own, 0, 2, 300)
        return [own, *kernels.inputs.prepare(step, own, layout, len(counts), sum(counts), max(counts), width)]

    yield Case(name, prepare, 0.0)


def recurrent(
    kit: Kit,
    name: str,
    counts: list[int],
    sizes: tuple[int, int, int, int],
    erases: bool = True,
    is_padded: bool = False,
) -> Iterator[Case]:
    """Yield a recurrent layer over rows of so many tokens; one row is new, and one goes from its pages to others.
    `sizes`: key and value heads and their dimensions. `is_padded`: only the device knows the rows, as in a graph."""
    layer = Layer.random(sum(counts), sizes, kit.dtype, device=kit.device, erases=erases)
    states = States(layer, len(counts) + 1, kit.device)
    write = states.tables[:-1].clone()
    write[0] = states.tables[-1]
    batch = batch_of(counts, states.tables[:-1].contiguous(), write, new=(len(counts) - 1,))
    if is_padded:
        batch = as_in_a_graph(batch)

    def call(kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        own = states.copy()
        return layer.run(kernels.ops, own.pages, batch), own.pages.base.view(torch.float32).nan_to_num()

    yield Case(name, call, 3e-2 if kit.dtype is torch.bfloat16 else 2e-4)

"""Paged attention in Triton: how programs share its work, padding, and pages of eight bits. The short convolution, the gated
delta rule and Mamba 2: padding, precision, NaN, and tokens far apart."""

import mmap
from collections.abc import Iterator
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from benchmarks.gpu.batches import Rows, make_batch
from benchmarks.gpu.cases import Case, Kit, attention, latents

from penstock.executor.kernels import KeyStore, Ops, Rotation, ScoreExtras
from penstock.executor.kernels.cuda import expanded
from penstock.executor.kernels.cuda.attention_ops import num_splits
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.cuda.tile_order import take_tile
from tests.support.kernel_cases import TOLERANCE, check, triton_kernels
from tests.support.paged import Cache, random
from tests.support.recurrent import Layer, States, as_in_a_graph, batch_of
from tests.support.refusals import cases
from tests.support.twins import torch_ops


@pytest.mark.parametrize("ops", [OPS, InvariantOps(None)], ids=["default", "batch invariant"])
@pytest.mark.parametrize("window", [None, 2])
def test_rows_of_padding_get_zeros_and_read_nothing(device: torch.device, window: int | None, ops: Ops) -> None:
    cache = Cache([3, 0, 0], 1, 16, 4, torch.float32)  # whose block 0 is NaN
    rows = [(0, 1, 3), (1, 1, 0), (2, 1, 0)]
    moved = cache.to(device)
    q, pages = torch.ones(3, 2, 16, device=device), (moved.k_pages, moved.v_pages)
    out = ops.paged_attention(q, pages, moved.batch(rows), 0.5, ScoreExtras(window=window))
    assert out[0].isfinite().all() and out[0].all()
    assert not out[1:].any()


@pytest.mark.parametrize("is_latent", [pytest.param(False, marks=pytest.mark.slow_in_interpreter), True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow_in_interpreter), torch.bfloat16])
def test_a_padded_batch_gets_what_its_rows_get(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, is_latent: bool
) -> None:
    """The 50 tokens of padding get zeros."""
    monkeypatch.setattr("benchmarks.gpu.cases.make_batch", lambda *batch: as_in_a_graph(make_batch(*batch), 5))
    rows = [(1, 1), (1, 150), (1, 64), (5, 5), (70, 133), (50, 0), (0, 0), (0, 0)]
    kernels, kit = triton_kernels(device), Kit(device, dtype)
    if is_latent:
        check(kernels, kit, TOLERANCE, latents, rows, (4, 16, 64))
    else:
        for window in (None, 40):
            check(kernels, kit, TOLERANCE, attention, rows, (4, 2, 80), 0, window)


def random_rows(rng: Random, num_rows: int, longest: int) -> Rows:
    """Return mostly short rows, a few long ones anywhere, padding, and some rows with more tokens at the end."""
    contexts = [rng.choice((0, rng.randint(1, 70), rng.randint(1, 200))) for _ in range(num_rows)]
    contexts[rng.randrange(num_rows)] = rng.randint(1, longest)
    several = sorted((rng.randint(2, 50), rng.randint(0, 100)) for _ in range(rng.choice((0, 0, 2))))
    return [(1, context) for context in contexts] + [(count, before + count) for count, before in several]


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.slow_in_interpreter) for seed in (0, 1, *range(3, 10)))]
)
def test_whatever_the_batch_the_answer_is_the_twins(device: torch.device, seed: int) -> None:
    rng = Random(seed)
    dtype, page_dtype = rng.choice(
        [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)]
    )
    dim, group, kv_heads = rng.choice((64, 80, 128, 256)), rng.randint(1, 8), rng.randint(1, 2)
    window = rng.choice((None, None, 1, rng.randint(2, 300)))
    has_sinks, cap = rng.random() < 0.4, rng.choice((None, None, 1.0))
    rows = random_rows(rng, rng.randint(1, 9), 5000 if seed == 0 else 1000)

    def layers(*arguments: Any) -> Iterator[Case]:
        # The second layer of a step uses the order of tiles again, and arrival counters that are back at zero.
        (case,) = attention(*arguments)
        yield from (case, case)

    shape = rows, (group * kv_heads, kv_heads, dim), 0, window, cap, has_sinks, page_dtype
    check(triton_kernels(device), Kit(device, dtype), TOLERANCE, layers, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("is_latent", [False, True])
def test_the_bits_are_the_same_in_whatever_order_programs_run(monkeypatch: pytest.MonkeyPatch, is_latent: bool) -> None:
    contexts = [30, 500, 0]
    rows = [(row, 1, context) for row, context in enumerate(contexts)]
    cache = Cache(contexts, 1, 48, 16, torch.float32)
    q, batch = random(3, 20, 48, seed=2), cache.batch(rows)

    def attend_once() -> torch.Tensor:
        if is_latent:
            return OPS.latent_attention(q, cache.k_pages, batch, 0.2, 16)
        return OPS.paged_attention(q, (cache.k_pages, cache.v_pages), batch, 0.2)

    expected = attend_once()
    builder = triton.runtime.interpreter.interpreter_builder
    set_index = builder.set_grid_idx
    noting = Mock(side_effect=set_index)
    monkeypatch.setattr(builder, "set_grid_idx", noting)
    attend_once()
    grid = [call.args for call in noting.call_args_list]
    assert len({part for _, part, _ in grid}) > 2
    for seed in range(2):
        order = dict(zip(grid, Random(seed).sample(grid, len(grid)), strict=True))
        monkeypatch.setattr(builder, "set_grid_idx", lambda *index, order=order: set_index(*order[index]))
        assert torch.equal(attend_once(), expected)
    (arrivals,) = batch.memo.values()
    assert not arrivals.any()


@pytest.mark.parametrize(("rows", "longest", "even", "programs"), cases(__file__, "splits"))
def test_rows_are_split_so_that_they_occupy_the_gpu(rows: int, longest: int, even: int, programs: int) -> None:
    assert num_splits(rows, 8, longest, 0) == (even, programs)


@kernel
def _take(starts_ptr, out_ptr, first, num_rows, PER_TOKEN: tl.constexpr):  # type: ignore[no-untyped-def]
    number, tiles = tl.program_id(0), tl.num_programs(0)
    row, tile, _, count = take_tile(number, tiles, starts_ptr, first, num_rows, PER_TOKEN, 64)
    tl.store(out_ptr + number, tl.where(count > 0, 100 * row + tile, -1))


def test_tiles_of_the_last_row_and_last_tiles_of_a_row_begin_first(device: torch.device) -> None:
    counts = [1, 40, 41, 65, 90, 190]
    starts = torch.tensor([0, *counts]).cumsum(0).int().to(device)
    for first, end, per_token in ((1, 6, 1), (1, 6, 3), (2, 5, 8), (5, 6, 128), (6, 6, 1)):
        out = torch.zeros(sum(counts[first:end]) * per_token // 64 + 6, dtype=torch.int32, device=device)
        _take[(len(out),)](starts, out, first, end - first, PER_TOKEN=per_token)
        tiles = [(row, -(-counts[row] * per_token // 64)) for row in range(first, end)]
        expected = [100 * row + number for row, count in tiles for number in range(count)]
        assert [each for each in out.tolist() if each >= 0] == expected[::-1]


def test_pages_of_eight_bits_take_their_largest_number_for_more_and_keep_nan(device: torch.device) -> None:
    """Plain minima and maxima of a GPU drop NaN, which would become -448."""
    kv = torch.zeros(2, 2, 4, 32, device=device).to(torch.float8_e4m3fn)
    q, k, v = (random(2, 1, 32, dtype=torch.bfloat16, seed=seed).to(device) for seed in range(3))
    k[1, 0, 3], v[0, 0, 5], v[1, 0, 7] = torch.nan, torch.nan, 1000.0
    index, table = torch.arange(2, device=device), torch.ones(2, 16, device=device)
    OPS.rope_and_store(q, k, v, KeyStore(Rotation(table, table, index.int()), (kv[:, 0], kv[:, 1]), index))
    assert kv[0, 0, 1].float().isnan().nonzero().flatten().tolist() == [3, 19]  # both halves of the rotated pair
    assert kv[0, 1, 0].float().isnan().nonzero().flatten().tolist() == [5] and kv[0, 1, 1, 7].item() == 448


def test_pieces_are_of_bounded_size_and_leave_nothing_out() -> None:
    for arguments, expected in cases(__file__, "pieces of latents"):
        assert list(expanded.pieces(*arguments)) == expected


@pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])
def test_a_padded_batch_has_the_bits_of_its_rows(device: torch.device, erases: bool) -> None:
    """In a graph, only the device knows the rows: padding reads no state and writes to page 0."""
    counts, padding = [1, 3, 64, 65], [1, 69, 0]
    layer = Layer.random(133 + 70, (1, 2, 16, 16), torch.bfloat16, device=device, erases=erases)
    padded, plain = States(layer, 4, device), States(layer, 4, device)
    tables = F.pad(padded.tables, (0, 0, 0, 3))
    batch = as_in_a_graph(batch_of([*counts, *padding], tables, new=(0, 4, 5, 6)), 4)
    out = layer.run(OPS, padded.pages, batch)
    expected = layer.part(torch.arange(133)).run(OPS, plain.pages, batch_of(counts, plain.tables, new=(0,)))
    assert torch.equal(out[:133], expected) and out.isfinite().all()
    assert torch.equal(padded.pages.base[1:], plain.pages.base[1:])


def test_a_convolution_reads_tokens_more_than_two_billion_numbers_apart() -> None:
    """So are 174,763 tokens of Qwen3-Next. Here the stride is large, and memory between the tokens is never touched."""
    tokens, stride, before = 36, 1 << 26, 1 << 31  # an offset of 32 bits would be negative: it must not crash the test
    layer = Layer.random(tokens, (1, 1, 16, 16), torch.bfloat16)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which Python 3.11 has no name for
    memory = torch.frombuffer(mmap.mmap(-1, 2 * (before + tokens * stride), flags=flags), dtype=torch.bfloat16)
    apart = memory.as_strided(layer.inputs.qkv.shape, (stride, 1), before).copy_(layer.inputs.qkv)
    outputs, states = [], [States(layer, 1) for _ in range(2)]
    for qkv, own in zip((layer.inputs.qkv, apart), states, strict=True):
        batch = batch_of([tokens], own.tables)
        outputs.append(OPS.convolve(qkv, layer.weight, layer.bias, own.pages, batch, True))
    assert torch.equal(*outputs)
    assert torch.equal(*(own.pages.base for own in states))


def test_keys_that_are_all_alike_lose_no_precision(device: torch.device) -> None:
    """The triangular system is at its worst where every token overwrites what the one before it wrote. Queries lean to
    the one key: of those across it the norm would make float16's own rounding ten times as large."""
    layer = Layer.random(130, (1, 1, 16, 16), torch.float16, device=device)
    layer.weight[:] = 0
    layer.weight[-1] = 1
    layer.inputs.qkv[:, 16:32] = layer.inputs.qkv[:1, 16:32]
    layer.inputs.qkv[:, :16] += 3 * layer.inputs.qkv[:, 16:32]
    layer.inputs.gates[:] = torch.tensor([6.0, -20.0])
    states = States(layer, 1, device)
    expected_states = states.copy()
    batch = batch_of([130], states.tables, new=(0,))
    actual, expected = layer.run(OPS, states.pages, batch), layer.run(torch_ops, expected_states.pages, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1.5e-2 if device.type == "cpu" else 3e-2)


@pytest.mark.parametrize("counts", [[1], [70]])
@pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])
def test_a_gate_of_nan_makes_its_whole_head_nan(device: torch.device, counts: list[int], erases: bool) -> None:
    """`tl.minimum` drops a NaN unless it is asked not to: the softplus of NaN would be 20 on a GPU."""
    layer = Layer.random(sum(counts), (1, 2, 16, 16), torch.bfloat16, device=device, erases=erases)
    layer.inputs.gates[-1, -1] = float("nan")  # what softplus takes for the last token of the second head
    states = States(layer, 1, device)
    out = layer.run(OPS, states.pages, batch_of(counts, states.tables, new=(0,)))
    first, second = out[-1].chunk(2)
    assert first.isfinite().all() and second.isnan().all()

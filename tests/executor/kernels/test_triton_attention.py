"""Paged attention in Triton: how programs share its work, padding, and pages of eight bits."""

from dataclasses import replace
from random import Random
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import KeyStore, Ops, Rotation, ScoreExtras
from penstock.executor.kernels.cuda import expanded
from penstock.executor.kernels.cuda.attention_ops import num_splits
from penstock.executor.kernels.cuda.launch import kernel
from penstock.executor.kernels.cuda.ops import OPS, InvariantOps
from penstock.executor.kernels.cuda.tile_order import take_tile
from tests.support.kernel_cases import close
from tests.support.paged import Cache, attend, random
from tests.support.refusals import cases
from tests.support.twins import torch_ops


def test_a_sink_takes_its_share_when_a_row_is_cut_among_programs(device: torch.device) -> None:
    rows = [(0, 1, 1000), (1, 1, 40)]
    cache = Cache([1000, 40], 1, 64, 16, torch.float32)
    q, sinks = random(2, 1000, 2, 64, seed=5), torch.tensor([6.0, 9.0])
    expected = attend(torch_ops, cache, q, rows, None, ScoreExtras(None, sinks))
    close(attend(OPS, cache.to(device), q.to(device), rows, None, ScoreExtras(None, sinks.to(device))), expected)


@pytest.mark.parametrize("ops", [OPS, InvariantOps(None)], ids=["default", "batch invariant"])
@pytest.mark.parametrize("window", [None, 2])
def test_rows_that_only_pad_a_graph_get_zeros_and_read_nothing(
    device: torch.device, window: int | None, ops: Ops
) -> None:
    cache = Cache([3, 0, 0], 1, 16, 4, torch.float32)
    cache.tables[1:] = cache.tables.max() + 1  # a block of NaN
    rows = [(0, 1, 3), (1, 1, 0), (2, 1, 0)]
    moved = cache.to(device)
    q, pages = torch.ones(3, 2, 16, device=device), (moved.k_pages, moved.v_pages)
    out = ops.paged_attention(q, pages, moved.batch(rows), 0.5, ScoreExtras(window=window))
    assert out[0].isfinite().all() and out[0].all()
    assert not out[1:].any()


def padded(batch: ForwardBatch, tokens: int) -> ForwardBatch:
    """Return the batch as in a graph: only the device knows the rows, and three more have the remaining tokens."""
    rows, singles = len(batch.context_lens), batch.num_single_rows
    tables, contexts = F.pad(batch.block_tables, (0, 0, 0, 3)), F.pad(batch.context_lens, (0, 3))
    counts = torch.tensor([rows, singles, rows - singles, 0], dtype=torch.int32, device=contexts.device)
    return replace(
        batch,
        query_starts=F.pad(batch.query_starts, (0, 3), value=tokens),
        context_lens=contexts,
        block_tables=tables,
        num_single_rows=0,
        query_lens=(tokens, *(0,) * (rows + 2)),
        query_contexts=(150,) * (rows + 3),
        max_single_context=150,
        single_contexts=torch.where(torch.arange(rows + 3, device=contexts.device) < singles, contexts, 0),
        row_counts=counts,
        memo={},
    )


@pytest.mark.parametrize("is_latent", [pytest.param(False, marks=pytest.mark.slow_in_interpreter), True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow_in_interpreter), torch.bfloat16])
def test_a_padded_batch_gets_what_its_rows_get(device: torch.device, dtype: torch.dtype, is_latent: bool) -> None:
    """Only the device knows the rows, and three more rows have the remaining 50 tokens, which get zeros."""
    rows = [(0, 1, 1), (1, 1, 150), (2, 1, 64), (3, 5, 5), (4, 70, 133)]
    cache = Cache([context for _, _, context in rows], 1 if is_latent else 2, 80, 16, dtype).to(device)
    q = random(sum(count for _, count, _ in rows) + 50, 4, 80, dtype=dtype, seed=9).to(device)

    def attend_all(ops: Ops, q: torch.Tensor, batch: ForwardBatch, window: int | None) -> torch.Tensor:
        if is_latent:
            return ops.latent_attention(q, cache.k_pages, batch, 0.2, 16)
        return ops.paged_attention(q, (cache.k_pages, cache.v_pages), batch, 0.2, ScoreExtras(window=window))

    for window in (None,) if is_latent else (None, 40):
        expected = attend_all(OPS, q[:-50], cache.batch(rows), window)
        for ops in (OPS, torch_ops):
            out = attend_all(ops, q, padded(cache.batch(rows), len(q)), window)
            close(out[:-50], expected)
            assert not out[-50:].any()


def random_rows(rng: Random, num_rows: int, longest: int) -> list[tuple[int, int, int]]:
    """Mostly short rows, a few long ones anywhere, padding, and some rows with more tokens at the end."""
    contexts = [rng.choice((0, rng.randint(1, 70), rng.randint(1, 200))) for _ in range(num_rows)]
    contexts[rng.randrange(num_rows)] = rng.randint(1, longest)
    several = [(rng.randint(2, 50), rng.randint(0, 100)) for _ in range(rng.choice((0, 0, 2)))]
    rows = [(row, 1, context) for row, context in enumerate(contexts)]
    return rows + [(num_rows + row, count, before + count) for row, (count, before) in enumerate(sorted(several))]


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
    sinks = 3 * random(group * kv_heads, seed=seed) if rng.random() < 0.4 else None
    extras = ScoreExtras(rng.choice((None, None, 1.0)), sinks, window)
    rows = random_rows(rng, rng.randint(1, 9), 5000 if seed == 0 else 1000)
    cache = Cache([context for _, _, context in rows], kv_heads, dim, 16, dtype)
    if page_dtype is not None:
        cache.k_pages, cache.v_pages = cache.k_pages.to(page_dtype), cache.v_pages.to(page_dtype)
    q = random(sum(count for _, count, _ in rows), group * kv_heads, dim, dtype=dtype, seed=seed)
    wide = cache.k_pages.double(), cache.v_pages.double()
    expected = torch_ops.paged_attention(q.double(), wide, cache.batch(rows), dim**-0.5, extras)
    moved = cache.to(device)
    batch = moved.batch(rows)
    # The second layer of the same step uses the order of tiles again, and arrival counters that are back at zero.
    for _ in range(2):
        given = extras._replace(sinks=None if sinks is None else sinks.to(device))
        out = OPS.paged_attention(q.to(device), (moved.k_pages, moved.v_pages), batch, dim**-0.5, given)
        close(out, expected)


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


def test_eight_bit_pages_are_written_and_read(device: torch.device) -> None:
    dim, heads, page, tokens = 32, 2, 4, 6
    index, angles = torch.arange(tokens), random(8, dim // 2)
    given = [random(tokens, heads, dim, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    given[1][0, 0, 0] = 1000.0  # beyond what eight bits hold
    pages, answers = [], []
    for kernels, where in ((OPS, device), (torch_ops, torch.device("cpu"))):
        cache = Cache([tokens], heads, dim, page, torch.bfloat16).to(where)
        kv = torch.zeros(4, 2, page, heads * dim, device=where).to(torch.float8_e4m3fn)
        cache.k_pages, cache.v_pages = kv[:, 0], kv[:, 1]
        slots = cache.tables[0, index // page].long() * page + (index % page).to(where)
        rotation = Rotation(angles.cos().to(where), angles.sin().to(where), index.int().to(where))
        q, k, v = (tensor.to(where) for tensor in given)
        rotated = kernels.rope_and_store(q, k, v, KeyStore(rotation, (cache.k_pages, cache.v_pages), slots))
        pages.append(kv.float().cpu())
        answers.append(attend(kernels, cache, rotated[None], [(0, tokens, tokens)]))
        close(attend(kernels, cache, rotated[None], [(0, 1, tokens)]), answers[-1][-1:])
    assert pages[0].isfinite().all() and pages[0].abs().max() == 448
    assert torch.equal(*pages)
    close(answers[0], answers[1])


def test_a_nan_stays_one_in_pages_of_eight_bits(device: torch.device) -> None:
    """Plain minima and maxima of a GPU drop NaN, which would become -448."""
    kv = torch.zeros(2, 2, 4, 32, device=device).to(torch.float8_e4m3fn)
    q, k, v = (random(2, 1, 32, dtype=torch.bfloat16, seed=seed).to(device) for seed in range(3))
    k[1, 0, 3], v[0, 0, 5] = torch.nan, torch.nan
    index, table = torch.arange(2, device=device), torch.ones(2, 16, device=device)
    OPS.rope_and_store(q, k, v, KeyStore(Rotation(table, table, index.int()), (kv[:, 0], kv[:, 1]), index))
    assert kv[0, 0, 1].float().isnan().nonzero().flatten().tolist() == [3, 19]  # both halves of the rotated pair
    assert kv[0, 1, 0].float().isnan().nonzero().flatten().tolist() == [5]


# heads, rope, nope, value, rank; the rows of EXPANDED are 1 token, 2 and 5 that stay absorbed, then chunks
SIZES = [(3, 16, 32, 16, 64), (2, 8, 16, 20, 24)]
EXPANDED = [(0, 1, 7), (1, 2, 9), (2, 5, 5), (3, 40, 40), (4, 41, 133), (5, 130, 130)]
every_size = pytest.mark.parametrize("sizes", SIZES, ids=["powers of two", "others"])


def expanded_case(
    dtype: torch.dtype, sizes: tuple[int, int, int, int, int]
) -> tuple[Cache, torch.Tensor, torch.Tensor]:
    heads, rope, nope, value, rank = sizes
    cache = Cache([context for _, _, context in EXPANDED], 1, rope + rank, 16, dtype)
    q = random(sum(count for _, count, _ in EXPANDED[3:]), heads, rope + nope, dtype=dtype, seed=9)
    return cache, q, random(heads, nope + value, rank, dtype=dtype, seed=3) * rank**-0.5


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize(("sizes", "limit"), [(SIZES[0], 13000), (SIZES[1], 1)], ids=["two heads", "one"])
def test_expanding_in_pieces_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, sizes: tuple[int, int, int, int, int], limit: int
) -> None:
    made, q, expand = expanded_case(torch.float32, sizes)
    cache = made.to(device)
    arguments = q[:81].to(device), cache.k_pages, expand.to(device), cache.batch(EXPANDED[:5]), 3, 0.2, sizes[1]
    whole = OPS.expanded_attention(*arguments)
    monkeypatch.setattr(expanded, "PIECE_ELEMENTS", limit)
    close(OPS.expanded_attention(*arguments), whole)


def test_pieces_are_of_bounded_size_and_leave_nothing_out() -> None:
    assert list(expanded.pieces([10, 20, 30, 100, 5], 4, 8, 2000)) == [
        (0, 3, 0, 4, 60),
        (3, 4, 0, 2, 100),
        (3, 4, 2, 4, 100),
        (4, 5, 0, 4, 5),
    ]
    assert list(expanded.pieces([10, 10], 2, 8, 1)) == [
        (row, row + 1, head, head + 1, 10) for row in (0, 1) for head in (0, 1)
    ]

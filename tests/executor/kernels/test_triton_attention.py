"""Paged attention in Triton against its twin in float64, from the very same values."""

import copy
import functools

import pytest
import torch

from penstock.executor.kernels import torch_ops
from penstock.executor.kernels.cuda import attention, expanded, tiles
from penstock.executor.kernels.cuda.ops import OPS
from tests.executor.kernels.cases import close, every_dtype
from tests.executor.paged import Cache, attend, random

# (row of the cache, queries, context). Rows 0 … 3 have one token; 70 queries of 3 heads fill more than one tile.
ROWS = [(0, 1, 1), (1, 1, 150), (2, 1, 64), (3, 1, 65), (4, 5, 5), (5, 70, 133), (6, 2, 130)]
# head dimension, query heads, key-value heads, page
SHAPES = [(64, 3, 1, 16), (16, 4, 2, 4), (80, 2, 2, 16)]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "dim{}-{}q{}kv-page{}".format(*shape))


@functools.cache
def case(dtype: torch.dtype, shape: tuple[int, int, int, int]) -> tuple[Cache, torch.Tensor]:
    dim, q_heads, kv_heads, page = shape
    contexts = [context for _, _, context in ROWS]
    return Cache(contexts, kv_heads, dim, page, dtype), random(len(ROWS), 150, q_heads, dim, dtype=dtype, seed=9)


@functools.cache
def twins_answer(dtype: torch.dtype, shape: tuple[int, int, int, int], window: int | None) -> torch.Tensor:
    cache, q = case(dtype, shape)
    wide = copy.copy(cache)
    wide.k_pages, wide.v_pages = cache.k_pages.double(), cache.v_pages.double()
    return attend(torch_ops.OPS, wide, q.double(), ROWS, window)


@every_dtype
@shapes
def test_attention_equals_the_twin(device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> None:
    cache, q = case(dtype, shape)
    close(attend(OPS, cache.to(device), q.to(device), ROWS), twins_answer(dtype, shape, None))


@pytest.mark.parametrize("window", [1, 40, 64])
def test_a_window_hides_what_lies_before_it(device: torch.device, window: int) -> None:
    cache, q = case(torch.float32, SHAPES[0])
    actual = attend(OPS, cache.to(device), q.to(device), ROWS, window)
    close(actual, twins_answer(torch.float32, SHAPES[0], window))


def test_a_batch_of_prefills_alone_and_one_of_decodes_alone(device: torch.device) -> None:
    cache, q = case(torch.float32, SHAPES[0])
    expected = twins_answer(torch.float32, SHAPES[0], None)
    close(attend(OPS, cache.to(device), q.to(device), ROWS[4:]), expected[4:])
    close(attend(OPS, cache.to(device), q.to(device), ROWS[:4]), expected[:4])


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_however_a_context_is_cut_the_answer_is_the_same(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, splits: int
) -> None:
    monkeypatch.setattr(attention, "choose_splits", lambda *_: splits)
    cache, q = case(torch.float32, SHAPES[1])
    for window in (None, 40):
        actual = attend(OPS, cache.to(device), q.to(device), ROWS[:4], window)
        close(actual, twins_answer(torch.float32, SHAPES[1], window)[:4])


@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_only_pad_a_graph_get_zeros_and_read_nothing(device: torch.device, splits: int) -> None:
    dim, page = 16, 4
    q = torch.ones(2, 2, dim, device=device)
    pages = torch.full((3, page, dim), float("nan"), device=device)
    pages[1] = 1.0
    tables = torch.tensor([[1], [2]], dtype=torch.int32, device=device)
    contexts = torch.tensor([3, 0], dtype=torch.int32, device=device)
    out = torch.full_like(q, float("nan"))
    attention.decode(q, pages, pages, contexts, tables, splits * tiles.MIN_SPLIT, 0.5, None, out)
    assert torch.equal(out[0], torch.ones_like(out[0]))
    assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_eight_bit_pages_are_written_and_read(device: torch.device) -> None:
    dim, heads, page, tokens = 32, 2, 4, 6
    index, angles = torch.arange(tokens), random(8, dim // 2)
    given = [random(tokens, heads, dim, dtype=torch.bfloat16, seed=seed) for seed in range(3)]
    given[1][0, 0, 0] = 1000.0  # beyond what eight bits hold
    pages, answers = [], []
    for kernels, where in ((OPS, device), (torch_ops.OPS, torch.device("cpu"))):
        cache = Cache([tokens], heads, dim, page, torch.bfloat16).to(where)
        kv = torch.zeros(4, 2, page, heads * dim, device=where).to(torch.float8_e4m3fn)
        cache.k_pages, cache.v_pages = kv[:, 0], kv[:, 1]
        slots = cache.tables[0, index // page].long() * page + (index % page).to(where)
        tables = [angles.cos().to(where), angles.sin().to(where), index.int().to(where)]
        q, k, v = (tensor.to(where) for tensor in given)
        rotated = kernels.rope_and_store(q, k, v, *tables, cache.k_pages, cache.v_pages, slots)
        pages.append(kv.float().cpu())
        answers.append(attend(kernels, cache, rotated[None], [(0, tokens, tokens)]))
        close(attend(kernels, cache, rotated[None], [(0, 1, tokens)]), answers[-1][-1:])
    assert pages[0].isfinite().all() and pages[0].abs().max() == 448
    assert torch.equal(*pages)
    close(*answers)


@every_dtype
@pytest.mark.parametrize(("heads", "rope", "rank"), [(4, 16, 64), (20, 8, 48)])
def test_latent_attention_equals_the_twin(
    device: torch.device, dtype: torch.dtype, heads: int, rope: int, rank: int
) -> None:
    rows = [(0, 1, 1), (1, 1, 150), (2, 1, 64), (3, 5, 5), (4, 7, 70)]
    cache = Cache([context for _, _, context in rows], 1, rope + rank, 16, dtype)
    q = random(sum(count for _, count, _ in rows), heads, rope + rank, dtype=dtype, seed=9)
    expected = torch_ops.latent_attention(q.double(), cache.k_pages.double(), cache.batch(rows), 0.2, rope)
    moved = cache.to(device)
    close(OPS.latent_attention(q.to(device), moved.k_pages, moved.batch(rows), 0.2, rope), expected)


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


@every_dtype
@every_size
def test_expanded_attention_equals_the_twin(
    device: torch.device, dtype: torch.dtype, sizes: tuple[int, int, int, int, int]
) -> None:
    cache, q, expand = expanded_case(dtype, sizes)
    latents, batch = cache.k_pages.double(), cache.batch(EXPANDED)
    expected = torch_ops.expanded_attention(q.double(), latents, expand.double(), batch, 3, 0.2, sizes[1])
    moved = cache.to(device)
    arguments = q.to(device), moved.k_pages, expand.to(device), moved.batch(EXPANDED), 3, 0.2, sizes[1]
    close(OPS.expanded_attention(*arguments), expected)


@pytest.mark.parametrize(("sizes", "limit"), [(SIZES[0], 13000), (SIZES[1], 1)], ids=["two heads", "one"])
def test_expanding_in_pieces_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, sizes: tuple[int, int, int, int, int], limit: int
) -> None:
    cache, q, expand = (thing.to(device) for thing in expanded_case(torch.float32, sizes))
    arguments = q[:81], cache.k_pages, expand, cache.batch(EXPANDED[:5]), 3, 0.2, sizes[1]
    whole = OPS.expanded_attention(*arguments)
    monkeypatch.setattr(expanded, "PIECE_ELEMENTS", limit)
    close(OPS.expanded_attention(*arguments), whole)


@every_size
@pytest.mark.parametrize("limit", [1, torch_ops.GATHER_ELEMENTS])
def test_the_twin_computes_what_the_absorbed_one_does(
    monkeypatch: pytest.MonkeyPatch, limit: int, sizes: tuple[int, int, int, int, int]
) -> None:
    monkeypatch.setattr(torch_ops, "GATHER_ELEMENTS", limit)
    rope, nope = sizes[1:3]
    cache, q, expand = expanded_case(torch.float64, sizes)
    rows = EXPANDED[3:]
    absorbed = torch.cat((q[..., :rope], torch.einsum("thn,hnr->thr", q[..., rope:], expand[:, :nope])), dim=-1)
    attended = torch_ops.latent_attention(absorbed, cache.k_pages, cache.batch(rows), 0.2, rope)
    expected = torch.einsum("thr,hvr->thv", attended, expand[:, nope:])
    actual = torch_ops.expanded_attention(q, cache.k_pages, expand, cache.batch(rows), 0, 0.2, rope)
    torch.testing.assert_close(actual, expected)


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


def test_splits_fill_the_gpu_and_never_become_tiny() -> None:
    assert tiles.choose_splits(8, 1024) == 8  # one row of a 1024-token context: parts of 128 positions
    assert tiles.choose_splits(8, 2**17) == 64
    assert tiles.choose_splits(256 * 8, 4096) == 1
    assert tiles.choose_splits(8, 1) == 1

"""`batch_invariant`: what a row gets is bit for bit the same alone, in any batch, at any place of it and in any chunk.

The interpreter shows the order of sums: which pieces of the depth or of the positions are summed together, and in which
order these are added. Its products of a tile are made exact, since numpy's own depend on the tile's size; a GPU's do not
where its instruction is the same, which test_triton_compiled.py reads in the compiled code.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu.cases import Kit, blocks, packed, plain
from triton.runtime import interpreter

from penstock.executor.kernels import NO_EXTRAS, ScoreExtras
from penstock.executor.kernels.cuda import attention_ops, linear_products, tiles
from penstock.executor.kernels.cuda import rows as row_kernels
from penstock.executor.kernels.cuda.ops import InvariantOps
from penstock.executor.kernels.linear import Linear
from penstock.executor.kernels.weight import plain_weight
from penstock.executor.protocol import Sampling
from tests.support import interpreter as interpreted
from tests.support.checkpoints import compute_with, executor_of
from tests.support.driver import Driver
from tests.support.kernel_cases import close
from tests.support.paged import Cache, attend, random
from tests.support.recurrent import Layer, States, batch_of
from tests.support.refusals import cases
from tests.support.twins import torch_ops

OPS = InvariantOps(row_kernels)
Rows = list[tuple[int, int, int]]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply numbers of 16 bits and fewer in float64, where no product of a tile is rounded before it is added."""

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *options: Any) -> Any:
        left, right = (interpreted.widened(each).data.astype(np.float64) for each in (a, b))
        return interpreter.TensorHandle(np.matmul(left, right).astype(np.float32) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def alike(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return what all rows get together, after a check that rows get the same in batches of these sizes, anywhere."""
    whole = call(x)
    for size in sizes:
        for first in (1, len(x) - size):
            assert torch.equal(call(x[first : first + size].clone()), whole[first : first + size]), (size, first)
    turned = torch.arange(len(x) - 1, -1, -1, device=x.device)
    assert torch.equal(call(x[turned]), whole[turned])
    return whole


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that an interpreter can do fall into as many parts as those of models do."""
    monkeypatch.setattr(tiles, "FIXED_PROGRAMS", 4)
    monkeypatch.setattr(linear_products, "FIXED_PROGRAMS", 4)
    monkeypatch.setattr(tiles, "MIN_DEPTH", 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("shape", [(72, 300), pytest.param((136, 256), marks=pytest.mark.slow_in_interpreter)])
@pytest.mark.usefixtures("small_parts")
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """With few rows each part of the depth has a program; with 140 rows one program has all parts."""
    (width, depth), rows = shape, 40 if dtype is torch.float32 else 140
    x, weight = random(rows, depth, dtype=dtype).to(device), random(width, depth, dtype=dtype, seed=1).to(device)
    weight /= depth**0.5
    bias = random(width, dtype=dtype, seed=2).to(device)
    whole = alike(lambda some: OPS.linear(some, plain_weight(weight), bias), x, (1, rows // 2 - 6, rows // 2 - 5))
    close(whole, F.linear(x.double(), weight.double(), bias.double()), dtype)


def test_a_products_parts_depend_on_its_shape_alone() -> None:
    shapes = [(4096, 1024), (1024, 2048), (6144, 4096), (28672, 4096), (4096, 14336), (151936, 1024), (128, 2048)]
    for width, depth in shapes:
        for itemsize in (2, 4):
            made = {tiles.fixed_tile(rows, width, depth, itemsize) for rows in range(1, 600)}
            assert len({splits for _, splits in made}) == 1
            assert len({tile.columns for tile, _ in made}) == 1
    assert tiles.fixed_tile(1, 4096, 14336, 2)[1] > 1 == tiles.fixed_tile(1, 28672, 4096, 2)[1]


NAMES = {"torch": torch, "NO_EXTRAS": NO_EXTRAS, "ScoreExtras": ScoreExtras}
CASES = {name: case for name, *case in cases(__file__, "fixed attention", **NAMES)}
IN_FLOAT32 = [(name, torch.float32) for name in CASES if name != "pages of eight bits"]


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in CASES), *IN_FLOAT32], ids=str)
def test_a_token_attends_with_the_same_bits_in_any_batch_and_chunk(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype, name: str
) -> None:
    """A token gets the same as a row of its own, in chunks cut anywhere, behind others and beside a graph's padding."""
    monkeypatch.setattr(attention_ops, "FIXED_SPLIT", 64)
    dim, heads, kv_heads, window, extras, pages = CASES[name]
    contexts = [140, 90, 70]
    cache = Cache(contexts, kv_heads, dim, 16, pages or dtype)
    q = random(len(contexts), max(contexts), heads, dim, dtype=dtype, seed=9)
    extras = extras._replace(sinks=None if extras.sinks is None else extras.sinks.to(device))
    run = partial(attend, OPS, cache.to(device), q.to(device), window=window, extras=extras)
    whole = run([(0, 140, 140)])
    wide = Cache(contexts, kv_heads, dim, 16, dtype)
    wide.k_pages, wide.v_pages = cache.k_pages.double(), cache.v_pages.double()
    sinks = None if extras.sinks is None else extras.sinks.double().cpu()
    twin = attend(torch_ops, wide, q.double(), [(0, 140, 140)], window, extras._replace(sinks=sinks))
    close(whole, twin, dtype)

    def check(rows: Rows) -> None:
        found, first = run(rows), 0
        for row, count, context in rows:
            if row == 0:
                assert torch.equal(found[first : first + count], whole[context - count : context]), (rows, count)
            first += count

    check([(0, 1, context) for context in (1, 64, 65, 128, 129, 140)])
    check([(1, 1, 90), (0, 1, 140), (2, 1, 70)])
    check([(2, 1, 1), (0, 1, 129), (1, 40, 90)])
    for chunk, end in ((2, 140), (7, 70), (43, 129), (64, 128)):
        check([(1, 1, 77), (0, chunk, end), (2, 20, 70)])


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_experts_give_a_token_the_same_bits_in_any_batch(device: torch.device, dtype: torch.dtype) -> None:
    """From fewer entries than an expert has rows in its smallest tile to more than in its largest."""
    kit = Kit(device, dtype)
    hidden, gate_up, down = kit.random(150, 64), plain(kit, 2, 128, 64), plain(kit, 2, 64, 64)
    shares = torch.rand(150, 2, device=device)
    slots = shares.argsort()

    def run(rows: torch.Tensor) -> torch.Tensor:
        at = rows[:, 0].long()
        return OPS.fused_experts(hidden[at], slots[at], shares[at], gate_up, down, 0, "silu")

    alike(run, torch.arange(150, device=device)[:, None], (1, 2, 20, 70))


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize("fields", [*cases(__file__, "fixed products with codes", torch=torch), None])
def test_products_with_codes_and_of_eight_bits_have_the_same_bits_in_any_batch(
    device: torch.device, fields: dict[str, Any] | None
) -> None:
    x = random(150, 384, dtype=torch.bfloat16).to(device)
    if fields is not None:
        weight = packed(Kit(device, torch.bfloat16), 72, 384, **fields)
        alike(lambda rows: OPS.linear(rows, weight), x, (1, 17, 65))
        return
    alike(Linear([blocks(Kit(device, torch.float32), 200, 384)], None, OPS), x, (1, 17, 65))


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize("erases", [True, False], ids=["delta", "mamba"])
def test_a_recurrent_layer_has_the_same_bits_in_any_chunks(device: torch.device, erases: bool) -> None:
    layer = Layer.random(70, (1, 2, 16, 16), torch.bfloat16, device=device, erases=erases)
    found = []
    for cuts in ([70], [1, 69], [33, 37], [64, 5, 1]):
        states, parts, first = States(layer, 1, device), [], 0
        for count in cuts:
            part = layer.part(torch.arange(first, first + count, device=device))
            parts.append(part.run(OPS, states.pages, batch_of([count], states.tables, new=(0,) if not first else ())))
            first += count
        found.append(torch.cat(parts))
    assert all(torch.equal(found[0], each) for each in found)


@pytest.mark.slow_in_interpreter
@pytest.mark.parametrize(("case", "pages"), [("qwen3", "auto"), ("qwen3", "fp8"), ("gpt-oss", "auto")])
def test_a_request_has_the_same_bits_alone_in_chunks_and_after_a_preemption(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, case: str, pages: str
) -> None:
    """Log-probabilities of the whole vocabulary: alone, in chunks beside others, and after a preemption."""
    compute_with(monkeypatch, OPS)
    options: dict[str, Any] = {"kv_cache_bytes": 2**18, "block_size": 4, "max_num_seqs": 4, "batch_invariant": True}
    options["kv_cache_dtype"] = pages
    prompt, sampling = [5, 17, 3, 99, 42, 8, 71, 150, 12, 60, 7], Sampling(temperature=0.0, logprobs=-1)
    traces = []
    for chunk, others in ((None, 0), (4, 2), (1, 1)):
        driver = Driver(executor_of(case, device=device.type, dtype="bfloat16", **options))
        beside = [driver.admit([7 + other, 7, 21]) for other in range(others)]
        watched = driver.admit(prompt, sampling)
        seen = driver.trace(watched, *beside, count=2, chunk=chunk)
        if others == 2:
            driver.readmit(watched)
        traces.append(seen + driver.trace(watched, *beside, count=3, chunk=chunk))
    assert traces[0] == traces[1] == traces[2]

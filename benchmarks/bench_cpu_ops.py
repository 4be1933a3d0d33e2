"""The products of the C kernels for the CPU: beside oneDNN's prepacked ones; experts of a layer in one call beside one
after the other.

    python benchmarks/bench_cpu_ops.py [--dtype bfloat16] [--threads 2] [--pairs 11] [--only experts]

The sizes are those of SmolLM2-135M, the default model. Every case goes round over as many copies of its weights as
do not fit in the caches, as the layers of a model do, and the two sides alternate. Above 1 ours is faster.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from pairs import compare, main, rounds
from torch import Tensor

from penstock.executor.kernels import cpu_ops
from penstock.executor.kernels.cpu_linear import CpuLinear

HIDDEN, INNER, VOCABULARY, Q_HEADS, KV_HEADS, DIM = 576, 1536, 49152, 9, 3, 64
EXPERT = 384  # columns of an expert in the cases with experts
CACHE_BYTES = 96 * 2**20  # three times the largest cache of the machine the figures in the docs are from

Run = Callable[[int], object]  # given the index of the copy


class Case(NamedTuple):
    name: str
    num_copies: int
    ours: Run
    theirs: Run


def linear_cases(dtype: torch.dtype, num_threads: int) -> Iterator[Case]:
    reorder, run = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default
    merged = (Q_HEADS + 2 * KV_HEADS) * DIM
    widths = ((HIDDEN, merged), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN), (HIDDEN, VOCABULARY))
    for depth, width in widths:
        num_copies = max(2, CACHE_BYTES // (depth * width * dtype.itemsize))
        weights = [torch.randn(width, depth).to(dtype) for _ in range(num_copies)]
        ours = [CpuLinear(weight, None, num_threads) for weight in weights]
        packed = [reorder(weight, 8) for weight in weights]
        for rows in (1, 16, 512) if width < VOCABULARY else (1, 16):
            x = torch.randn(rows, depth).to(dtype)

            def by_ours(copy: int, x: Tensor = x, ours: list[CpuLinear] = ours) -> object:
                return ours[copy](x)

            def by_onednn(copy: int, x: Tensor = x, packed: list[Tensor] = packed) -> object:
                return run(x, packed[copy], None, "none", [], "")

            yield Case(
                f"linear {depth} to {width}, {rows}, by oneDNN",
                num_copies if rows < 512 else 2,
                by_ours,
                by_onednn,
            )


def expert_cases(dtype: torch.dtype, num_threads: int) -> Iterator[Case]:
    """The first product of a sparse layer, 8 of 64 experts a token: all of them in one call, and one by one."""
    linears = [CpuLinear(torch.randn(2 * EXPERT, HIDDEN).to(dtype), None, num_threads) for _ in range(64)]
    for tokens in (1, 8, 32):
        ids = torch.stack([torch.randperm(64)[:8] for _ in range(tokens)]).flatten()
        chosen, counts = (found.tolist() for found in ids.unique(return_counts=True))
        asked, x = [linears[expert] for expert in chosen], torch.randn(8 * tokens, HIDDEN).to(dtype)

        def together(_: int, asked: Any = asked, counts: Any = counts, x: Tensor = x) -> object:
            return CpuLinear.each(asked, counts, x)

        def one_by_one(_: int, asked: Any = asked, counts: Any = counts, x: Tensor = x) -> object:
            return torch.cat([linear(part) for linear, part in zip(asked, x.split(counts), strict=True)])

        yield Case(f"experts {HIDDEN} to {2 * EXPERT}, {tokens}, one by one", 5, together, one_by_one)


def microseconds(run: Run, num_copies: int) -> float:
    """The median over the copies of one round: a stalled call says nothing about the kernel."""
    times = []
    for copy in range(num_copies):
        start = time.perf_counter()
        run(copy)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def products(
    dtype: str = "bfloat16", threads: int = torch.get_num_threads(), pairs: int = 11, only: str = ""
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    given = getattr(torch, dtype), threads
    results = {}
    for kind, cases in {"linear": linear_cases, "experts": expert_cases}.items():
        for case in cases(*given) if only in kind else ():
            both = {"ours": case.ours, "theirs": case.theirs}
            sides = {name: partial(microseconds, run, case.num_copies) for name, run in both.items()}
            rounds(sides, 1)
            results[case.name] = compare(case.name, sides, pairs, "µs")
    return {"dtype": dtype, "threads": threads, "level": cpu_ops.levels()[-1], "cases": results}


if __name__ == "__main__":
    main(__doc__, "cpu-ops", products)

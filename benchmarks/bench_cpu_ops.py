"""The C kernels for the CPU against their plain-torch twins, torch's attention, and oneDNN's prepacked product.

The sizes are those of SmolLM2-135M, the default model. Every case goes round over as many copies of its weights or
pages as do not fit in the caches, as the layers of a model do, and the two sides alternate. Prints a table with
microseconds a call and the ratio (above 1: ours is faster), and one line of JSON.

    python benchmarks/bench_cpu_ops.py [--dtype bfloat16] [--threads 2] [--pairs 11] [--only attention]
"""

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from pairs import alternate, judge, record

from penstock.executor.batch import ForwardBatch
from penstock.executor.kernels import NO_NORMS, Ops, Rotation, cpu_ops, torch_ops
from penstock.executor.kernels.cpu_linear import CpuLinear

HIDDEN, INNER, VOCABULARY, Q_HEADS, KV_HEADS, DIM, PAGE = 576, 1536, 49152, 9, 3, 64, 16
EXPERT = 384  # columns of an expert in the cases with experts
CACHE_BYTES = 96 * 2**20  # three times the largest cache of the machine the figures in the docs are from
EPS, SCALE = 1e-5, DIM**-0.5

Run = Callable[[int], object]  # given the index of the copy


class Case(NamedTuple):
    name: str
    num_copies: int
    ours: Run
    theirs: dict[str, Run]


def row_cases(ours: Ops, twin: Ops, dtype: torch.dtype) -> Iterator[Case]:
    for rows in (1, 16, 512):
        x, residual = torch.randn(rows, HIDDEN, dtype=dtype), torch.randn(rows, HIDDEN, dtype=dtype)
        gate_up, weight = torch.randn(rows, 2 * INNER, dtype=dtype), torch.ones(HIDDEN)
        merged = torch.randn(rows, (Q_HEADS + 2 * KV_HEADS) * DIM, dtype=dtype).unflatten(1, (-1, DIM))
        q, k, v = merged.split((Q_HEADS, KV_HEADS, KV_HEADS), dim=1)
        angles, positions, slots = (
            torch.randn(2048, DIM // 2),
            torch.arange(rows, dtype=torch.int32),
            torch.arange(rows),
        )
        kv = torch.zeros(rows // PAGE + 1, 2, PAGE, KV_HEADS * DIM, dtype=dtype)
        given = q, k, v, Rotation(angles, angles, positions), (kv[:, 0], kv[:, 1]), slots, NO_NORMS
        calls: dict[str, Callable[[Ops], object]] = {
            "rms_norm": lambda ops, x=x, w=weight: ops.rms_norm(x, w, EPS),
            "add_rms_norm": lambda ops, x=x, r=residual, w=weight: ops.add_rms_norm(x, r, w, EPS),
            "silu_mul": lambda ops, x=gate_up: ops.gate(x, "silu"),
            "rope_and_store": lambda ops, a=given: ops.rope_and_store(*a),
        }
        for name, call in calls.items():
            yield Case(f"{name} {rows}", 20, lambda _, c=call: c(ours), {"twin": lambda _, c=call: c(twin)})


def attention_cases(ours: Ops, twin: Ops, dtype: torch.dtype) -> Iterator[Case]:
    """(queries, context) of every row; `sdpa` gets its keys and values for nothing: gathered, heads first."""
    for name, rows in {
        "decode at 128": [(1, 128)],
        "decode at 1024": [(1, 1024)],
        "decode at 8192": [(1, 8192)],
        "16 decode at 512": [(1, 512)] * 16,
        "prefill 512": [(512, 512)],
        "prefill 512 of 2048": [(512, 2048)],
    }.items():
        batch = flat_batch(rows)
        num_pages = int(batch.block_tables.max()) + 1
        copy_bytes = num_pages * 2 * PAGE * KV_HEADS * DIM * dtype.itemsize
        num_copies = max(1, CACHE_BYTES // copy_bytes) if batch.num_single_rows else 4
        kv = torch.randn(num_pages, num_copies, 2, PAGE, KV_HEADS * DIM).to(dtype)
        q = torch.randn(sum(count for count, _ in rows), Q_HEADS, DIM).to(dtype)

        def attend(ops: Ops, copy: int, q=q, kv=kv, batch=batch) -> object:
            return ops.paged_attention(q, kv[:, copy, 0], kv[:, copy, 1], batch, SCALE)

        theirs: dict[str, Run] = {
            "twin": lambda copy, f=attend: f(twin, copy),
            "sdpa": gathered_sdpa(rows, num_copies, dtype),
        }
        yield Case(f"attention, {name}", num_copies, lambda copy, f=attend: f(ours, copy), theirs)


def gathered_sdpa(rows: list[tuple[int, int]], num_copies: int, dtype: torch.dtype) -> Run:
    """All rows at once, the head group folded into the queries, which is torch's fastest form of GQA here."""
    count, context = rows[0]
    group = Q_HEADS // KV_HEADS
    q = torch.randn(len(rows), KV_HEADS, group * count, DIM).to(dtype)
    kv = torch.randn(num_copies, 2, len(rows), KV_HEADS, context, DIM).to(dtype)
    mask = None
    if count > 1:
        mask = (torch.arange(context) <= torch.arange(context - count, context)[:, None]).repeat(group, 1)
    return lambda copy: F.scaled_dot_product_attention(q, kv[copy, 0], kv[copy, 1], attn_mask=mask, scale=SCALE)


def flat_batch(rows: list[tuple[int, int]]) -> ForwardBatch:
    lens, contexts = [count for count, _ in rows], [context for _, context in rows]
    singles = len(rows) if lens[0] == 1 else 0
    blocks = torch.randperm(sum(-(-context // PAGE) for context in contexts), dtype=torch.int32)
    unused = torch.empty(0)
    return ForwardBatch(
        tokens=unused,
        positions=unused,
        kv_slots=unused,
        query_starts=torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=blocks.view(len(rows), -1),
        wanted=None,
        num_single_rows=singles,
        query_lens=tuple(lens[singles:]),
        query_contexts=tuple(contexts[singles:]),
        max_context_len=max(contexts),
        max_single_context=max(contexts[:singles], default=0),
    )


def linear_cases(dtype: torch.dtype, num_threads: int) -> Iterator[Case]:
    reorder, run = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise.default
    merged = (Q_HEADS + 2 * KV_HEADS) * DIM
    for depth, width in (
        (HIDDEN, merged),
        (HIDDEN, HIDDEN),
        (HIDDEN, 2 * INNER),
        (INNER, HIDDEN),
        (HIDDEN, VOCABULARY),
    ):
        num_copies = max(2, CACHE_BYTES // (depth * width * dtype.itemsize))
        weights = [torch.randn(width, depth).to(dtype) for _ in range(num_copies)]
        ours = [CpuLinear(weight, None, num_threads) for weight in weights]
        packed = [reorder(weight, 8) for weight in weights]
        for rows in (1, 16, 512) if width < VOCABULARY else (1, 16):
            x = torch.randn(rows, depth).to(dtype)
            yield Case(
                f"linear {depth} to {width}, {rows}",
                num_copies if rows < 512 else 2,
                lambda copy, x=x, ours=ours: ours[copy](x),
                {"oneDNN": lambda copy, x=x, packed=packed: run(x, packed[copy], None, "none", [], "")},
            )


def expert_cases(dtype: torch.dtype, num_threads: int) -> Iterator[Case]:
    """The first product of a sparse layer, 8 of 64 experts a token: all of them in one call, and one by one."""
    linears = [CpuLinear(torch.randn(2 * EXPERT, HIDDEN).to(dtype), None, num_threads) for _ in range(64)]
    for tokens in (1, 8, 32):
        ids = torch.stack([torch.randperm(64)[:8] for _ in range(tokens)]).flatten()
        chosen, counts = (found.tolist() for found in ids.unique(return_counts=True))
        asked, x = [linears[expert] for expert in chosen], torch.randn(8 * tokens, HIDDEN).to(dtype)
        yield Case(
            f"experts {HIDDEN} to {2 * EXPERT}, {tokens}",
            5,
            lambda copy, asked=asked, counts=counts, x=x: CpuLinear.each(asked, counts, x),
            {
                "one by one": lambda copy, asked=asked, counts=counts, x=x: torch.cat(
                    [linear(part) for linear, part in zip(asked, x.split(counts), strict=True)]
                )
            },
        )


def microseconds(run: Run, num_copies: int) -> float:
    """The median over the copies of one round: a stalled call says nothing about the kernel."""
    times = []
    for copy in range(num_copies):
        start = time.perf_counter()
        run(copy)
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = getattr(torch, arguments.dtype)
    ours = cpu_ops.make_ops(dtype, DIM, arguments.threads)
    cases = itertools.chain(
        row_cases(ours, torch_ops, dtype),
        attention_cases(ours, torch_ops, dtype),
        linear_cases(dtype, arguments.threads),
        expert_cases(dtype, arguments.threads),
    )
    results = []
    print(f"{'':36}{'ours':>10}{'theirs':>12}   µs a call, medians, {arguments.dtype}, {arguments.threads} threads")
    for case in cases:
        if arguments.only not in case.name:
            continue
        for rival, run in case.theirs.items():
            microseconds(case.ours, case.num_copies), microseconds(run, case.num_copies)
            pairs = alternate(
                lambda case=case: microseconds(case.ours, case.num_copies),
                lambda case=case, run=run: microseconds(run, case.num_copies),
                arguments.pairs,
            )
            verdict = judge(pairs, higher_is_better=False)
            mine, other = (statistics.median(side) for side in zip(*pairs, strict=True))
            print(f"{case.name:36}{mine:10.1f}{other:12.1f}   {verdict} as fast as {rival}", flush=True)
            results.append(
                {"case": case.name, "rival": rival, "ours_us": mine, "theirs_us": other, **verdict._asdict()}
            )
    record(
        "cpu-ops",
        {"dtype": arguments.dtype, "threads": arguments.threads, "level": cpu_ops.levels()[-1], "cases": results},
    )


if __name__ == "__main__":
    main()

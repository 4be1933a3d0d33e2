"""What the host does in the layers of a step with prompts, which no graph replays: 28 layers of Qwen3-0.6B's kind.

Everything in `model.forward` is real but the device (idle_gpu.py): torch's allocations, views and products, the launchers'
Python, Triton's launcher in C. The sizes are tiny, which the host does not notice. By turns: launches as they are, and in
Triton's own way. CPU time of the one thread; the driver's own part of a launch is not in it, cuBLAS's only as the call of
a tiny product.

    python benchmarks/bench_host_layers.py [--runs 15] [--profile]
"""

import argparse
import cProfile
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import idle_gpu
import torch
from gpu.shapes import MODELS
from pairs import record

from penstock.executor.batch import ForwardBatch, KvPages
from penstock.executor.kernels import linear
from penstock.executor.loading.fields import Fields
from penstock.executor.models.registry import CausalModel, find_architecture
from penstock.executor.models.weights import Weights
from penstock.executor.parallel import RankGroup

CPU, DTYPE = torch.device("cpu"), torch.float32
# Small enough for the products to take no longer than a call does.
TINY = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512}
CONTEXT, PAGE, STEPS = 4096, 16, 20
STEP_KINDS = {"prefill": (0, (4, 4)), "mixed": (4, (4, 4))}  # rows of one token, and the others' tokens


def build() -> tuple[CausalModel, KvPages]:
    from penstock.executor.kernels.cuda.ops import OPS

    fields = Fields(MODELS["qwen3-0.6b"] | TINY)
    architecture = find_architecture(fields)[1]
    spec = architecture.read_spec(fields)
    weights = Weights(lambda _, shape: torch.zeros(shape), DTYPE, CPU, RankGroup(), lambda _: None)
    with (
        mock.patch.object(linear, "is_repacked", return_value=False),
        mock.patch("penstock.executor.models.weights.is_repacked", return_value=False),
    ):
        model = architecture.build(spec, weights, OPS, TINY["max_position_embeddings"], CPU)
    kv = torch.zeros(2, model.num_layers, 2, PAGE, model.kv_width)
    return model, [(kv[:, index, 0], kv[:, index, 1]) for index in range(model.num_layers)]


def batch(singles: int, prompts: tuple[int, ...]) -> ForwardBatch:
    rows, tokens = singles + len(prompts), singles + sum(prompts)
    return ForwardBatch(
        tokens=torch.zeros(tokens, dtype=torch.int32),
        positions=torch.zeros(tokens, dtype=torch.int32),
        kv_slots=torch.zeros(tokens, dtype=torch.int64),
        query_starts=torch.zeros(rows + 1, dtype=torch.int32),
        context_lens=torch.zeros(rows, dtype=torch.int32),
        block_tables=torch.zeros(rows, CONTEXT // PAGE, dtype=torch.int32),
        wanted=torch.zeros(rows, dtype=torch.int64),
        num_single_rows=singles,
        query_lens=prompts,
        query_contexts=(CONTEXT,) * len(prompts),
        max_context_len=CONTEXT,
        max_single_context=CONTEXT if singles else 0,
    )


@contextmanager
def tritons_own_way() -> Iterator[None]:
    from penstock.executor.kernels.cuda.launch import Kernel

    with mock.patch.object(Kernel, "__getitem__", lambda self, grid: self._jit[grid]):
        yield


@torch.inference_mode()
def milliseconds(model: CausalModel, pages: KvPages, given: ForwardBatch) -> float:
    """The least of some steps: a neighbour on the same core only adds."""

    def once() -> float:
        started_s = time.thread_time()
        model.forward(given, pages)
        return time.thread_time() - started_s

    return min(once() for _ in range(STEPS)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="show where the time of a mixed step goes, and end")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        idle_gpu.install(folder)
        measure(*build(), args.runs, args.profile)


def measure(model: CausalModel, pages: KvPages, runs: int, is_profile: bool) -> None:
    found: dict[str, dict[str, float]] = {}
    for kind, rows in STEP_KINDS.items():
        given = batch(*rows)
        milliseconds(model, pages, given)  # compiles
        if is_profile:
            profile(lambda given=given: milliseconds(model, pages, given))
            continue
        ours, theirs = [], []
        for _ in range(runs):
            ours.append(milliseconds(model, pages, given))
            with tritons_own_way():
                theirs.append(milliseconds(model, pages, given))
        found[kind] = {"ours": statistics.median(ours), "tritons": statistics.median(theirs)}
        print(
            f"{kind:8} {found[kind]['ours']:5.2f} ms a step ({min(ours):.2f} to {max(ours):.2f}); launched in Triton's "
            f"own way {found[kind]['tritons']:5.2f} ({min(theirs):.2f} to {max(theirs):.2f})"
        )
    if found:
        record("host_layers", {"ms": found})


def profile(call: Callable[[], float]) -> None:
    with cProfile.Profile() as profiler:
        call()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

"""What moving experts costs the tokens in flight: inter-token latency with and without, at four ranks.

    python benchmarks/bench_rebalance.py [--pairs 10] [--steps 128] [--interval 16] [--layers 8] [--batch 16]

A Qwen3-MoE with made-up weights on the multiproc executor, experts over gloo ranks, twice: where experts stay in place,
and where they move at every look at the load (each --interval steps) that finds anything better, which is far more often
than in service. Both decode the same requests in turn, two steps in flight as in the engine; every pair of runs has other
prompts, and so other favourites. A rebalancing is spread over many steps, so every step of a run counts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pairs import Pair, arguments, record, rounded, rounds, summary

from penstock.executor.protocol import (
    Admission,
    EplbConfig,
    Executor,
    ExecutorConfig,
    ExpertUpdate,
    Row,
    Sampling,
    Step,
    StepResult,
)
from penstock.executor.ranks.multiproc import open_multiproc

VOCAB, BLOCK, RANKS, INPUT_LEN, REDUNDANT = 4096, 16, 4, 32, 4
GREEDY = Sampling(temperature=0.0)
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "hidden_act": "silu",
    "attention_bias": False,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
}


class Run(NamedTuple):
    gaps_ms: np.ndarray  # between the results of two steps
    update: ExpertUpdate | None  # the last


class Decoder:
    """Requests of equal length, decoded together; every run has the prompts of the next seed."""

    def __init__(self, executor: Executor, args: argparse.Namespace) -> None:
        self._executor, self._args = executor, args
        self._step_id = self._seed = 0
        self._update: ExpertUpdate | None = None

    def run(self) -> Run:
        """Prefill, then `steps` tokens for every request."""
        rows = range(self._args.batch)
        favourites = np.random.default_rng(self._seed).integers(0, VOCAB, 64)
        prompts = np.random.default_rng(self._seed + 1000).choice(favourites, (len(rows), INPUT_LEN)).astype("<i4")
        self._seed += 1
        num_blocks = -(-(INPUT_LEN + self._args.steps + 1) // BLOCK)
        admissions = [
            Admission(slot=s, request_id=s, tokens=prompts[s].tobytes(), num_prompt=INPUT_LEN, sampling=GREEDY)
            for s in rows
        ]
        tables = [tuple(range(1 + s * num_blocks, 1 + (s + 1) * num_blocks)) for s in rows]
        self._submit(admissions, [Row(s, 0, INPUT_LEN, True, blocks=tables[s]) for s in rows])
        self._collect()
        times = []
        for step in range(self._args.steps):
            self._submit([], [Row(s, INPUT_LEN + step, 1, True) for s in rows])
            if step:  # the engine, too, builds a step while the one before runs
                self._collect()
                times.append(time.perf_counter())
        self._collect()
        return Run(np.diff(times) * 1e3, self._update)

    def _submit(self, admissions: list[Admission], rows: list[Row]) -> None:
        self._step_id += 1
        self._executor.submit(Step(self._step_id, admissions, rows))

    def _collect(self) -> StepResult:
        result = self._executor.collect()
        assert not result.errors, result.errors
        self._update = result.experts or self._update
        return result


def opened(folder: str, args: argparse.Namespace, moves: bool) -> Executor:
    eplb = EplbConfig(
        window=2 * args.interval,
        interval=args.interval,
        redundant_experts=REDUNDANT if moves else 0,
        target=1.0,
        min_gain_per_gib=0.0,
    )
    config = ExecutorConfig(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        block_size=BLOCK,
        kv_cache_bytes=2**28,
        max_num_seqs=args.batch,
        tensor_parallel_size=RANKS,
        enable_expert_parallel=True,
        enable_eplb=moves,
        eplb_config=eplb,
    )
    return open_multiproc(config)


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    executors = {name: opened(folder, args, name == "moving") for name in ("moving", "still")}
    try:
        decoders = {name: Decoder(executor, args) for name, executor in executors.items()}
        first = {name: decoder.run() for name, decoder in decoders.items()}["moving"].update  # warms up
        runs = rounds({name: decoder.run for name, decoder in decoders.items()}, args.pairs)
    finally:
        for executor in executors.values():
            executor.close()
    return figures(runs, first, args.steps)


def figures(runs: dict[str, list[Run]], first: ExpertUpdate | None, steps: int) -> dict[str, Any]:
    """Ratios are moving / still: what p99 and p50 grow by."""
    found: dict[str, Any] = {}
    for share in (99, 50):
        each = {name: [float(np.percentile(run.gaps_ms, share)) for run in of] for name, of in runs.items()}
        pairs = [Pair(*pair) for pair in zip(each["moving"], each["still"], strict=True)]
        name = f"p{share} between tokens, moving / still"
        found[f"p{share}_ms"] = summary(name, pairs, "ms", higher_is_better=True, sides=("moving", "still"))
    count = len(runs["still"])
    pooled = pooled_p99_ratio(runs, np.arange(count))
    rng = np.random.default_rng(0)
    resampled = [pooled_p99_ratio(runs, rng.integers(0, count, count)) for _ in range(1000)]
    low, high = np.percentile(resampled, (2.5, 97.5))
    print(f"p99 over all runs, moving / still: {pooled:.3f}× (95% interval {low:.3f} to {high:.3f}, pairs drawn anew)")
    found |= {"pooled_p99_ratio": rounded(pooled), "pooled_p99_interval": [rounded(low), rounded(high)]}
    for name, of in runs.items():
        all_gaps = np.concatenate([run.gaps_ms for run in of])
        found |= {f"{name}_p{share}_ms": rounded(float(np.percentile(all_gaps, share))) for share in (50, 99)}
    last = runs["moving"][-1].update
    if last is not None:
        counted = ("num_rebalances", "num_skipped", "num_aborted", "num_moved", "moved_bytes", "plan_s", "stall_s")
        found |= {name: getattr(last, name) - getattr(first, name, 0) for name in counted}
        found |= {"stall_ms_per_step": round(1e3 * found["stall_s"] / (count * steps), 3), "balance": last.balance}
    return found


def pooled_p99_ratio(runs: dict[str, list[Run]], chosen: np.ndarray) -> float:
    """Moving / still over all gaps of these runs: the p99 of one run alone is little more than its slowest step."""
    moving, still = (
        np.percentile(np.concatenate([runs[name][at].gaps_ms for at in chosen]), 99) for name in ("moving", "still")
    )
    return float(moving / still)


def main() -> None:
    args = arguments(__doc__, pairs=10, steps=128, interval=16, layers=8, batch=16)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN3_MOE | {"num_hidden_layers": args.layers}))
        found = measure(args, folder)
    record("rebalance", {"ranks": RANKS, **found})


if __name__ == "__main__":
    main()

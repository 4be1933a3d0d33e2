"""What moving experts costs the tokens that are on their way: inter-token latency with and without, at four ranks.

    python benchmarks/bench_rebalance.py [--pairs 10] [--steps 128] [--interval 16] [--hidden 512] …

A Qwen3-MoE with made-up weights on the multiproc executor, experts over gloo ranks, twice: where experts lie still,
and where they move at every look at the load that finds anything better, which is far more often than anybody would
want. Both decode the same requests by turns, two steps under way as in the engine; every pair of runs has other
prompts, and so other favourites. A rebalancing is spread over many steps, so every step of a run counts.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pairs import Pair, alternate, judge, record

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

VOCAB = 4096
BLOCK = 16
GREEDY = Sampling(temperature=0.0)
QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": VOCAB,
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
    news: ExpertUpdate | None  # the last


class Decoder:
    """Requests of equal length, decoded together."""

    def __init__(self, executor: Executor, args: argparse.Namespace) -> None:
        self._executor, self._args = executor, args
        self._step_id = 0
        self._news: ExpertUpdate | None = None

    def run(self, seed: int) -> Run:
        """Prefill, then `steps` tokens for every request."""
        length, rows = self._args.input_len, range(self._args.batch)
        favourites = np.random.default_rng(seed).integers(0, VOCAB, 64)
        prompts = np.random.default_rng(seed + 1).choice(favourites, (len(rows), length)).astype("<i4")
        num_blocks = -(-(length + self._args.steps + 1) // BLOCK)
        admissions = [
            Admission(slot=s, request_id=s, tokens=prompts[s].tobytes(), num_prompt=length, sampling=GREEDY)
            for s in rows
        ]
        tables = [tuple(range(1 + s * num_blocks, 1 + (s + 1) * num_blocks)) for s in rows]
        self._submit(admissions, [Row(s, 0, length, True, blocks=tables[s]) for s in rows])
        self._collect()
        times = []
        for step in range(self._args.steps):
            self._submit([], [Row(s, length + step, 1, True) for s in rows])
            if step:  # the engine, too, builds a step while the one before runs
                self._collect()
                times.append(time.perf_counter())
        self._collect()
        return Run(np.diff(times) * 1e3, self._news)

    def _submit(self, admissions: list[Admission], rows: list[Row]) -> None:
        self._step_id += 1
        self._executor.submit(Step(self._step_id, admissions, rows))

    def _collect(self) -> StepResult:
        result = self._executor.collect()
        assert not result.errors, result.errors
        self._news = result.experts or self._news
        return result


def config_of(folder: str, args: argparse.Namespace, moves: bool) -> ExecutorConfig:
    eplb = EplbConfig(
        window=2 * args.interval,
        interval=args.interval,
        redundant_experts=args.redundant if moves else 0,
        target=1.0,
        min_gain_per_gib=0.0,
    )
    return ExecutorConfig(
        model=folder,
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        block_size=BLOCK,
        kv_cache_bytes=2**28,
        max_num_seqs=args.batch,
        tensor_parallel_size=args.ranks,
        enable_expert_parallel=True,
        enable_eplb=moves,
        eplb_config=eplb,
    )


def measure(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    still, moving = (open_multiproc(config_of(folder, args, moves)) for moves in (False, True))
    try:
        decoders = {False: Decoder(still, args), True: Decoder(moving, args)}
        for decoder in decoders.values():
            decoder.run(0)  # warm
        runs: dict[bool, list[Run]] = {False: [], True: []}

        def p99(moves: bool) -> float:
            run = decoders[moves].run(1000 + len(runs[moves]))
            runs[moves].append(run)
            p50, p99 = np.percentile(run.gaps_ms, (50, 99))
            print(f"  {'moving' if moves else 'still '} p50 {p50:.1f} ms, p99 {p99:.1f} ms", flush=True)
            return float(p99)

        first = decoders[True].run(0).news
        pairs = alternate(lambda: p99(True), lambda: p99(False), args.pairs)
    finally:
        moving.close()
        still.close()
    return figures(pairs, runs, first, args)


def figures(pairs: list[Pair], runs: dict[bool, list[Run]], first: ExpertUpdate, args: argparse.Namespace) -> dict:
    """Ratios are moving / still: what p99 and p50 grow by."""
    halves = {
        "p99": [Pair(pair.theirs, pair.ours) for pair in pairs],
        "p50": [
            Pair(float(np.median(still.gaps_ms)), float(np.median(moving.gaps_ms)))
            for moving, still in zip(runs[True], runs[False], strict=True)
        ],
    }
    found: dict[str, Any] = {}
    for name, of in halves.items():
        verdict = judge(of, higher_is_better=False)
        print(f"{name} of inter-token latency, moving / still: {verdict}")
        found |= {f"{name}_ratio": round(verdict.ratio, 3), f"{name}_interval": [verdict.low, verdict.high]}
    pooled = pooled_p99_ratio(runs, np.arange(len(pairs)))
    rng = np.random.default_rng(0)
    resampled = [pooled_p99_ratio(runs, rng.integers(0, len(pairs), len(pairs))) for _ in range(1000)]
    low, high = np.percentile(resampled, (2.5, 97.5))
    print(f"p99 over all runs, moving / still: {pooled:.3f}× (95% interval {low:.3f} to {high:.3f}, pairs drawn anew)")
    found |= {"pooled_p99_ratio": round(pooled, 3), "pooled_p99_interval": [round(low, 3), round(high, 3)]}
    all_gaps = {moves: np.concatenate([run.gaps_ms for run in of]) for moves, of in runs.items()}
    for moves, name in ((False, "still"), (True, "moving")):
        found |= {f"{name}_p{at}_ms": round(float(np.percentile(all_gaps[moves], at)), 2) for at in (50, 99)}
    last = runs[True][-1].news
    counted = ("num_rebalances", "num_skipped", "num_aborted", "num_moved", "moved_bytes", "plan_s", "stall_s")
    found |= {name: getattr(last, name) - getattr(first, name) for name in counted}
    found["stall_ms_per_step"] = round(1e3 * found["stall_s"] / (args.pairs * args.steps), 3)
    found["balance"] = last.balance
    return found


def pooled_p99_ratio(runs: dict[bool, list[Run]], chosen: np.ndarray) -> float:
    """Moving / still over all gaps of these runs: the p99 of one run alone is little more than its slowest step."""
    moving, still = (np.percentile(np.concatenate([runs[moves][at].gaps_ms for at in chosen]), 99) for moves in (1, 0))
    return float(moving / still)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--interval", type=int, default=16, help="steps between two looks at the load (16)")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--expert-size", type=int, default=384)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--redundant", type=int, default=4)
    args = parser.parse_args()
    model = QWEN3_MOE | {"hidden_size": args.hidden, "intermediate_size": args.hidden, "num_experts_per_tok": 4}
    model |= {"num_hidden_layers": args.layers, "num_experts": args.experts, "moe_intermediate_size": args.expert_size}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(model))
        found = measure(args, folder)
    record("rebalance", {"ranks": args.ranks, **found})


if __name__ == "__main__":
    main()

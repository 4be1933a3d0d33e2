"""Expert load balancing: planning compared with vLLM's numpy policy, and the cost of moves for tokens in flight.

    python benchmarks/bench_eplb.py plans [--peer-python PATH] [--seeds 3] [--repeats 5]
    python benchmarks/bench_eplb.py moving [--pairs 10] [--steps 128] [--interval 16] [--layers 8] [--batch 16]

`plans`: plans from scratch (ours: plan with all tables; theirs: plan, old slots kept, inverse maps), moves after drift,
and planning of transfers (ours: for all ranks; theirs: one rank's part). Times are CPU milliseconds of one thread, so
other processes disturb them less. Without --peer-python the other side is the published algorithm as plain loops: a
baseline for quality, not for speed.

`moving`: a Qwen3-MoE with random weights on the multiproc executor, experts over four gloo ranks. Both sides have the
same slots and count tokens. One never checks the load; the other rebalances at every check (each --interval steps) that
finds an improvement, far more often than in service. Both decode the same requests in turn, two steps in flight as in
the engine; every pair of runs has other prompts, and so other hot experts. A rebalancing is spread over many steps, so
every step of a run counts.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any, NamedTuple

import numpy as np
import pairs as _harness  # noqa: F401  (before eplb_workloads, so that it finds tests/support)
from eplb_workloads import CELLS, DRIFTING, DRIFTS, KINDS, Cell, drifted, load, plan_by_definition
from gpu.shapes import MODELS, model_folder
from gpu.steps import Steps
from pairs import HERE, Asked, main, rounded, rounds, summary, table

from penstock.eplb import Plan, balance, bound, plan, replan, transfers
from penstock.executor.protocol import EplbConfig, Executor, ExecutorConfig, ExpertUpdate
from penstock.executor.ranks.ranked import open_multiproc

Rows = list[dict[str, Any]]
BLOCK, RANKS, INPUT_LEN, REDUNDANT, NEVER = 16, 4, 32, 4, 10**9
MOE = MODELS["qwen3-30b-a3b"] | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 512, "head_dim": 64}
MOE |= {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 384, "max_position_embeddings": 4096}
MOE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}


# -- plans -------------------------------------------------------------------------------------------------------


class Published:
    """The published algorithm as loops; it plans from scratch, and its speed is irrelevant."""

    name = "the published algorithm"

    def plan(self, cell: Cell, counts: np.ndarray, old: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        start = time.thread_time()
        placed = plan_by_definition(counts, cell.slots, cell.ranks)
        return 1e3 * (time.thread_time() - start), placed


class Peer:
    """vLLM's policy in its own process."""

    name = "vLLM"

    def __init__(self, python: str) -> None:
        self._process = Asked(python, str(HERE / "eplb_peer.py"))
        self.close = self._process.close

    def plan(self, cell: Cell, counts: np.ndarray, old: np.ndarray | None = None) -> tuple[float, np.ndarray]:
        ask = {"load": counts.tolist(), "slots": cell.slots, "ranks": cell.ranks}
        ms, placed = self._process.ask(["plan", ask | {"old": None if old is None else old.tolist()}])
        return ms, np.array(placed)

    def transfers(self, cell: Cell, old: np.ndarray, new: np.ndarray) -> float:
        ms: float = self._process.ask(["transfers", {"old": old.tolist(), "new": new.tolist(), "ranks": cell.ranks}])
        return ms


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of this thread, which other processes disturb less than wall time."""
    start = time.thread_time()
    call()
    return (time.thread_time() - start) * 1e3


def beside(theirs: Callable[[], float], ours: Callable[[], object], count: int) -> dict[str, list[float]]:
    return rounds({"ours": lambda: cpu_ms(ours), "theirs": theirs}, count)


def times(all_ms: dict[str, list[float]]) -> dict[str, Any]:
    ratios = [theirs / ours for ours, theirs in zip(all_ms["ours"], all_ms["theirs"], strict=True)]
    return {f"{side} ms": statistics.median(ms) for side, ms in all_ms.items()} | {"times": statistics.median(ratios)}


def means(rows: Rows) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}


def compare_plans(peer: Published | Peer, cell: Cell, kind: str, seeds: int, repeats: int) -> dict[str, Any]:
    """Compare plans for one cell: the median time over all pairs, and the balance per seed."""
    found: dict[str, list[float]] = {"ours": [], "theirs": []}
    rows: Rows = []
    for seed in range(seeds):
        counts = load(cell, kind, seed)
        _, before = peer.plan(cell, load(cell, kind, seed + 50))
        each = beside(lambda: peer.plan(cell, counts, before)[0], lambda: make(cell, counts), repeats)  # noqa: B023
        for side, ms in each.items():
            found[side] += ms
        theirs = Plan.of(peer.plan(cell, counts, before)[1], cell.experts, cell.ranks)
        row = {"balance": balance(counts, make(cell, counts)).mean(), "theirs": balance(counts, theirs).mean()}
        rows.append(row | {"bound": bound(counts, cell.slots, cell.ranks).mean()})
    least = min(float(row["balance"] - row["theirs"]) for row in rows)
    return {"shape": cell.name, "load": kind} | times(found) | means(rows) | {"least lead": least}


def compare_moves(peer: Published | Peer, cell: Cell, drift: str, seeds: int, target: float) -> dict[str, Any]:
    """Compare weights that cross to another rank, in percent of all slots; both sides start from their own plan."""
    rows, took = [], []
    for kind, seed in itertools.product(("zipf", "logn1"), range(seeds)):
        counts, later = load(cell, kind, seed), drifted(cell, kind, seed, drift)
        old = make(cell, counts)
        took.append(cpu_ms(lambda: replan(later, old, target=target)))  # noqa: B023
        new = replan(later, old, target=target)
        _, peer_old = peer.plan(cell, counts)
        _, peer_new = peer.plan(cell, later, peer_old)
        plans = {"stay": old, "replan": new, "theirs": Plan.of(peer_new, cell.experts, cell.ranks)}
        row = {name: balance(later, each).mean() for name, each in plans.items()}
        row |= {"moved %": arrivals(old.phy2log, new.phy2log, cell), "their %": arrivals(peer_old, peer_new, cell)}
        rows.append(row)
    row = {"shape": cell.name, "drift": drift} | means(rows)
    return row | {"part": row["moved %"] / max(row["their %"], 1e-9), "replan ms": statistics.median(took)}


def arrivals(old: np.ndarray, new: np.ndarray, cell: Cell) -> float:
    """Return the experts that a rank has in the new plan but not in the old one, in percent of all slots."""
    has = np.zeros((2, cell.layers, cell.ranks, cell.experts), bool)
    for which, placed in enumerate((old, new)):
        np.put_along_axis(has[which], placed.reshape(cell.layers, cell.ranks, -1).astype(np.int64), True, axis=2)
    return float(100 * (has[1] & ~has[0]).sum() / old.size)


def compare_transfers(peer: Peer, cell: Cell, repeats: int) -> dict[str, Any]:
    """Compare planning the transfers to a plan for other hot experts; both sides get the same two plans."""
    old, new = (plan(load(cell, "zipf", seed), cell.slots, cell.ranks) for seed in (0, 100))
    theirs = lambda: peer.transfers(cell, old.phy2log, new.phy2log)  # noqa: E731
    found = beside(theirs, lambda: transfers(old, new, cell.ranks), 2 * repeats)
    return {"shape": cell.name} | times(found)


def verdict(plans: Rows, moves: Rows, sent: Rows) -> dict[str, Any]:
    """Return the figures that have floors."""
    redundant = {cell.name for cell in CELLS if cell.is_redundant}
    of_bound = [row["balance"] / row["bound"] for row in plans if row["shape"] in redundant]
    parts = {drift: max(row["part"] for row in moves if row["drift"] == drift) for drift in DRIFTS}
    return {
        "plan_times_least": min(row["times"] for row in plans),
        "plan_times_geomean": statistics.geometric_mean(row["times"] for row in plans),
        "balance_least_lead": min(row["least lead"] for row in plans),
        "of_bound_least": min(of_bound),
        "moved_part_most": parts,
        "transfer_times_least": min(row["times"] for row in sent),
    }


def plans(peer_python: str | None = None, seeds: int = 3, repeats: int = 5, target: float = 0.95) -> dict[str, Any]:
    with ExitStack() as stack:
        peer: Published | Peer = Published()
        if peer_python is not None:
            peer = stack.enter_context(closing(Peer(peer_python)))
        planned = [compare_plans(peer, cell, kind, seeds, repeats) for cell in CELLS for kind in KINDS]
        print_table(f"Plans from scratch (CPU ms; balance), beside {peer.name}", planned)
        moves = [compare_moves(peer, cell, drift, seeds, target) for cell in DRIFTING for drift in DRIFTS]
        print_table(f"After drift, target {target}", moves)
        if not isinstance(peer, Peer):
            return {"plans": planned, "moves": moves}
        sent = [compare_transfers(peer, cell, repeats) for cell in DRIFTING]
        print_table("Planning of transfers (CPU ms)", sent)
    return verdict(planned, moves, sent) | {"plans": planned, "moves": moves, "transfers": sent}


def make(cell: Cell, counts: np.ndarray) -> Plan:
    return plan(counts, cell.slots, cell.ranks)


def print_table(title: str, rows: Rows) -> None:
    print(f"\n{title}\n")
    table(rows)


# -- moving ------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    gaps_ms: np.ndarray  # between the results of two steps
    update: ExpertUpdate | None  # the last one


class Decoder:
    """Decodes requests of equal length together; every run uses the prompts of the next seed."""

    def __init__(self, executor: Executor, steps: int, batch: int) -> None:
        self._steps, self._num_steps, self._batch, self._seed = Steps(executor), steps, batch, 0

    def run(self) -> Run:
        """Prefill, then decode `steps` tokens for every request."""
        favourites = np.random.default_rng(self._seed).integers(0, MOE["vocab_size"], 64)
        prompts = np.random.default_rng(self._seed + 1000).choice(favourites, (self._batch, INPUT_LEN))
        self._seed += 1
        each = -(-(INPUT_LEN + self._num_steps + 1) // BLOCK)
        blocks = 1 + np.arange(self._batch * each).reshape(self._batch, each)
        self._steps.prefill(blocks, prompts)
        times = list(self._steps.decode(self._batch, INPUT_LEN, self._num_steps))
        return Run(np.diff(times) * 1e3, self._steps.update)


def opened(model: str, interval: int, batch: int) -> Executor:
    eplb = EplbConfig(
        window=2 * interval,
        interval=interval,
        redundant_experts=REDUNDANT,
        target=1.0,
        min_gain_per_gib=0.0,
    )
    config = ExecutorConfig(
        model=model,
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        block_size=BLOCK,
        kv_cache_bytes=2**28,
        max_num_seqs=batch,
        tensor_parallel_size=RANKS,
        enable_expert_parallel=True,
        enable_eplb=True,
        eplb_config=eplb,
    )
    return open_multiproc(config)


def moving(pairs: int = 10, steps: int = 128, interval: int = 16, layers: int = 8, batch: int = 16) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = stack.enter_context(model_folder(MOE | {"num_hidden_layers": layers}))
        sides = {}
        for name, checked_after in (("moving", interval), ("still", NEVER)):
            executor = opened(folder, checked_after, batch)
            stack.callback(executor.close)
            sides[name] = Decoder(executor, steps, batch).run
        first = rounds(sides, 1)["moving"][0].update  # warms up
        runs = rounds(sides, pairs)
    return {"ranks": RANKS, **figures(runs, first, steps)}


def figures(runs: dict[str, list[Run]], first: ExpertUpdate | None, steps: int) -> dict[str, Any]:
    """Return ratios moving / still of the p50 and p99 gaps, and other figures."""
    found: dict[str, Any] = {}
    for share in (99, 50):
        each = {name: [float(np.percentile(run.gaps_ms, share)) for run in of] for name, of in runs.items()}
        found[f"p{share}_ms"] = summary(f"p{share} between tokens, moving / still", each, "ms", higher_is_better=True)
    for name, of in runs.items():
        all_gaps = np.concatenate([run.gaps_ms for run in of])
        found |= {f"{name}_p{share}_ms": rounded(float(np.percentile(all_gaps, share))) for share in (50, 99)}
    last = runs["moving"][-1].update
    if last is not None:
        counted = (
            "num_rebalances",
            "num_reweights",
            "num_skipped",
            "num_aborted",
            "num_moved",
            "moved_bytes",
            "plan_s",
            "stall_s",
        )
        found |= {name: getattr(last, name) - getattr(first, name, 0) for name in counted}
        found |= {
            "stall_ms_per_step": round(1e3 * found["stall_s"] / (len(runs["still"]) * steps), 3),
            "balance": last.balance,
        }
    return found


if __name__ == "__main__":
    main(__doc__, "eplb", plans, moving)

"""What the tiers would have found of a recorded stream of requests, and what they wrote for it, for several sizes.

Replays a trace in Mooncake's format (a JSON object per line with `hash_ids`, one id per 512 tokens, equal ids for equal
beginnings) through the real scheduler, pool, index and tiers. The oracle executor stands for the model; it computes
a short block in place of each of 512 tokens, so the sizes are in blocks. Beside the tiers stands an unbounded cache,
which finds whatever came before.

    python benchmarks/replay_trace.py TRACE --sizes 1000/5000 1000/5000/50000 [--limit 2000]

A size is device/host or device/host/disk, in blocks. With a disk, --disk-path names a directory on it.
"""

import argparse
import json
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any, NamedTuple

from pairs import record

from penstock.engine.config import EngineConfig, SchedulerConfig
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.messages import Submit
from penstock.executor.protocol import ExecutorConfig, Sampling, open_executor
from penstock.executor.tiers.open_tiers import ALIGNMENT

BLOCK_SIZE = 4
VOCAB_SIZE = 1000
SAMPLING = Sampling(temperature=0.0)


class Size(NamedTuple):
    device: int
    host: int
    disk: int

    def __str__(self) -> str:
        return "/".join(str(blocks) for blocks in self if blocks)


def parse_size(text: str) -> Size:
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(part.isdigit() and int(part) > 1 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not device/host or device/host/disk, in blocks")
    return Size(*map(int, parts), *[0] * (3 - len(parts)))


def read_trace(path: Path, limit: int | None) -> list[list[int]]:
    """The ids of the full blocks of each request, in order of arrival."""
    chains = []
    with path.open() as file:
        for line in file:
            request = json.loads(line)
            ids = request["hash_ids"]
            full = request.get("input_length", 512 * len(ids)) // 512
            if full:
                chains.append(ids[:full])
            if len(chains) == limit:
                break
    return chains


def tokens_of(chain: list[int]) -> bytes:
    """BLOCK_SIZE tokens that stand for each id, and one more, so that a prompt is never found whole."""
    tokens = array("i")
    for id_ in chain:
        tokens.extend(id_ // VOCAB_SIZE**digit % VOCAB_SIZE for digit in range(BLOCK_SIZE))
    tokens.append(0)
    return tokens.tobytes()


def unbounded(chains: list[list[int]]) -> int:
    """Blocks that a cache without a limit finds."""
    seen: set[int] = set()
    found = 0
    for chain in chains:
        found += next((place for place, id_ in enumerate(chain) if id_ not in seen), len(chain))
        seen.update(chain)
    return found


def replay(chains: list[list[int]], size: Size, disk_path: Path | None, at_a_time: int) -> dict[str, Any]:
    # The device holds the longest request in any case, and block 0, which is never handed out.
    longest = max(map(len, chains))
    executor = ExecutorConfig(
        kind="oracle",
        max_model_len=(longest + 2) * BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=(max(size.device, longest + 2) + 1) * BLOCK_SIZE * 8,
        kv_host_bytes=size.host * ALIGNMENT,
        kv_disk_path=str(disk_path) if size.disk else "",
        kv_disk_bytes=size.disk * 2 * ALIGNMENT,
        hf_overrides={"vocab_size": VOCAB_SIZE},
    )
    scheduler = SchedulerConfig(max_num_seqs=at_a_time, max_num_batched_tokens=2048)
    core = EngineCore(EngineConfig(executor=executor, scheduler=scheduler), open_executor(executor))
    found, started_s = 0, time.monotonic()
    for first in range(0, len(chains), at_a_time):
        for number, chain in enumerate(chains[first : first + at_a_time], first):
            core.submit(Submit(str(number), tokens_of(chain), SAMPLING, max_tokens=1))
        while core.has_work():
            for output in core.step():
                if output.error is not None:
                    raise SystemExit(f"request {output.request_id}: {output.error}")
                found += (output.num_cached_tokens or 0) // BLOCK_SIZE
        # A model would give the disk time to write: it takes seconds for what the oracle does in microseconds.
        core.settle()
    elapsed_s = time.monotonic() - started_s
    tiers = core.stats().tiers
    core.close()
    requested = sum(map(len, chains))
    below = {name: int(tiers[name]["hit_tokens"]) // BLOCK_SIZE for name in tiers}
    figures: dict[str, Any] = {"device": round((found - sum(below.values())) / requested, 4)}
    figures |= {name: round(count / requested, 4) for name, count in below.items()}
    figures["all"] = round(found / requested, 4)
    for name in tiers:
        figures[f"{name}_writes_per_block"] = round(tiers[name]["stored_blocks"] / requested, 4)
    return {**figures, "elapsed_s": round(elapsed_s, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--sizes", type=parse_size, nargs="+", required=True, metavar="D/H[/K]")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N requests")
    parser.add_argument("--at-a-time", type=int, default=8, metavar="N", help="requests under way (default: 8)")
    parser.add_argument("--block-bytes", type=int, default=512 * 131072, help="of 512 tokens, for the totals")
    parser.add_argument("--disk-path", type=Path, help="default: a temporary directory for each size")
    args = parser.parse_args()
    chains = read_trace(args.trace, args.limit)
    requested = sum(map(len, chains))
    best = unbounded(chains) / requested
    print(f"{args.trace.name}: {len(chains)} requests, {requested} blocks; an unbounded cache finds {best:.3f}")
    results = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory(prefix="replay-", dir=args.disk_path) as directory:
            figures = results[str(size)] = replay(chains, size, Path(directory), args.at_a_time)
        shares = "  ".join(
            f"{name} {figures[name]:.3f}" for name in ("device", "host", "disk", "all") if name in figures
        )
        written = figures.get("disk_writes_per_block", 0.0) * requested * args.block_bytes / 2**30
        print(f"{size!s:20s} {shares}   of unbounded {figures['all'] / best:.3f}   written to disk {written:,.0f} GiB")
    record("replay-trace", {"trace": args.trace.name, "limit": args.limit, "unbounded": round(best, 4), **results})


if __name__ == "__main__":
    main()

"""What the cache tiers cost when they do not help, and what they save when they do.

    python benchmarks/bench_tiers.py cost   duration of a batch of new prompts: no tiers, host, host and disk; and with
                                            blocks written to the disk by the caller, as connectors once did
    python benchmarks/bench_tiers.py ttft   time to first token of a prompt found on the disk, and of one found at a peer,
                                            against computing it
    python benchmarks/bench_tiers.py link   bytes per second through the peer tier, with and without a secret, beside one
                                            socket that moves the same bytes between two threads

All engines of a run, and both ends of a link, live side by side in this process and take turns, so that a busy machine
meets them all. Floors: host / none ≤ 1.03, host+disk / host ≤ 1.01; found / computed ≤ 1.05 always and ≤ 0.3 at 2,000
tokens on the default model; a link without a secret ≥ 0.3 of the socket. The secret's price is CURVE's: each byte is
encrypted and decrypted, here by the same cores. Disks are temporary directories under --disk-path.
"""

import argparse
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
from pairs import Pair, arguments, compare, record, rounded, rounds, summary

from penstock import LLM, SamplingParams
from penstock.cache.tiers.memory import huge_array
from penstock.cache.tiers.peer.server import PeerServer
from penstock.cache.tiers.peer.store import PeerTier

FIRST_ID = 1000
SECRET = "a secret for the benchmark alone"
FINGERPRINT = b"benchmark".ljust(32, b"\0")


class Bench:
    """The arguments, the engines, and a source of prompts that none of them has seen."""

    def __init__(self, args: argparse.Namespace, stack: ExitStack) -> None:
        self.args, self._stack = args, stack
        self._rng = random.Random(args.seed)

    def engine(self, host: bool = True, disk: bool = False, **options: Any) -> LLM:
        args = self.args
        if host:
            options["kv_host_bytes"] = "1GiB"
        if disk:
            path = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="tiers-", dir=args.disk_path))
            options |= {"kv_disk_path": path, "kv_disk_bytes": "8GiB"}
        options |= {"load_format": args.load_format, "kv_cache_bytes": 2**30, "skip_tokenizer": True}
        return self._stack.enter_context(LLM(args.model, **options))

    def prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, self.args.vocab) for _ in range(length)]


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """Seconds for the batch. What is still in flight to the tiers afterwards is not in it."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - started_s
    llm._running().settle()  # the next engine has the machine for itself
    return elapsed_s


def store_of(llm: LLM) -> Any:
    """What is below the host tier: here that is one thing."""
    (store,) = llm._running().executor._rank._tiers.transfers._stores.values()  # type: ignore[attr-defined]
    return store


def ratio(name: str, pairs: list[Pair], sides: tuple[str, str]) -> dict[str, Any]:
    """How many times as long the first of the sides takes: 1.03 means 3 % slower."""
    return summary(f"{name}, {' / '.join(sides)}", pairs, "s", higher_is_better=True, sides=sides)


# -- cost --------------------------------------------------------------------------------------------------------


def cost(bench: Bench) -> dict[str, Any]:
    args = bench.args
    engines = {"none": bench.engine(host=False), "host": bench.engine(), "host+disk": bench.engine(disk=True)}
    engines["host+disk, caller writes"] = caller = bench.engine(disk=True)
    write_in_the_caller(store_of(caller))
    batches = [[bench.prompt(args.input_len) for _ in range(args.prompts)] for _ in range(args.pairs + 1)]
    waiting = {name: iter(batches) for name in engines}  # every engine gets the same batches
    runs = {name: lambda n=name: run(engines[n], next(waiting[n]), args.output_len) for name in engines}
    rounds(runs, 1)  # warms up
    seconds = rounds(runs, args.pairs)
    medians = {name: rounded(statistics.median(values)) for name, values in seconds.items()}
    print("median seconds: " + "  ".join(f"{name} {value:.3f}" for name, value in medians.items()))
    stored = engines["host+disk"].get_metrics()["kv_disk_stored_blocks"]
    assert stored > 0, "the disk was never written"
    figures = {"median_s": medians, "blocks_on_disk": stored}
    for sides in (("host", "none"), ("host+disk", "host")):
        pairs = [Pair(*pair) for pair in zip(*(seconds[side] for side in sides), strict=True)]
        figures[" / ".join(sides)] = ratio("a batch of new prompts", pairs, sides)
    return figures


def write_in_the_caller(disk: Any) -> None:
    """As connectors did before they had workers: who stores a block waits until it is written."""
    put = disk.put

    def put_and_wait(key: bytes, buffer: Any) -> bool:
        is_taken = put(key, buffer)
        disk.flush()
        return is_taken  # type: ignore[no-any-return]

    disk.put = put_and_wait


# -- ttft --------------------------------------------------------------------------------------------------------


def ttft(bench: Bench) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    disk = bench.engine(disk=True)
    first, second = bench.engine(kv_peer_listen=address), bench.engine(kv_peers=[address])
    results = found_below(bench, "disk", disk, disk, lambda _: forget_device_and_host(disk))
    return results | found_below(bench, "peer", first, second, lambda blocks: wait_for_keys(second, blocks))


def found_below(
    bench: Bench, kind: str, computes: LLM, reads: LLM, between: Callable[[int], None]
) -> dict[str, dict[str, Any]]:
    """A prompt is computed by one engine; the other, or the same once it has forgotten, finds it in a tier."""
    results = {}
    for length in bench.args.shared:
        pairs, found = [], []
        for number in range(bench.args.pairs + 1):
            prompt, ends = bench.prompt(length), [bench.prompt(8) for _ in range(2)]
            computed_s = run(computes, [prompt + ends[0]], 1)
            between(length // reads.info.block_size)
            before = reads.get_metrics()[f"kv_{kind}_hit_tokens"]
            found_s = run(reads, [prompt + ends[1]], 1)
            if number:  # the first warms up
                pairs.append(Pair(found_s, computed_s))
                found.append(reads.get_metrics()[f"kv_{kind}_hit_tokens"] - before)
            if computes is not reads:
                reads.reset_prefix_cache(), computes.reset_prefix_cache()
        name = f"{length} tokens, {kind}"
        results[name] = ratio(name, pairs, ("found", "computed")) | {"found_tokens": statistics.median(found)}
    return results


def forget_device_and_host(llm: LLM) -> None:
    """As if everything else had pushed it out: what is left is on the disk."""
    scheduler = llm._running().scheduler
    assert scheduler.tiers is not None
    assert scheduler.pool.forget() and scheduler.tiers.index.host.forget()


def wait_for_keys(llm: LLM, count: int) -> None:
    """Until the peer's announcement is here; the core takes it in with its next request."""
    while len(store_of(llm)) < count:
        time.sleep(0.001)


# -- link --------------------------------------------------------------------------------------------------------


class Shelf:
    """A source that has everything in memory."""

    def __init__(self, blocks: np.ndarray) -> None:
        self._blocks = {number.to_bytes(32, "big"): block for number, block in enumerate(blocks)}

    def keys(self) -> list[bytes]:
        return list(self._blocks)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        return [], []

    def copy(self, key: bytes, out: memoryview) -> bool:
        np.copyto(np.frombuffer(out, np.uint8), self._blocks[key])
        return True

    def start_read(self, key: bytes, out: memoryview) -> int | None:
        return None

    def take_reads(self) -> list[tuple[int, bool]]:
        return []


def through_tier(tier: PeerTier, keys: list[bytes], into: np.ndarray) -> float:
    """GB per second for all blocks, checked and in place."""
    started_s = time.perf_counter()
    for key, target in zip(keys, into, strict=True):
        assert tier.start_load(key, memoryview(target)) is not None
    num_left = len(into)
    while num_left:
        for completion in tier.poll():
            assert completion.ok, tier.stats()
            num_left -= 1
        time.sleep(0.0002)
    return into.nbytes / (time.perf_counter() - started_s) / 1e9


def through_socket(blocks: np.ndarray, into: np.ndarray) -> float:
    """The same bytes over one connection, as fast as the kernel moves them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        started_s = time.perf_counter()
        sender = threading.Thread(target=lambda: [theirs.sendall(block) for block in blocks])
        sender.start()
        for target in into:
            view = memoryview(target)
            while view:
                view = view[ours.recv_into(view) :]
        elapsed_s = time.perf_counter() - started_s
        sender.join()
    return into.nbytes / elapsed_s / 1e9


def link(bench: Bench) -> dict[str, Any]:
    results = {}
    for size in bench.args.block_bytes:
        blocks = huge_array(max(bench.args.move_bytes // size, 1), size)
        np.copyto(blocks, np.random.default_rng(1).integers(0, 256, blocks.shape, np.uint8))
        into, shelf = huge_array(*blocks.shape), Shelf(blocks)
        for secret in ("", SECRET):
            same = {"chunk_bytes": size, "fingerprint": FINGERPRINT, "secret": secret}
            server = PeerServer("tcp://127.0.0.1:*", shelf, serve_bytes=128 * 2**20, **same)
            server.start()
            tier = PeerTier(server.endpoint, **same)
            while len(tier) < len(blocks):
                time.sleep(0.01)
            through_tier(tier, shelf.keys(), into)  # touches the memory
            assert np.array_equal(into, blocks)
            name = f"{size >> 10} KiB, {'secret' if secret else 'open'}"
            results[name] = compare(
                name,
                partial(through_tier, tier, shelf.keys(), into),
                partial(through_socket, blocks, into),
                bench.args.pairs,
                "GB/s",
                higher_is_better=True,
                sides=("tier", "socket"),
            )
            tier.close()
            server.close()
    return results


MODES = {"cost": cost, "ttft": ttft, "link": link}


def main() -> None:
    options = {"model": None, "load_format": "auto", "vocab": 40_000, "disk_path": None, "pairs": 10, "seed": 0}
    options |= {"prompts": 8, "input_len": 256, "output_len": 16, "shared": [32, 128, 512, 2000]}
    args = arguments(__doc__, *MODES, block_bytes=[2**18, 2**20, 2**22], move_bytes=2**28, **options)
    with ExitStack() as stack:
        record(f"tiers-{args.mode}", MODES[args.mode](Bench(args, stack)))


if __name__ == "__main__":
    main()

"""Blocks from another engine: bytes per second over loopback, and time to first token against computing.

    python benchmarks/bench_peer.py link    blocks through the peer tier, with and without a secret, beside one socket
                                            that moves the same bytes between two threads, and beside memcpy
    python benchmarks/bench_peer.py ttft    a prompt that another engine has computed against computing it

Both ends live in this process. The secret's price is CURVE's: each byte is encrypted and decrypted, here by the same
two cores. Floors: without a secret ≥ 0.3 of the raw socket; a hit / computing ≤ 1.05, and ≤ 0.3 at 2,000 tokens of the
default model.
"""

import argparse
import random
import socket
import statistics
import threading
import time
from functools import partial
from typing import Any

import numpy as np
from pairs import Pair, alternate, judge, record

from penstock import LLM, SamplingParams
from penstock.cache.tiers.memory import huge_array
from penstock.cache.tiers.peer.server import PeerServer
from penstock.cache.tiers.peer.store import PeerTier

SECRET = "a secret for the benchmark alone"
FINGERPRINT = b"benchmark".ljust(32, b"\0")
FIRST_ID = 1000


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


class Link:
    """Both ends of the tier over loopback."""

    def __init__(self, blocks: np.ndarray, secret: str) -> None:
        self._shelf = Shelf(blocks)
        size = blocks.shape[1]
        self._server = PeerServer(
            "tcp://127.0.0.1:*",
            self._shelf,
            chunk_bytes=size,
            fingerprint=FINGERPRINT,
            secret=secret,
            serve_bytes=128 * 2**20,
        )
        self._server.start()
        self._tier = PeerTier(self._server.endpoint, chunk_bytes=size, fingerprint=FINGERPRINT, secret=secret)
        while len(self._tier) < len(blocks):
            time.sleep(0.01)

    def read(self, into: np.ndarray) -> float:
        """Bytes per second for all blocks, checked and in place."""
        started_s = time.perf_counter()
        for key, slot in zip(self._shelf.keys(), into, strict=True):
            assert self._tier.start_load(key, memoryview(slot)) is not None
        num_left = len(into)
        while num_left:
            for completion in self._tier.poll():
                assert completion.ok, self._tier.stats()
                num_left -= 1
            time.sleep(0.0002)
        return into.nbytes / (time.perf_counter() - started_s)

    def close(self) -> None:
        self._tier.close()
        self._server.close()


def through_socket(blocks: np.ndarray, into: np.ndarray) -> float:
    """The same bytes over one connection, as fast as the kernel moves them."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        ours = socket.create_connection(listening.getsockname())
        theirs, _ = listening.accept()
    with ours, theirs:
        started_s = time.perf_counter()
        sender = threading.Thread(target=lambda: [theirs.sendall(block) for block in blocks])
        sender.start()
        for slot in into:
            view = memoryview(slot)
            while view:
                view = view[ours.recv_into(view) :]
        elapsed_s = time.perf_counter() - started_s
        sender.join()
    return into.nbytes / elapsed_s


def link(args: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size in args.block_bytes:
        blocks = huge_array(max(args.move_bytes // size, 1), size)
        np.copyto(blocks, np.random.default_rng(1).integers(0, 256, blocks.shape, np.uint8))
        into = huge_array(*blocks.shape)
        copy_per_s = []
        for secret, floor in (("", 0.3), (SECRET, None)):
            ends = Link(blocks, secret)
            ends.read(into)  # touches the memory
            assert np.array_equal(into, blocks)
            pairs = alternate(partial(ends.read, into), partial(through_socket, blocks, into), args.pairs)
            ends.close()
            started_s = time.perf_counter()
            np.copyto(into, blocks)
            copy_per_s.append(into.nbytes / (time.perf_counter() - started_s))
            verdict = judge(pairs, higher_is_better=True)
            ours, theirs = (statistics.median(pair[side] for pair in pairs) / 1e9 for side in (0, 1))
            name = f"{size >> 10} KiB, {'secret' if secret else 'open'}"
            print(f"{name:20s} {ours:.2f} GB/s, socket {theirs:.2f} GB/s: {verdict}   floor {floor}")
            results[name] = {"GB_per_s": round(ours, 3), "socket_GB_per_s": round(theirs, 3), "ratio": verdict.ratio}
        print(f"{'memcpy':20s} {statistics.median(copy_per_s) / 1e9:.2f} GB/s")
        results[f"{size >> 10} KiB, memcpy"] = {"GB_per_s": round(statistics.median(copy_per_s) / 1e9, 3)}
    return results


def ttft(args: argparse.Namespace) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    rng = random.Random(args.seed)
    room = {"kv_cache_bytes": 2**30, "kv_host_bytes": "1GiB", "skip_tokenizer": True}
    results = {}
    with LLM(kv_peer_listen=address, **room) as first, LLM(kv_peers=[address], **room) as second:
        for length in args.shared:
            pairs, found = [], []
            for number in range(args.pairs + 1):
                prompts = [[rng.randrange(FIRST_ID, 40_000) for _ in range(length)] for _ in range(2)]
                first_tokens(first, prompts[0])
                first._running().settle()
                wait_for_keys(second, length // second.info.block_size)
                order = (prompts[0], prompts[1]) if number % 2 else (prompts[1], prompts[0])
                before = second.get_metrics()["kv_peer_hit_tokens"]
                seconds = {id(prompt): first_tokens(second, prompt) for prompt in order}
                if number:  # the first round warms up
                    found.append(second.get_metrics()["kv_peer_hit_tokens"] - before)
                    pairs.append(Pair(seconds[id(prompts[0])], seconds[id(prompts[1])]))
                second.reset_prefix_cache()
                first.reset_prefix_cache()
            # judge() says theirs / ours of durations: turned round, so that 0.3 means 0.3 times as long.
            verdict = judge([Pair(pair.theirs, pair.ours) for pair in pairs], higher_is_better=False)
            floor = 0.3 if length >= 2000 else 1.05
            computed_s = statistics.median(pair.theirs for pair in pairs)
            print(f"{length} tokens of a peer: {verdict} of {computed_s * 1e3:.0f} ms   floor {floor}")
            results[str(length)] = {
                "ratio": verdict.ratio,
                "computed_s": round(computed_s, 4),
                "from_peer": statistics.median(found),
                "floor": floor,
            }
    return results


def first_tokens(llm: LLM, prompt: list[int]) -> float:
    """Seconds to the first token behind the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False)
    started_s = time.perf_counter()
    llm.generate(prompt, params, use_tqdm=False)
    return time.perf_counter() - started_s


def wait_for_keys(llm: LLM, count: int) -> None:
    """Until the peer's announcement is here; the core hears of it by itself, with its next request."""
    (peer,) = llm._running().executor._rank._tiers.transfers._stores.values()  # type: ignore[attr-defined]
    while len(peer) < count:
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    modes = {"link": link, "ttft": ttft}
    add("mode", choices=modes, nargs="?", default="link")
    add("--pairs", type=int, default=10, metavar="N")
    add("--block-bytes", type=int, nargs="+", default=[2**18, 2**20, 2**22], metavar="N")
    add("--move-bytes", type=int, default=2**28, metavar="N", help="in one run")
    add("--shared", type=int, nargs="+", default=[32, 128, 512, 2000], metavar="N", help="tokens found at the peer")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    record(f"peer-{args.mode}", modes[args.mode](args))


if __name__ == "__main__":
    main()

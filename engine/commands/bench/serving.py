"""`penstock bench serve`: loads any OpenAI-compatible server and reports latency and throughput.

Options, table and JSON keys are those of `vllm bench serve` where both have them, so either tool measures either server
and the results compare. Benchmarks of this repository send their own calls with `drive`.
"""

import argparse
import asyncio
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import uvloop
from msgspec import Meta
from tqdm import tqdm

from penstock.engine.commands.bench.datasets import DATASETS, PromptSource
from penstock.engine.commands.bench.measured import Outcome
from penstock.engine.commands.bench.report import ReportOptions, details, serving_table, summarize
from penstock.engine.config import ConfigError
from penstock.engine.http.limits import allow_open_files
from penstock.engine.options import Count, Port, Seed, built
from penstock.prove.http_client import Client, Target, key_header

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
VOCAB_SIZE = 10_000  # random token ids are below this number, which is less than any usual vocabulary has
SPARE_FILES = 64


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    backend: Literal["openai", "openai-chat", "vllm"] = "openai"
    host: str | None = None
    port: Port | None = None
    base_url: str | None = None
    endpoint: str | None = None
    model: str | None = None
    request_rate: Annotated[float, Meta(gt=0)] = math.inf
    max_concurrency: Count | None = None
    seed: Seed = 0
    ignore_eos: bool = True
    extra_body: dict[str, Any] | None = None


class EncodedCall(NamedTuple):
    """A request, encoded before the clock starts."""

    request: bytes
    prompt_len: int
    arrival_s: float = 0.0


class Run(NamedTuple):
    """The results of all calls."""

    outcomes: list[Outcome]  # in the order of the calls
    duration_s: float
    max_send_delay_s: float  # how far the generator itself fell behind the arrival times


def load_server(args: argparse.Namespace) -> int:
    """Load a server; report latency and throughput."""
    result = uvloop.run(measure(args))
    print(serving_table(result))
    built(args, ReportOptions).save(result)
    return 0 if result["completed"] else 1


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the whole benchmark; return the result, with the lists of `details` in it."""
    report, headers = built(args, ReportOptions), key_header()
    report.prepare()
    client = Client(target_of(args))
    path = endpoint_of(args)
    try:
        model = args.model or await first_model(client, headers)
        calls = build_calls(args, client.target, path, model, headers)
        finished = await drive(client, calls, args.max_concurrency, show=sys.stderr.isatty())
    finally:
        client.close()
    failures = Counter(outcome.error for outcome in finished.outcomes if outcome.error)
    for failure, count in failures.most_common(10):
        print(f"{count} failed: {failure[:300]}", file=sys.stderr)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        **summarize(finished.outcomes, finished.duration_s, report),
        "max_send_delay_ms": 1000 * finished.max_send_delay_s,
        **details(finished.outcomes),
    }


def target_of(args: argparse.Namespace) -> Target:
    """Return the server of `base_url`, or of `host` and `port`."""
    if args.base_url is None:
        port = 8000 if args.port is None else args.port
        return Target(args.host or "127.0.0.1", port)
    if args.host is not None or args.port is not None:
        raise ConfigError("base_url: given; host and port must not be given beside it")
    try:
        return Target.of(args.base_url)
    except ValueError as error:
        raise ConfigError(f"base_url: {error}") from None


def endpoint_of(args: argparse.Namespace) -> str:
    """Return the path that requests are sent to; a path of the other API is an error, as every request would fail."""
    default = CHATS if args.backend == "openai-chat" else COMPLETIONS
    path: str = args.endpoint or default
    if not re.fullmatch(r"/[!-~]*", path) or ("chat/completions" in path) != (default == CHATS):
        raise ConfigError(f"endpoint: {path!r} given; a path like {default} is expected for --backend {args.backend}")
    return path


async def first_model(client: Client, headers: dict[str, str]) -> str:
    """Return the name of the first model that the server lists. Raise ConfigError if there is no server or no model."""
    where = f"{client.target.host}:{client.target.port}"
    try:
        status, body = await client.fetch("GET", "/v1/models", headers=headers)
    except OSError as error:
        raise ConfigError(f"base_url: no server answers at {where} ({error})") from None
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        shown = body[:200].decode(errors="replace")
        raise ConfigError(f"model: {where}/v1/models lists none; give --model ({status}: {shown})") from None


def build_calls(
    args: argparse.Namespace, target: Target, path: str, model: str, headers: dict[str, str]
) -> list[EncodedCall]:
    is_chat = args.backend == "openai-chat"
    samples = DATASETS[args.dataset_name](args, PromptSource(VOCAB_SIZE, is_chat))
    times = arrival_times(len(samples), args.request_rate, random.Random(args.seed))
    if samples[0].arrival_s is not None:
        if not math.isinf(args.request_rate):
            raise ConfigError("request_rate: given; a trace has its own arrival times (see --trace-speed)")
        times = [sample.arrival_s or 0.0 for sample in samples]
    calls = []
    for sample, at_s in zip(samples, times, strict=True):
        body: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if is_chat:
            messages = [{"role": "user", "content": sample.prompt}]
            body |= {"messages": messages, "max_completion_tokens": sample.output_len}
        else:
            body |= {"prompt": sample.prompt, "max_tokens": sample.output_len}
        if args.ignore_eos:
            body["ignore_eos"] = True
        content = msgspec.json.encode(body | (args.extra_body or {}))
        request = target.request("POST", path, content, headers)
        calls.append(EncodedCall(request, sample.prompt_len, at_s))
    return calls


def arrival_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """Draw the times to send `count` requests, in seconds after the start, from a Poisson process.

    An infinite rate sends all at once. The times are scaled so that the last one is count / rate, so that two seeds put
    the same load on a server.
    """
    if math.isinf(rate):
        return [0.0] * count
    times = [*accumulate(rng.expovariate(1.0) for _ in range(count))]
    return [time * count / (rate * times[-1]) for time in times]


async def drive(
    client: Client, calls: Sequence[EncodedCall], max_concurrency: int | None = None, show: bool = False
) -> Run:
    """Send every call at its arrival time, or later if `max_concurrency` delays it in the client."""
    most = max_concurrency or len(calls)
    allow_open_files(min(len(calls), most) + SPARE_FILES)
    room, tasks = asyncio.Semaphore(most), list[asyncio.Task[Outcome]]()
    started, max_delay_s = time.perf_counter(), 0.0
    with tqdm(total=len(calls), unit="request", disable=not show) as bar:
        async with asyncio.TaskGroup() as group:
            for call in calls:
                due = started + call.arrival_s
                wait_s = due - time.perf_counter()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                max_delay_s = max(max_delay_s, time.perf_counter() - due)
                tasks.append(group.create_task(_send(client, call, room, bar.update)))
    return Run([task.result() for task in tasks], time.perf_counter() - started, max_delay_s)


async def _send(client: Client, call: EncodedCall, room: asyncio.Semaphore, ended: Callable[[], object]) -> Outcome:
    """Send one call when `max_concurrency` allows it, and measure its answer."""
    async with room:
        outcome = Outcome(call.prompt_len, time.perf_counter())
        try:
            outcome.finish(await client.exchange(call.request, outcome.take))
        except OSError as error:
            outcome.error = str(error) or repr(error)
        ended()
        return outcome

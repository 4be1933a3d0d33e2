"""`penstock bench serve`: loads any OpenAI-compatible server and reports latency and throughput.

Options, table and JSON keys are those of `vllm bench serve` where both have them, so either tool measures
either server and the results compare.
"""

import argparse
import math
import sys
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import uvloop
from msgspec import Meta

from penstock.engine.commands.bench.benchmark import Benchmark
from penstock.engine.commands.bench.calls import (
    ENDPOINTS,
    Run,
    build_calls,
    drive,
    first_model,
)
from penstock.engine.commands.bench.datasets import DatasetOptions
from penstock.engine.commands.bench.report import details, output_file, serving_table, summarize, write_json
from penstock.engine.commands.prove.http_client import Client, Target, key_header
from penstock.engine.config import ConfigError
from penstock.engine.options import Count, Delay, Length, Port, Seed, flag


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    backend: str = flag(
        "which API to call; openai-chat sends chats made of words (default: openai)",
        choices=tuple(ENDPOINTS),
        default="openai",
        opens="server",
    )
    base_url: str | None = flag("URL of the server, instead of --host and --port", "URL")
    host: str = flag("address of the server (default: %(default)s)", default="127.0.0.1")
    port: Port = flag("port of the server (default: %(default)s)", default=8000)
    model: str | None = flag("name of the model (default: the first that the server lists)")
    ready_check_timeout_sec: Delay = flag(
        "wait this many seconds for the server to be up (default: 0)", "S", default=0.0
    )
    request_rate: Annotated[float, Meta(gt=0)] = flag(
        "requests per second, as a Poisson process (default: all at once)", "R", default=math.inf, opens="traffic"
    )
    max_concurrency: Count | None = flag("hold requests back while this many are in flight", "N")
    num_warmups: Length = flag("requests before the measured ones (default: 0)", "N", default=0)
    seed: Seed = flag("of prompts, lengths and arrivals (default: 0)", default=0)
    random_vocab_size: Count = flag(
        "draw token ids below this number (default: %(default)s)", "N", default=10_000, opens="requests"
    )
    tokenizer: str | None = flag(
        "model whose tokenizer counts texts (default: four characters count as a token)", "MODEL"
    )
    ignore_eos: bool = flag("generate exactly the length asked for (default: on)", has_off=True, default=True)
    extra_body: dict[str, Any] | None = flag(
        "further fields of every request, like temperature; they override the others", "JSON"
    )
    output_json: str | None = flag(
        "write the result as JSON, with times, text and error of every request", "FILE", read=output_file
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when at least one request was completed."""
    result = uvloop.run(measure(args))
    print(serving_table(result))
    write_json(args.output_json, result)
    return 0 if result["completed"] else 1


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the whole benchmark; return the result, with the lists of `details` in it."""
    host = f"[{args.host}]" if ":" in args.host else args.host
    base_url = args.base_url or f"http://{host}:{args.port}"
    try:
        client = Client(Target.of(base_url))
    except ValueError as error:
        raise ConfigError(f"base_url: {error}") from None
    try:
        model, finished = await _load(client, args)
    finally:
        client.close()
    explain_failures(finished)
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "max_concurrency": args.max_concurrency,
        **summarize(finished.outcomes, finished.duration_s),
        "max_send_delay_ms": 1000 * finished.max_send_delay_s,
        **details(finished.outcomes),
    }


async def _load(client: Client, args: argparse.Namespace) -> tuple[str, Run]:
    headers = key_header()
    model = args.model
    if model is None or args.ready_check_timeout_sec:
        listed = await first_model(client, headers, args.ready_check_timeout_sec)
        model = model or listed
    warmups, calls = build_calls(args, client.target, model, headers)
    if warmups:
        explain_failures(await drive(client, warmups, args.max_concurrency))
    return model, await drive(client, calls, args.max_concurrency, show=sys.stderr.isatty())


def explain_failures(finished: Run) -> None:
    """Print each kind of failure once, the most frequent first."""
    kinds = Counter(outcome.error for outcome in finished.outcomes if outcome.error)
    for error, count in kinds.most_common(10):
        print(f"{count} failed: {error[:300]}", file=sys.stderr)


SERVE = Benchmark(
    *("serve", "Load a server; report latency and throughput.", run),
    options=(ServingOptions, DatasetOptions),
    takes_engine_options=False,
)

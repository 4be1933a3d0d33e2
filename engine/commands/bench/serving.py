"""`penstock bench serve`: loads any OpenAI-compatible server and reports latency and throughput.

Options, table and JSON keys are those of `vllm bench serve` where both have them, so either tool measures
either server and the results compare.
"""

import argparse
import json
import math
import sys
from typing import Any

from penstock.engine.commands.bench.calls import ENDPOINTS, build_calls, first_model, headers_of, pair, wait_until_up
from penstock.engine.commands.bench.datasets import add_dataset_options
from penstock.engine.commands.bench.http_client import Client, Target
from penstock.engine.commands.bench.load import Run, drive
from penstock.engine.commands.bench.report import serving_table
from penstock.engine.commands.bench.results import description, explain_failures, save
from penstock.engine.commands.bench.structured import add_structured_options
from penstock.engine.commands.bench.summary import METRICS, OBJECTIVES, details, summarize
from penstock.engine.config import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=ENDPOINTS, default="openai", help="openai-chat sends chats of words (default: openai)")
    add("--base-url", metavar="URL", help="in place of --host and --port")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=8000, help="default: %(default)s")
    add("--endpoint", metavar="PATH", help="default: by --backend, /v1/completions or /v1/chat/completions")
    add("--model", help="default: the first that the server lists")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="with every request")
    add("--insecure", action="store_true", help="do not verify a TLS certificate")
    add("--ready-check-timeout-sec", type=float, default=0, metavar="S", help="wait this long for the server to be up")
    _add_traffic(parser)
    add_dataset_options(parser)
    add_structured_options(parser)
    parser.add_argument(
        "--random-vocab-size", type=int, default=10_000, metavar="N", help="token ids are drawn below it"
    )
    parser.add_argument(
        "--tokenizer", metavar="MODEL", help="counts a dataset's texts (default: four characters are a token)"
    )
    _add_requests(parser)
    _add_results(parser)


def _add_traffic(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("traffic").add_argument
    add("--request-rate", type=float, default=math.inf, metavar="R", help="requests per second (default: all at once)")
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="B",
        help="1: Poisson arrivals; less: bursts; more: more even (default: 1)",
    )
    add("--max-concurrency", type=int, metavar="N", help="hold requests back while this many are in flight")
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="let the rate change over the requests")
    add("--ramp-up-start-rps", type=float, metavar="R", help="requests per second at the first")
    add("--ramp-up-end-rps", type=float, metavar="R", help="and at the last")
    add("--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones (default: 0)")
    add("--seed", type=int, default=0, help="of prompts, lengths and arrivals (default: 0)")


def _add_requests(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("requests").add_argument
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="generate exactly the length asked for (default: on)",
    )
    add("--temperature", type=float, metavar="T", help="default: the server's, for all of these")
    add("--top-p", type=float, metavar="P")
    add("--top-k", type=int, metavar="K")
    add("--min-p", type=float, metavar="P")
    add("--extra-body", type=json.loads, default={}, metavar="JSON", help="fields for every request; they win")


def _add_results(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("results").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", metavar="LIST", help=f"of {','.join(METRICS)}")
    add("--metric-percentiles", default="99", metavar="LIST", help="like 50,90,99.9 (default: 99)")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help=f"count requests within limits of {', '.join(OBJECTIVES)}",
    )
    add("--save-result", action="store_true", help="write the result as JSON")
    add("--save-detailed", action="store_true", help="with the lists of every request's times, texts and errors")
    add("--append-result", action="store_true", help="add a line to the file instead of replacing it")
    add("--result-dir", metavar="DIR", help="default: the current directory")
    add("--result-filename", metavar="NAME", help="default: LABEL-RATEqps-MODEL-DATE.json")
    add("--label", help="default: the backend")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="entries to add to the result")
    add("--disable-tqdm", action="store_true", help="no live progress line")


def run(args: argparse.Namespace) -> int:
    """0 when at least one request was completed."""
    import uvloop

    result = uvloop.run(measure(args))
    print(serving_table(result))
    if args.save_result or args.append_result:
        print(f"written to {save(result, args)}")
    return 0 if result["completed"] else 1


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark; the result as it is saved, with the lists of `details` in it."""
    metrics, percents, objectives = _selection(args)
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    try:
        client = Client(Target.of(base_url, verify=not args.insecure))
    except ValueError as error:
        raise ConfigError(f"base_url: {error}") from None
    try:
        model, finished = await _load(client, args)
    finally:
        client.close()
    explain_failures(finished)
    if args.max_concurrency is not None:
        metrics = [*metrics, "client_queue_time"]
    return {
        **description(args, model),
        **summarize(finished.outcomes, finished.duration_s, metrics, percents, objectives),
        "max_send_delay_ms": 1000 * finished.max_send_delay_s,
        **details(finished.outcomes),
    }


async def _load(client: Client, args: argparse.Namespace) -> tuple[str, Run]:
    headers = headers_of(args)
    await wait_until_up(client, headers, args.ready_check_timeout_sec)
    model = args.model or await first_model(client, headers)
    warmups, calls = build_calls(args, client.target, model, headers)
    if warmups:
        explain_failures(await drive(client, warmups, args.max_concurrency))
    show = not args.disable_tqdm and sys.stderr.isatty()
    return model, await drive(client, calls, args.max_concurrency, show)


def _selection(args: argparse.Namespace) -> tuple[list[str], list[float], dict[str, float]]:
    """What to report, checked before the load is put on a server for minutes."""
    for item in args.metadata:
        pair("metadata", item)
    metrics = args.percentile_metrics.split(",")
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"percentile_metrics: {name!r} given; known are {', '.join(METRICS)}")
    percents = [_number("metric_percentiles", text) for text in args.metric_percentiles.split(",")]
    if not all(0 <= percent <= 100 for percent in percents):
        raise ConfigError(f"metric_percentiles: {args.metric_percentiles} given; each is 0 to 100")
    objectives = {}
    for item in args.goodput:
        name, _, limit = item.partition(":")
        if name not in OBJECTIVES:
            raise ConfigError(f"goodput: {item!r} given; write NAME:MS with a name of {', '.join(OBJECTIVES)}")
        objectives[name] = _number("goodput", limit)
    return [name for name in metrics if name != "client_queue_time"], percents, objectives


def _number(field: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{field}: {text!r} given; a number is expected") from None

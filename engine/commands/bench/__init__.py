"""`penstock bench`: measures a server from outside (serve, startup) or the engine itself (throughput, latency)."""

import argparse
from collections.abc import Callable

from penstock.engine.commands.bench.datasets import DatasetOptions
from penstock.engine.commands.bench.offline import LatencyOptions, OfflineOptions, latency, throughput
from penstock.engine.commands.bench.report import ReportOptions
from penstock.engine.commands.bench.serving import ServingOptions, load_server
from penstock.engine.commands.bench.startup import StartupOptions, time_starts
from penstock.engine.config import ConfigError
from penstock.engine.engine_options import EngineOptions
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.model_error import ModelError
from penstock.engine.options import Declared, add_options, built, check
from penstock.engine.vllm_options import add_ignored_options
from penstock.executor.protocol import ExecutorError

USER_ERRORS = (ConfigError, ExecutorError, InvalidRequest, ModelError)
# The function of each benchmark, whose docstring is the help text, and its options.
BENCHMARKS: dict[str, tuple[Callable[[argparse.Namespace], int], tuple[type[Declared], ...]]] = {
    "serve": (load_server, (ServingOptions, ReportOptions, DatasetOptions)),
    "throughput": (throughput, (OfflineOptions, DatasetOptions, EngineOptions)),
    "latency": (latency, (OfflineOptions, LatencyOptions, EngineOptions)),
    "startup": (time_starts, (StartupOptions,)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", dest="benchmark")
    for name, (measure, options) in BENCHMARKS.items():
        summary = measure.__doc__
        benchmark = benchmarks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        for kind in options:
            add_options(benchmark, kind)
        if EngineOptions in options:
            add_ignored_options(benchmark)


def run(args: argparse.Namespace) -> int:
    measure, options = BENCHMARKS[args.benchmark]
    for kind in options:
        check_options(args, kind)
    return measure(args)


def check_options(args: argparse.Namespace, kind: type[Declared]) -> None:
    """Check a command's own options on its command line; raise ConfigError if one is invalid."""
    try:
        check(built(args, kind))
    except ValueError as error:
        raise ConfigError(str(error)) from None

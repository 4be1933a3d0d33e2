"""`penstock bench`: measures a server from outside (serve, startup) or the engine itself (throughput, latency)."""

import argparse

from penstock.engine.commands.bench import offline, serving, startup
from penstock.engine.config import ConfigError
from penstock.engine.model_files import ModelError
from penstock.engine.sampling_params import InvalidRequest
from penstock.executor.protocol import ExecutorError

USER_ERRORS = (ConfigError, ExecutorError, InvalidRequest, ModelError)


BENCHMARKS = (serving.SERVE, offline.THROUGHPUT, offline.LATENCY, startup.STARTUP)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for each in BENCHMARKS:
        benchmark = benchmarks.add_parser(each.name, help=each.summary, description=each.summary, allow_abbrev=False)
        each.add_arguments(benchmark)
        benchmark.set_defaults(run_benchmark=each.run)


def run(args: argparse.Namespace) -> int:
    code: int = args.run_benchmark(args)
    return code

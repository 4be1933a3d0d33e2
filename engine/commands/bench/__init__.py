"""`penstock bench`: measures a server from outside (serve, startup) or the engine itself (throughput, latency)."""

import argparse

from penstock.engine.commands.bench import offline, serving, startup
from penstock.engine.config import ConfigError
from penstock.engine.model_files import ModelError
from penstock.engine.sampling_params import InvalidRequest
from penstock.executor.protocol import ExecutorError

USER_ERRORS = (ConfigError, ExecutorError, InvalidRequest, ModelError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for name, add, measure, summary in (
        ("serve", serving.add_arguments, serving.run, "Load a server; report latency and throughput."),
        ("throughput", offline.add_throughput_arguments, offline.throughput, "Run many requests without a server."),
        ("latency", offline.add_latency_arguments, offline.latency, "Time one batch of requests without a server."),
        ("startup", startup.add_arguments, startup.run, "Time the start of a server up to its first token."),
    ):
        benchmark = benchmarks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        add(benchmark)
        benchmark.set_defaults(measure=measure)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code

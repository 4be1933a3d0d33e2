"""`penstock bench`: measures a server from outside (serve, startup) or the engine itself (throughput, latency)."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from penstock.engine.commands.bench import latency, startup, throughput
    from penstock.engine.commands.bench import serving as serve

    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    for name, module, summary in (
        ("serve", serve, "Load any OpenAI-compatible server; report latency and throughput."),
        ("throughput", throughput, "Measure the throughput of the engine with many requests, without a server."),
        ("latency", latency, "Measure how long one batch of requests takes, without a server."),
        ("startup", startup, "Measure the time from starting a server to its first token."),
    ):
        benchmark = benchmarks.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        module.add_arguments(benchmark)
        benchmark.set_defaults(measure=module.run)


def run(args: argparse.Namespace) -> int:
    code: int = args.measure(args)
    return code

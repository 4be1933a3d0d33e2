"""Declares a benchmark: adds its options to a parser, checks them and measures."""

import argparse
from collections.abc import Callable
from typing import NamedTuple

from penstock.engine.config import add_engine_options, chosen
from penstock.engine.options import Declared, add_options


class Benchmark(NamedTuple):
    name: str
    summary: str
    measure: Callable[[argparse.Namespace], int]
    options: tuple[type[Declared], ...]
    takes_engine_options: bool = True

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        for kind in self.options:
            add_options(parser, kind)
        if self.takes_engine_options:
            add_engine_options(parser)

    def check(self, args: argparse.Namespace) -> None:
        """Raise ConfigError if an option is invalid."""
        for kind in self.options:
            chosen(args, kind)

    def run(self, args: argparse.Namespace) -> int:
        self.check(args)
        return self.measure(args)

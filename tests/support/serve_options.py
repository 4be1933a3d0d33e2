"""Checks a command line of `penstock serve` as far as that goes without the files of a model."""

import argparse

from penstock.engine.commands import serve
from penstock.engine.engine_options import EngineOptions, engine_config
from penstock.engine.options import given_options


def check_serve(args: argparse.Namespace) -> None:
    server = serve.server_config(args, "model", {})
    serve.check_adapters(engine_config("model", given_options(args, EngineOptions)), server)

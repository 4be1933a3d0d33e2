"""`penstock deploy` whose replicas are those of mock_serve.py."""

import argparse
import sys

from penstock.cli import main
from penstock.engine import serve
from penstock.router import deploy
from penstock.router import serve as route
from penstock.router.deploy.file import Command

if __name__ == "__main__":
    import penstock.cli as cli

    replica = Command(("tests.router.deploy.mock_serve", "serve"), serve.add_arguments, serve.check)
    router = Command(("penstock.cli", "route"), route.add_arguments, route.check)

    def run(args: argparse.Namespace) -> int:
        return deploy.run(args, replica, router)

    cli._COMMANDS["deploy"] = ("", lambda: (deploy.add_arguments, run))
    sys.exit(main(["deploy", *sys.argv[1:]]))

"""`penstock deploy` whose replicas are those of mock_serve.py."""

import sys

from penstock import cli
from penstock.engine.commands import serve
from penstock.router import deploy
from penstock.router import serve as route
from penstock.router.deploy.file import Command

REPLICA = Command(("tests.support.mock_serve", "serve"), serve)
ROUTER = Command(("penstock.cli", "route"), route)

if __name__ == "__main__":
    cli._COMMANDS["deploy"] = ("", lambda: (deploy.add_arguments, lambda args: deploy.run(args, REPLICA, ROUTER)))
    sys.exit(cli.main(["deploy", *sys.argv[1:]]))

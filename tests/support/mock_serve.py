"""`penstock serve` with its own flags, over the engine of mock_replica.py: up in a second, at the speed of a GPU.

`seed` in its file makes a version; a negative one is a version that dies while it loads.
"""

import argparse
import os
import sys

import uvloop

from penstock.engine.commands.serve import add_arguments
from penstock.engine.server.server_config import ServerConfig, resolve
from tests.support.mock_replica import MODEL, add_engine_arguments, replica


def main() -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(sys.argv[2:])  # after "serve"
    if (given.seed or 0) < 0:
        print("penstock: the weights are no good", file=sys.stderr)
        return 3
    settings = argparse.ArgumentParser()
    add_engine_arguments(settings)
    server = ServerConfig(
        host=given.host, port=given.port, drain_timeout_s=given.drain_timeout_s, served_model_names=(MODEL,)
    )
    options = settings.parse_args(["--inter-token-s", "0.01"])

    def announce(url: str) -> None:
        print(f"Ready after 0.1 s: {url}", flush=True)

    return uvloop.run(replica(options, resolve(server, os.environ), announce))


if __name__ == "__main__":
    sys.exit(main())

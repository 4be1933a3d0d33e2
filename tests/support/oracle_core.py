"""The engine core's process over the oracle executor (tests/support/oracle_engine.py)."""

import sys

from penstock.engine.core import process
from tests.support.oracle import OracleExecutor


def main() -> int:
    return process.main(lambda config, progress: OracleExecutor(config))


if __name__ == "__main__":
    sys.exit(main())

"""The engine core's process over the oracle executor (tests/support/oracle_engine.py)."""

import sys

from penstock.core_process import make_compiler
from penstock.engine.core import process
from tests.support.oracle import OracleExecutor


def main() -> int:
    return process.run(lambda config, progress: OracleExecutor(config), make_compiler)


if __name__ == "__main__":
    sys.exit(main())

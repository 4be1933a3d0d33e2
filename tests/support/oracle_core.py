"""The engine core's process over the oracle executor (tests/support/oracle_engine.py)."""

import sys

from penstock.engine.core.process import main
from tests.support.oracle import OracleExecutor

if __name__ == "__main__":
    sys.exit(main(lambda config, progress: OracleExecutor(config)))

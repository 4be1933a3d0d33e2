"""The engine core's process over the oracle executor (tests/support/oracle_engine.py)."""

import sys

from penstock.engine.core import process
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import load_vocabulary
from tests.support.oracle import OracleExecutor


def main() -> int:
    return process.run(
        lambda config, progress: OracleExecutor(config),
        lambda config, info: Compiler(lambda: load_vocabulary(config, info)),
    )


if __name__ == "__main__":
    sys.exit(main())

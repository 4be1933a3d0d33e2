"""The process of the engine core, with the executors and the grammars that it uses. It is part of the composition root.

The server starts it as a child process (engine/front/client.py); its loop is in engine/core/process.py.
"""

from penstock.engine.core import process
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import load_vocabulary
from penstock.executor.protocol import ExecutorConfig, ModelInfo
from penstock.executors import open_executor


def make_compiler(config: ExecutorConfig, info: ModelInfo) -> Compiler:
    """Return a compiler that loads the vocabulary of the executor's model when the first grammar needs it."""
    return Compiler(lambda: load_vocabulary(config, info))


def main() -> int:
    return process.run(open_executor, make_compiler)

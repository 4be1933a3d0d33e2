"""The process of the engine core, with the executors and the grammars that it uses. It is part of the composition root.

The server starts it as a child process (engine/front/client.py); its loop is in engine/core/process.py.
"""

from penstock.engine.core import process
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.model_files import resolve_model
from penstock.engine.text.model_text import load_tokenizer
from penstock.executor.protocol import ExecutorConfig, ModelInfo
from penstock.executors import open_executor


def make_compiler(config: ExecutorConfig, info: ModelInfo) -> Compiler:
    """Return a compiler that loads the vocabulary of the executor's model when the first grammar needs it."""

    def load() -> GrammarVocabulary:
        tokenizer = load_tokenizer(resolve_model(config.model, need_weights=False))
        return GrammarVocabulary(tokenizer, info.vocab_size)

    return Compiler(load)


def main() -> int:
    return process.run(open_executor, make_compiler)

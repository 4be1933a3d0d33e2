"""A vocabulary of bytes, and an engine core over the oracle executor that answers within grammars."""

import re
import threading
from typing import Any

from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.messages import Submit
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.protocol import Sampling
from tests.support import simulation
from tests.support.fake_engine import EOS, byte_tokenizer
from tests.support.refusals import cases
from tests.support.simulation import CoreRig

VOCAB_SIZE = 300  # more logits than tokens, as models often have


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_tokenizer(), VOCAB_SIZE)


COMPILER = Compiler(vocabulary)  # shared by tests, whose grammars it keeps


class GatedCompiler(Compiler):
    """A compiler that loads its vocabulary, or compiles grammars with "slow" in them, only when its gate is open."""

    def __init__(self, *, is_vocabulary_gated: bool = False) -> None:
        self.gate = threading.Event()
        super().__init__(self._load_when_open if is_vocabulary_gated else vocabulary)

    def _load_when_open(self) -> GrammarVocabulary:
        assert self.gate.wait(60)
        return vocabulary()

    def _compile(self, source: str) -> Matcher:
        assert "slow" not in source or self.gate.wait(60)
        return super()._compile(source)


def matcher(**outputs: Any) -> Matcher:
    state = COMPILER.start(grammar_source(StructuredOutputs(**outputs))).result.result(60)
    assert isinstance(state, Matcher)
    return state


def accepts(state: Matcher, text: str) -> bool:
    """Return whether the whole text is an answer."""
    return all(state.advance([byte]) for byte in text.encode()) and state.backend.is_accepting()


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


def submit(
    request_id: str, tokens: list[int], outputs: StructuredOutputs | None, max_tokens: int = 40, **options: Any
) -> Submit:
    grammar = None if outputs is None else grammar_source(outputs)
    defaults = {"sampling": Sampling(temperature=0.0, stop_ids=(EOS,)), "grammar": grammar}
    return simulation.submit(request_id, tokens, max_tokens, **{**defaults, **options})


class Core(CoreRig):
    """A core with a vocabulary of bytes, and the shared compiler of grammars unless another is given."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **{"vocab_size": VOCAB_SIZE, "compiler": COMPILER, **options})


# Forms for random requests, and patterns of their complete answers.
FORMS: list[tuple[StructuredOutputs, re.Pattern[str]]] = cases(__file__, "forms", **globals())

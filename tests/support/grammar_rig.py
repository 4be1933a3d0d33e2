"""A vocabulary of bytes, and an engine core over the oracle executor that answers within grammars."""

import re
from typing import Any

import numpy as np

from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.matcher import Matcher
from penstock.engine.grammar.source import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.messages import Submit
from penstock.engine.sampling_params import StructuredOutputs
from penstock.executor.protocol import Sampling
from tests.support.fake_engine import EOS, byte_tokenizer
from tests.support.simulation import CoreRig

VOCAB_SIZE = 300  # more logits than tokens, as models often have


def vocabulary() -> GrammarVocabulary:
    return GrammarVocabulary(byte_tokenizer(), VOCAB_SIZE)


COMPILER = Compiler(vocabulary)  # shared: what one test compiled, the next may find


def matcher(**wanted: Any) -> Matcher:
    state = COMPILER.start(grammar_source(StructuredOutputs(**wanted))).result.result(60)
    assert isinstance(state, Matcher)
    return state


def accepts(found: Matcher, text: str) -> bool:
    """Whether the whole text is an answer."""
    return all(found.advance([byte]) for byte in text.encode()) and found.backend.is_accepting()


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token != EOS).decode()


def submit(
    request_id: str, tokens: list[int], wanted: StructuredOutputs | None, max_tokens: int = 40, **options: Any
) -> Submit:
    sampling = options.pop("sampling", None) or Sampling(temperature=0.0, stop_ids=(EOS,))
    grammar = None if wanted is None else grammar_source(wanted)
    prompt = np.array(tokens, "<i4").tobytes()
    return Submit(request_id, prompt, sampling, max_tokens, grammar=grammar, **options)


class Core(CoreRig):
    """A core with a vocabulary of bytes, and the shared compiler of grammars unless another is given."""

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **{"vocab_size": VOCAB_SIZE, "compiler": COMPILER, **options})


# What random requests ask for, and how their complete answers look.
WANTED: list[tuple[StructuredOutputs, re.Pattern[str]]] = [
    (StructuredOutputs(regex="[a-c]{2,9}"), re.compile("[a-c]{2,9}")),
    (StructuredOutputs(choice=["yes", "no", "perhaps"]), re.compile("yes|no|perhaps")),
    (StructuredOutputs(json={"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3}), re.compile(r"(?s)\[.*\]")),
    (StructuredOutputs(grammar='start: "x" /[0-9]{1,4}/ ("," "y")?'), re.compile("x[0-9]{1,4}(,y)?")),
]

"""Constrained answers over tokenizers of every kind: a text that a grammar forces is cut into tokens of exactly its bytes."""

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.engine.core.engine_core import EngineCore
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import ExactEncoder, GrammarVocabulary, _another
from penstock.engine.sampling_params import StructuredOutputs
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import Sampling
from tests.support import text_samples as samples
from tests.support.grammar_rig import Core, submit
from tests.support.refusals import hardest

CHOICES = [
    ["yes", "no", "maybe so"],
    [" begins with a blank", " begins with two"],
    ["  two blanks", "\ta tab", "\na line"],
    ["▁the mark itself", "▁▁"],
    ["é😀 and 北京", "</s> is text here", "<0x41>"],
]


@pytest.fixture(params=samples.FAMILIES)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(samples.FAMILIES[request.param]())


def test_a_forced_text_is_cut_into_tokens_of_its_very_bytes(tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)]
    encode = ExactEncoder(tokenizer.backend, tokens, tokenizer.special_ids, 0)
    for text in [*samples.texts(200), *(text for texts in CHOICES for text in texts)]:
        ids = encode(text)
        written = b"".join(tokens[token_id] for token_id in ids)
        assert written == text.encode() or (not writes_anything(tokenizer) and text.encode().startswith(written)), text
        assert not {*ids} & {*tokenizer.special_ids}


def test_the_second_tokenizer_cuts_as_one_that_was_read_anew(tokenizer: Tokenizer) -> None:
    tokenizer.backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("北京", lstrip=True)])
    tokenizer.backend.add_special_tokens(["<|end|>"])
    cut, read = _another(tokenizer.backend), Backend.from_str(tokenizer.backend.to_str())
    assert cut.get_added_tokens_decoder().keys() == read.get_added_tokens_decoder().keys()
    cut.encode_special_tokens = read.encode_special_tokens = True
    for text in [*samples.texts(200), "a<tool>b <|end|></s> 北京", *(text for texts in CHOICES for text in texts)]:
        assert cut.encode(text, add_special_tokens=False).ids == read.encode(text, add_special_tokens=False).ids, text
    assert not tokenizer.backend.encode_special_tokens


@pytest.mark.parametrize("max_in_flight", hardest([1, 2], 2))
@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_is_answered_beside_others(tokenizer: Tokenizer, choice: list[str], max_in_flight: int) -> None:
    world = Core(max_in_flight=max_in_flight, compiler=compiler_of(tokenizer), vocab_size=tokenizer.vocab_size)
    for number in range(6):
        sampling = Sampling(temperature=1.0, seed=number)
        world.submit(submit(f"r{number}", [40, 41], StructuredOutputs(choice=choice), 60, sampling=sampling))
    world.submit(submit("free", [40, 41], None, 8, sampling=Sampling(temperature=0.0)))
    world.run()
    for number in range(6):
        text = b"".join(tokenizer.token_bytes(token) for token in world.tokens(f"r{number}")).decode()
        if world.last(f"r{number}").finish_reason != "stop":  # what the vocabulary cannot write
            assert not writes_anything(tokenizer) and not set("".join(choice)).isdisjoint("▁é😀北京")
            continue
        assert text in choice
    assert len(world.tokens("free")) == 8


def test_a_grammar_that_refuses_what_it_forces_ends_its_own_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that is wrong about its own tokens: the library forces what it will not take."""
    tokenizer = Tokenizer(samples.byte_level())
    monkeypatch.setattr(ExactEncoder, "__call__", lambda self, text: self._encode(" " + text))
    world = Core(compiler=compiler_of(tokenizer), vocab_size=tokenizer.vocab_size)
    world.submit(submit("wrong", [40], StructuredOutputs(choice=["yes", "maybe so"]), 60))
    world.submit(submit("free", [40], None, 8, sampling=Sampling(temperature=0.0)))
    world.run()
    assert world.last("wrong").finish_reason == "error"
    assert "the grammar cannot go on" in (world.last("wrong").error or "")
    assert len(world.tokens("free")) == 8 and isinstance(world.core, EngineCore)


def writes_anything(tokenizer: Tokenizer) -> bool:
    """Return whether a character without a token can be written byte by byte."""
    return {bytes((byte,)) for byte in range(256)} <= set(map(tokenizer.token_bytes, range(tokenizer.vocab_size)))


def compiler_of(tokenizer: Tokenizer) -> Compiler:
    compiler = Compiler(lambda: GrammarVocabulary(tokenizer, tokenizer.vocab_size))
    compiler.start(grammar_source(StructuredOutputs(choice=["warm"]))).result.result(60)
    return compiler

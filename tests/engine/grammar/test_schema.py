"""The grammars of JSON schemas and of the other forms accept their answers; others are refused with a reason. Over tokenizers of
every kind, a text that a grammar forces is cut into tokens of exactly its bytes."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from penstock.engine import sampling_params
from penstock.engine.core.engine_core import EngineCore
from penstock.engine.core.grammars import GrammarRefused
from penstock.engine.grammar.compiler import Compiler
from penstock.engine.grammar.json_schema import prepared
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.grammar.vocabulary import ExactEncoder, GrammarVocabulary, _another
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import SamplingParams, StructuredOutputs
from penstock.engine.text.tokenizer import Tokenizer
from penstock.executor.protocol import Sampling
from tests.support import text_samples as samples
from tests.support.fake_engine import compile_within_limits
from tests.support.grammar_rig import COMPILER, Core, accepts, matcher, submit
from tests.support.refusals import cases, hardest, table

ABC = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "cc": {}}}
_DATA = json.loads(Path(__file__).with_name("schema.json").read_text())
KEYWORDS: list[Any] = _DATA["keywords"]
ODD_VALUES: list[Any] = _DATA["odd values"]
# form, what it accepts whole, what it does not
CORPUS: list[Any] = _DATA["corpus"]


@pytest.mark.parametrize(("form", "good", "bad"), CORPUS, ids=lambda value: json.dumps(value)[:60])
def test_a_form_accepts_its_answers_and_no_others(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(**form), text), text
    for text in bad:
        assert not accepts(matcher(**form), text), text


@pytest.mark.parametrize(("schema", "reason"), table(__file__, "schemas", ABC=ABC))
def test_a_schema_that_no_grammar_holds_is_refused_with_the_reason(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidRequest, GrammarRefused)) as caught:
        compile_within_limits(COMPILER, grammar_source(StructuredOutputs(json=schema)))
    assert str(caught.value).removeprefix("structured_outputs.json: ").startswith(reason)


def test_a_one_of_counts_as_any_of_where_the_user_allows_it() -> None:
    number = {"oneOf": [{"type": "integer"}, {"type": "number"}], "x-guidance": {"coerce_one_of": True}}
    with pytest.raises(GrammarRefused, match=r".* oneOf .* structured_outputs.coerce_one_of"):
        compile_within_limits(COMPILER, grammar_source(StructuredOutputs(json=number)))
    assert accepts(matcher(json=number, coerce_one_of=True), "1.5")
    assert not accepts(matcher(json=number, coerce_one_of=True), '"a"')
    with pytest.raises(InvalidRequest, match="structured_outputs.coerce_one_of: regex holds no oneOf"):
        StructuredOutputs(regex="a", coerce_one_of=True).check()


def test_a_keyword_of_any_shape_is_taken_or_refused_but_breaks_nothing() -> None:
    rng = random.Random(5)
    for _ in range(1000):
        inner = {rng.choice(KEYWORDS): rng.choice(ODD_VALUES) for _ in range(3)}
        schema = {**inner, rng.choice(KEYWORDS): rng.choice([inner, [inner, inner], {"a": inner}])}
        assert prepared(schema, "field")


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(("form", "field", "words"), table(__file__, "sources", **vars(sampling_params) | globals()))
def test_an_objection_names_the_field_and_says_what_is_wrong(form: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        outputs = StructuredOutputs(**form)
        SamplingParams(structured_outputs=outputs).check(100)
        grammar_source(outputs)
    assert caught.value.field == field


@pytest.mark.parametrize("fields", cases(__file__, "one form", **vars(sampling_params) | globals()))
def test_one_form_is_accepted_and_survives_the_wire(fields: dict[str, Any]) -> None:
    outputs = StructuredOutputs(**fields)
    SamplingParams(structured_outputs=outputs).check(100)
    assert msgspec.json.decode(msgspec.json.encode(outputs), type=StructuredOutputs) == outputs
    assert outputs.kind == list(fields)[-1]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="whitespace"):
        msgspec.json.decode(json.dumps({"regex": "a", "whitespace": 1}), type=StructuredOutputs)


CHOICES: list[list[str]] = cases(__file__, "choices of forced texts")


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

"""The grammars of JSON schemas and of the other forms accept their answers; others are refused with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core.grammars import GrammarRefused
from penstock.engine.grammar.json_schema import prepared
from penstock.engine.grammar.source import grammar_source
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import MAX_GRAMMAR_DEPTH, StructuredOutputs
from tests.support.fake_engine import compile_within_limits
from tests.support.grammar_rig import COMPILER, accepts, matcher
from tests.support.refusals import table

ABC = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "cc": {}}}
KINDS = {
    kind: {"type": "object", "properties": {"kind": {"const": kind}, kind: {}}, "required": ["kind"]}
    for kind in ("cat", "dog")
}
_DATA = json.loads(Path(__file__).with_name("schema.json").read_text())
KEYWORDS: list[Any] = _DATA["keywords"]
ODD_VALUES: list[Any] = [
    *(None, True, 1.5, -1, "a[", "http://[", [], [3, None], [{"a": []}], {}, {"a": 3}, {"type": [[]]}, [["a"]])
]
# schema, what it holds, what it does not
HELD: list[Any] = _DATA["held"]


@pytest.mark.parametrize(("schema", "good", "bad"), HELD, ids=lambda value: json.dumps(value)[:60])
def test_a_schema_holds_what_it_says(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(json=schema), text), text
    for text in bad:
        assert not accepts(matcher(json=schema), text), text


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


# form, what it accepts whole, what it does not
CORPUS: list[Any] = json.loads(Path(__file__).with_name("source.json").read_text())["corpus"]


@pytest.mark.parametrize(("form", "good", "bad"), CORPUS)
def test_a_form_accepts_its_answers_and_no_others(form: dict[str, Any], good: list[str], bad: list[str]) -> None:
    for text in good:
        assert accepts(matcher(**form), text), text
    for text in bad:
        assert not accepts(matcher(**form), text), text


def test_whitespace_between_the_tokens_of_json_is_bounded() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    assert accepts(matcher(json=schema), '{\n\t"name": "Ann"\n}')
    assert not accepts(matcher(json=schema), '{  "name": "Ann"}')
    assert not accepts(matcher(json=schema), '{\n\n"name": "Ann"}')


@pytest.mark.parametrize(("form", "field", "words"), table(__file__, "sources", MAX_GRAMMAR_DEPTH=MAX_GRAMMAR_DEPTH))
def test_an_objection_names_the_field_and_says_what_is_wrong(form: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        outputs = StructuredOutputs(**form)
        outputs.check()
        grammar_source(outputs)
    assert caught.value.field == field

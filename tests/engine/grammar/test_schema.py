"""The grammars of JSON schemas and of the other forms accept their answers; others are refused with a reason."""

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engine.core.grammars import GrammarRefused
from penstock.engine.grammar.json_schema import prepared
from penstock.engine.grammar.rules import grammar_source
from penstock.engine.invalid_request import InvalidRequest
from penstock.engine.sampling_params import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_GRAMMAR_DEPTH,
    SamplingParams,
    StructuredOutputs,
)
from tests.support.fake_engine import compile_within_limits
from tests.support.grammar_rig import COMPILER, accepts, matcher
from tests.support.refusals import cases, table

ABC = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}, "cc": {}}}
_DATA = json.loads(Path(__file__).with_name("schema.json").read_text())
KEYWORDS: list[Any] = _DATA["keywords"]
ODD_VALUES: list[Any] = [
    *(None, True, 1.5, -1, "a[", "http://[", [], [3, None], [{"a": []}], {}, {"a": 3}, {"type": [[]]}, [["a"]])
]
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


NAMES: dict[str, Any] = {"nested": nested, "MAX_CHOICES": MAX_CHOICES}
NAMES |= {"MAX_GRAMMAR_CHARS": MAX_GRAMMAR_CHARS, "MAX_GRAMMAR_DEPTH": MAX_GRAMMAR_DEPTH}


@pytest.mark.parametrize(("form", "field", "words"), table(__file__, "sources", **NAMES))
def test_an_objection_names_the_field_and_says_what_is_wrong(form: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        outputs = StructuredOutputs(**form)
        SamplingParams(structured_outputs=outputs).check(100)
        grammar_source(outputs)
    assert caught.value.field == field


@pytest.mark.parametrize("fields", cases(__file__, "one form", **NAMES))
def test_one_form_is_accepted_and_survives_the_wire(fields: dict[str, Any]) -> None:
    outputs = StructuredOutputs(**fields)
    SamplingParams(structured_outputs=outputs).check(100)
    assert msgspec.json.decode(msgspec.json.encode(outputs), type=StructuredOutputs) == outputs
    assert outputs.kind == list(fields)[-1]


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="whitespace"):
        msgspec.json.decode(json.dumps({"regex": "a", "whitespace": 1}), type=StructuredOutputs)

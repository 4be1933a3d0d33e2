"""From what is asked for to a grammar: what is accepted, what each form accepts, and what objections name."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.grammar.source import grammar_source
from penstock.engine.sampling_params import MAX_GRAMMAR_DEPTH, InvalidRequest, StructuredOutputs
from tests.support.grammar_rig import accepts, matcher
from tests.support.refusals import table

# form, what it accepts whole, what it does not
_DATA = json.loads(Path(__file__).with_name("source.json").read_text())
CORPUS: list[Any] = _DATA["corpus"]


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
        grammar_source(StructuredOutputs(**form))
    assert caught.value.field == field

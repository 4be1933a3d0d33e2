"""From what is asked for to a grammar: what is accepted, what each form accepts, and what objections name."""

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from penstock.engine.grammar.source import grammar_source
from penstock.engine.grammar.vocabulary import GrammarVocabulary
from penstock.engine.sampling_params import MAX_GRAMMAR_DEPTH, InvalidRequest, StructuredOutputs
from tests.support.fake_engine import byte_tokenizer
from tests.support.grammar_rig import accepts, matcher
from tests.support.refusals import table

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}
TAGS = {
    "structures": [
        {"begin": "<f=add>", "schema": {"type": "object", "properties": {"x": {"enum": [1, 2]}}}, "end": "</f>"},
        {"begin": "<f=now>", "schema": {"const": None}, "end": "</f>"},
        {"begin": "[", "schema": {"type": "integer"}, "end": "]"},
    ],
    "triggers": ["<f=", "["],
}
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
    assert accepts(matcher(json=PERSON), '{\n\t"name": "Ann"\n}')
    assert not accepts(matcher(json=PERSON), '{  "name": "Ann"}')
    assert not accepts(matcher(json=PERSON), '{\n\n"name": "Ann"}')


@pytest.mark.parametrize(("form", "field", "words"), table(__file__, "sources", MAX_GRAMMAR_DEPTH=MAX_GRAMMAR_DEPTH))
def test_an_objection_names_the_field_and_says_what_is_wrong(form: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_source(StructuredOutputs(**form))
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=words) as caught:
        grammar_source(StructuredOutputs(**form), field="response_format.json_schema.schema")
    assert caught.value.field == "response_format.json_schema.schema"


def test_a_trigger_that_is_a_special_token_is_that_token_and_not_its_letters() -> None:
    tag = {"structures": [{"begin": "<|call|>f", "schema": {"type": "integer"}}], "triggers": ["<|call|>"]}
    wanted = StructuredOutputs(structural_tag=tag)
    assert '"<|call|>"' in grammar_source(wanted)
    assert "text_0: TEXT <[7]>" in grammar_source(wanted, {"<|call|>": 7})


@pytest.mark.parametrize("trigger", ["[TOOL_CALLS]", "<|x y|>", "<|call|>", "<call>"])
def test_a_trigger_that_is_a_special_token_may_be_written_in_any_way(trigger: str) -> None:
    tokenizer = byte_tokenizer(trigger)
    tag = {"structures": [{"begin": f"{trigger}f", "schema": {"type": "integer"}, "end": ";"}], "triggers": [trigger]}
    source = grammar_source(StructuredOutputs(structural_tag=tag), tokenizer.special_texts)
    matcher = LLMatcher(GrammarVocabulary.of(tokenizer, tokenizer.vocab_size).backend, source)
    for text, is_right in ((f"text {trigger}f12; more", True), (f"{trigger}g", False)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.special_texts[trigger] in ids
        assert (matcher.validate_tokens(ids) == len(ids)) == is_right
